"""Ranks that hold boxes of global tensors, for tests of resharding."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from streamsync.layout.binding import Binding, dtype_name
from streamsync.layout.region import Box, Entry, Layout, TensorSpec, View

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Rank:
    """One rank's memory: `parts` are the boxes it holds, by name, each in memory of its own."""

    def __init__(self) -> None:
        self.parts: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        self._specs: list[TensorSpec] = []
        self._entries: list[Entry] = []
        self._storages: list[torch.Tensor] = []

    def add(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, boxes: Iterable[Box]
    ) -> None:
        """Lists a tensor and allocates `boxes` of it, full of rubbish."""
        parts: list[tuple[Box, torch.Tensor]] = []
        for box in boxes:
            memory = torch.empty(box.shape, dtype=dtype)
            memory.view(-1).view(torch.uint8).fill_(0x35)
            view = View(len(self._storages), 0, memory.stride())
            self._entries.append(Entry(len(self._specs), box, view))
            self._storages.append(memory)
            parts.append((box, memory))
        self._specs.append(TensorSpec(name, shape, dtype_name(dtype)))
        self.parts[name] = parts

    def binding(self) -> Binding:
        layout = Layout(tensors=tuple(self._specs), entries=tuple(self._entries))
        return Binding(layout=layout, storages=tuple(self._storages))

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes its boxes of the whole `tensors`."""
        for name, parts in self.parts.items():
            for box, memory in parts:
                memory.copy_(within(tensors[name], box))

    def wrong(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Where it does not hold, bit for bit, its boxes of the whole `tensors`."""
        return [
            f"{name}{box}"
            for name, parts in self.parts.items()
            for box, memory in parts
            if not torch.equal(_bytes(memory), _bytes(within(tensors[name], box)))
        ]


def within(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The elements of a whole tensor in `box`."""
    return tensor[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]


def slices(shape: tuple[int, ...], dim: int, cuts: Iterable[int]) -> list[Box]:
    """The whole of `shape`, cut along `dim` before each of `cuts` (ascending)."""
    ends = [0, *cuts, shape[dim]]
    return [
        Box(
            (0,) * dim + (a,) + (0,) * (len(shape) - dim - 1),
            (*shape[:dim], b - a, *shape[dim + 1 :]),
        )
        for a, b in pairwise(ends)
    ]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
