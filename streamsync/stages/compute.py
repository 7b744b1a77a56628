"""Pieces that a source computes instead of copying: quantised ones, and those of a `Computation`.

All pieces of a bucket that are made of one box of a source tensor (a weight's values and its
scales) are made together, in tiles that stay in a core's cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from streamsync.layout.binding import Binding, torch_dtype
from streamsync.layout.region import Box
from streamsync.stages.quantise import Quantiser, tiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streamsync.layout.computation import Computation
    from streamsync.layout.region import View
    from streamsync.plan.plan import Piece, Share, SharedTensor


@dataclass(slots=True, frozen=True)
class Origin:
    """A box of a source tensor: its live memory, and what its values are computed with, if not
    simply read."""

    box: Box
    live: torch.Tensor
    computation: Computation | None

    def read(self, start: tuple[int, ...], out: torch.Tensor) -> None:
        """Writes the values from `start` on (counted from the box's corner) to `out`, whose shape
        says how many."""
        live = self.live[tuple(slice(a, a + n) for a, n in zip(start, out.shape, strict=True))]
        if self.computation is None:
            out.copy_(live)
        else:
            corner = tuple(a + b for a, b in zip(self.box.start, start, strict=True))
            self.computation.compute(Box(corner, tuple(out.shape)), live, out)


@dataclass(slots=True, frozen=True)
class _Target:
    """A piece's place in the payload: `payload[start:stop]` is of `dtype` and `shape` (scales: one
    number per block); `begin` is its corner, counted from that of the origin's box."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: tuple[int, ...]

    def of(self, payload: torch.Tensor) -> torch.Tensor:
        return payload[self.start : self.stop].view(self.dtype).view(self.shape)


@dataclass(slots=True)
class Work:
    """What is made of one origin: `plain` pieces in its own or another dtype, quantised `values`,
    and the `scales` of its blocks."""

    origin: Origin
    quantiser: Quantiser | None
    plain: list[_Target] = field(default_factory=list)
    values: list[_Target] = field(default_factory=list)
    scales: list[_Target] = field(default_factory=list)

    def run(self, payload: torch.Tensor) -> None:
        """Writes all pieces to `payload` (uint8 `[bucket.nbytes]`). In an executor's thread."""
        with torch.no_grad():
            for target in self.plain:
                out = target.of(payload)
                for start, shape in tiles(target.shape, (1,) * len(target.shape)):
                    self.origin.read(start, _part(out, start, shape))
            if self.quantiser is not None:
                self.quantiser.run(
                    self.origin.read,
                    self.origin.live.device,
                    values=[(target.begin, target.of(payload)) for target in self.values],
                    scales=[(target.begin, target.of(payload)) for target in self.scales],
                )


def is_computed(tensor: SharedTensor, binding: Binding) -> bool:
    """Whether a source computes the pieces of `tensor`."""
    return tensor.conversion is not None or computation_of(tensor, binding) is not None


def computation_of(tensor: SharedTensor, binding: Binding) -> Computation | None:
    """What the values of the source tensor behind `tensor` are computed with, if they are."""
    name = tensor.source_name
    return binding.computed.get(binding.layout.ties.get(name, name))


def prepare_works(
    share: Share, pieces: Sequence[tuple[Piece, View]], binding: Binding
) -> list[Work]:
    """The works that make `pieces`, all computed and of one bucket, out of their views (of their
    source boxes)."""
    works: dict[tuple[str, Box, tuple[int, ...] | None], Work] = {}
    for piece, view in pieces:
        tensor = share.tensors[piece.tensor]
        conversion = tensor.conversion
        box = piece.box if conversion is None else conversion.source_box(piece.box)
        block = None if conversion is None else conversion.block
        work = works.get((tensor.source_name, box, block))
        if work is None:
            live = binding.view(view, box.shape, torch_dtype(tensor.source_dtype))
            origin = Origin(box, live, computation_of(tensor, binding))
            quantiser = None if block is None else Quantiser(box.shape, block)
            work = works[tensor.source_name, box, block] = Work(origin, quantiser)
        dtype = torch_dtype(tensor.wire_dtype)
        stop = piece.offset + piece.box.numel * dtype.itemsize
        targets, shape, begin = work.plain, piece.box.shape, (0,) * len(box.start)
        if conversion is not None and conversion.part == "scales":
            targets, shape = work.scales, conversion.blocks(piece.box).shape
        elif conversion is not None:
            targets = work.values
            begin = tuple(a - b for a, b in zip(piece.box.start, box.start, strict=True))
        targets.append(_Target(piece.offset, stop, dtype, shape, begin))
    return list(works.values())


def _part(tensor: torch.Tensor, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
