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
from itertools import product
from typing import TYPE_CHECKING, Final, Protocol

import torch

from streamsync.layout.region import Box
from streamsync.layout.scratch import Scratch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

FP8_MAX: Final = 448.0
"""The largest finite float8_e4m3fn."""

_TILE_NUMEL: Final = 1 << 18
"""Elements worked on at once: as float32 they stay in a core's cache. A block larger than this is
worked on whole."""


class Read(Protocol):
    """Where the values to quantise come from."""

    def __call__(self, start: tuple[int, ...], out: torch.Tensor) -> None:
        """Writes the elements from `start` on, as many as `out` has in each dim, to `out`."""


_scratch = Scratch()


class Quantiser:
    """Quantises boxes of `shape` that begin at a block's corner and end at one or at the tensor's
    edge; `block` has one length per dim.

    Allocates nothing that lasts but 2 MiB of scratch (two blocks, if they are larger) per thread,
    and nothing else that is larger than one number per block of a tile.
    """

    def __init__(self, shape: Sequence[int], block: Sequence[int]) -> None:
        self._shape = tuple(shape)
        self._block = tuple(min(b, max(n, 1)) for b, n in zip(block, shape, strict=True))
        self.grid = _blocks(self._shape, self._block)
        """How many blocks it has in each dim."""

    def run(
        self,
        read: Read,
        device: torch.device,
        *,
        values: Iterable[tuple[tuple[int, ...], torch.Tensor]] = (),
        scales: Iterable[tuple[tuple[int, ...], torch.Tensor]] = (),
    ) -> None:
        """Writes `values` (float8_e4m3fn) and `scales` (float32): each is a corner, counted in
        elements or in blocks, and a tensor for the part of the box that begins there, of any
        strides and on any device."""
        values, scales = list(values), list(scales)
        with torch.no_grad():
            for start, shape in tiles(self._shape, self._block):
                grid = _blocks(shape, self._block)
                tile, blocks, scale = self._scaled(read, start, shape, grid, device)
                if scales:
                    first = tuple(a // b for a, b in zip(start, self._block, strict=True))
                    stored = scale.view(grid).reciprocal()
                    for begin, target in scales:
                        _copy_common(stored, first, grid, target, begin)
                if values:
                    torch.mul(blocks, scale, out=blocks).clamp_(-FP8_MAX, FP8_MAX)
                    for begin, target in values:
                        _copy_common(tile, start, shape, target, begin)

    def _scaled(
        self,
        read: Read,
        start: tuple[int, ...],
        shape: tuple[int, ...],
        grid: tuple[int, ...],
        device: torch.device,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One tile as float32, filled up with zeros to whole blocks; the same as
        `[blocks, block, blocks, block, ...]`, and the scale of each block in that shape."""
        padded = tuple(g * b for g, b in zip(grid, self._block, strict=True))
        tile = _scratch.get(0, padded, torch.float32, device)
        for d, (n, whole) in enumerate(zip(shape, padded, strict=True)):
            if n < whole:
                tile.narrow(d, n, whole - n).zero_()
        read(start, tile[_slices((0,) * len(shape), shape)])
        blocks = tile.view([n for pair in zip(grid, self._block, strict=True) for n in pair])
        size = torch.abs(blocks, out=_scratch.get(1, tuple(blocks.shape), torch.float32, device))
        amax = size.amax(dim=tuple(range(1, blocks.dim(), 2)), keepdim=True)
        scale = FP8_MAX / amax
        scale.masked_fill_(~((amax > 0) & scale.isfinite()), 1.0)
        return tile, blocks, scale


def tiles(
    shape: Sequence[int], block: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cuts a box of `shape` into tiles that a core's cache holds, each of whole blocks (or up to
    the edge): their corners and shapes."""
    room = max(1, _TILE_NUMEL // math.prod(block))
    steps = list(block)
    for d in reversed(range(len(block))):
        num_blocks = min(room, max(1, -(-shape[d] // block[d])))
        steps[d] = num_blocks * block[d]
        room = max(1, room // num_blocks)
    ranges = [range(0, n, step) for n, step in zip(shape, steps, strict=True)]
    for start in product(*ranges):
        yield (
            start,
            tuple(min(step, n - a) for a, n, step in zip(start, shape, steps, strict=True)),
        )


def _blocks(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-n // b) for n, b in zip(shape, block, strict=True))


def _slices(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def _copy_common(
    tile: torch.Tensor,
    start: tuple[int, ...],
    shape: tuple[int, ...],
    target: torch.Tensor,
    begin: tuple[int, ...],
) -> None:
    """Copies to `target`, whose corner is `begin`, what a tile of `shape` at `start` has of it."""
    common = Box(start, shape).intersect(Box(begin, tuple(target.shape)))
    if common is not None:
        ours = tuple(a - b for a, b in zip(common.start, start, strict=True))
        theirs = tuple(a - b for a, b in zip(common.start, begin, strict=True))
        target[_slices(theirs, common.shape)].copy_(tile[_slices(ours, common.shape)])
