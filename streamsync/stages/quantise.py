"""Quantisation to float8_e4m3fn with one scale per block: the kernels of convert and of landings.

Definition, for each block of a tensor (a block at the tensor's edge is only as large as what is
there), all in float32 with one rounding per operation:

    amax  = max(|w|)
    scale = 448 / amax, or 1 where amax is 0 or the division overflows
    q     = float8_e4m3fn(clamp(w * scale, -448, 448))     round to nearest, ties to even
    s     = 1 / scale                                      stored: w is about q * s

So a block of zeros has q = 0 and s = 1. This is what `Fp8Quantize` of transformers computes;
DeepSeek-V3 checkpoints store `s` as `weight_scale_inv`. No result depends on how a tensor was cut,
as long as each cut sees whole blocks.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Final, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FP8_MAX: Final = 448.0
"""The largest finite float8_e4m3fn."""

_TILE_NUMEL: Final = 1 << 18
"""Elements worked on at once: as float32 they stay in a core's cache. A block larger than this is
worked on whole."""


class Read(Protocol):
    """Where the values to quantise come from."""

    def __call__(self, start: tuple[int, ...], out: torch.Tensor) -> None:
        """Writes the elements from `start` on, as many as `out` has in each dim, to `out`."""


class Quantiser:
    """Quantises boxes of `shape` that begin at a block's corner and end at one or at the tensor's
    edge; `block` has one length per dim, 1 for all but the last two. Keeps no memory but a scratch
    of 2 MiB (two blocks, if they are larger) per thread, which every quantiser of it shares.
    """

    def __init__(self, shape: Sequence[int], block: Sequence[int]) -> None:
        assert len(shape) == len(block) >= 1
        assert all(n == 1 for n in block[:-2])
        self._shape = tuple(shape)
        self._block = tuple(min(b, max(n, 1)) for b, n in zip(block, shape, strict=True))
        self.grid = tuple(-(-n // b) for n, b in zip(shape, self._block, strict=True))
        """How many blocks it has in each dim."""

    def run(
        self,
        read: Read,
        device: torch.device,
        *,
        values: torch.Tensor | None = None,
        begin: tuple[int, ...] | None = None,
        scales: torch.Tensor | None = None,
    ) -> None:
        """Writes `values` (float8_e4m3fn; the part of the box from `begin` on, all of it if None)
        and `scales` (float32 `[*grid]`), either of which may be None. Both may have any strides.
        """
        begin = begin or (0,) * len(self._shape)
        with torch.no_grad():
            for start, tile in self._tiles():
                self._one(read, device, start, tile, values, begin, scales)

    def _tiles(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Corner and shape of boxes of whole blocks that fill the whole."""
        steps = [1] * len(self._block)
        room = max(1, _TILE_NUMEL // math.prod(self._block))
        for d in reversed(range(len(steps))):
            steps[d] = min(room, max(self.grid[d], 1))
            room = max(1, room // steps[d])
        steps = [step * b for step, b in zip(steps, self._block, strict=True)]
        yield from _walk(self._shape, steps)

    def _one(
        self,
        read: Read,
        device: torch.device,
        start: tuple[int, ...],
        shape: tuple[int, ...],
        values: torch.Tensor | None,
        begin: tuple[int, ...],
        scales: torch.Tensor | None,
    ) -> None:
        grid = tuple(-(-n // b) for n, b in zip(shape, self._block, strict=True))
        padded = tuple(g * b for g, b in zip(grid, self._block, strict=True))
        wide, spare = _scratch.pair(math.prod(padded), device)
        tile = wide.view(padded)
        for d, (n, whole) in enumerate(zip(shape, padded, strict=True)):
            if n < whole:
                tile.narrow(d, n, whole - n).zero_()
        inner = tile[tuple(slice(n) for n in shape)]
        read(start, inner)
        blocks = wide.view([n for pair in zip(grid, self._block, strict=True) for n in pair])
        inside = tuple(range(1, blocks.dim(), 2))
        amax = torch.abs(blocks, out=spare.view(blocks.shape)).amax(dim=inside, keepdim=True)
        scale = FP8_MAX / amax
        scale.masked_fill_(~((amax > 0) & scale.isfinite()), 1.0)
        if scales is not None:
            first = tuple(a // b for a, b in zip(start, self._block, strict=True))
            where = tuple(slice(a, a + g) for a, g in zip(first, grid, strict=True))
            scales[where].copy_(scale.view(grid).reciprocal())
        if values is None:
            return
        torch.mul(blocks, scale, out=blocks).clamp_(-FP8_MAX, FP8_MAX)
        # The part of this tile that the values cover, from both points of view.
        low = [max(a, b) for a, b in zip(start, begin, strict=True)]
        high = [
            min(a + n, b + m) for a, n, b, m in zip(start, shape, begin, values.shape, strict=True)
        ]
        if all(a < b for a, b in zip(low, high, strict=True)):
            ours = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
            theirs = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, begin, strict=True))
            values[theirs].copy_(tile[ours])


def _walk(
    shape: Sequence[int], steps: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    if not shape:
        yield (), ()
        return
    for a in range(0, shape[0], steps[0]):
        n = min(steps[0], shape[0] - a)
        for start, rest in _walk(shape[1:], steps[1:]):
            yield (a, *start), (n, *rest)


class _Scratch(threading.local):
    """Two float32 buffers per thread and device, which grow to the largest tile and then stay."""

    def __init__(self) -> None:
        self._pairs: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def pair(self, numel: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        pair = self._pairs.get(device)
        if pair is None or pair[0].numel() < numel:
            size = max(numel, _TILE_NUMEL)
            one, other = (torch.empty(size, device=device) for _ in range(2))
            pair = self._pairs[device] = one, other
        return pair[0][:numel], pair[1][:numel]


_scratch = _Scratch()
