"""Boxes, strided views and layouts: the geometry that every parallelism reduces to. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from streamsync.errors import LayoutError
from streamsync.types import DTYPE_ITEMSIZES

if TYPE_CHECKING:
    from collections.abc import Iterator


class Box(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A rectangle of a global tensor: `start[d] <= index[d] < start[d] + shape[d]` for each dim d.

    A scalar's box has no dims and one element. A box with a zero in `shape` is empty and legal.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The box that covers a global tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """First index after the box, per dim."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None when no element is common."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` lies in this box (an empty box always does)."""
        return other.numel == 0 or self.intersect(other) == other

    def subtract(self, other: Box) -> list[Box]:
        """This box without `other`, as disjoint boxes: at most two per dim."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.numel else []
        rest: list[Box] = []
        start, shape = list(self.start), list(self.shape)
        for d in range(len(shape)):
            for a, b in (
                (start[d], common.start[d]),
                (common.start[d] + common.shape[d], start[d] + shape[d]),
            ):
                if b > a:
                    rest.append(
                        Box((*start[:d], a, *start[d + 1 :]), (*shape[:d], b - a, *shape[d + 1 :]))
                    )
            start[d], shape[d] = common.start[d], common.shape[d]
        return rest

    def cut(self, max_numel: int) -> Iterator[Box]:
        """Splits into boxes of at most `max_numel` elements, in row-major order."""
        if self.numel <= max_numel:
            yield self
            return
        inner = self.numel // self.shape[0]
        if inner <= max_numel:
            rows = max_numel // inner
            for a in range(0, self.shape[0], rows):
                n = min(rows, self.shape[0] - a)
                yield Box((self.start[0] + a, *self.start[1:]), (n, *self.shape[1:]))
            return
        for a in range(self.shape[0]):
            for rest in Box(self.start[1:], self.shape[1:]).cut(max_numel):
                yield Box((self.start[0] + a, *rest.start), (1, *rest.shape))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


class View(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Where a box lives in local storage: element (i, j, ...) of the box, counted from the box's
    own corner, is element `offset + i * strides[0] + j * strides[1] + ...` of storage number
    `storage` (all in elements of the tensor's local dtype). A stride of 0 (an expanded source) is
    legal at a source only.
    """

    storage: int
    offset: int
    strides: tuple[int, ...]

    def within(self, outer: Box, inner: Box) -> View:
        """The view of `inner`, a part of `outer`, when this is the view of `outer`."""
        shift = sum(
            (b - a) * s for a, b, s in zip(outer.start, inner.start, self.strides, strict=True)
        )
        return View(self.storage, self.offset + shift, self.strides)

    def is_contiguous(self, shape: tuple[int, ...]) -> bool:
        """Whether a box of `shape` lies here as one run of memory in row-major order."""
        if 0 in shape:
            return True
        expected = 1
        for n, stride in zip(reversed(shape), reversed(self.strides), strict=True):
            if n != 1 and stride != expected:
                return False
            expected *= n
        return True


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of `shape`, in elements."""
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A global tensor: its canonical (Hugging Face checkpoint) name, global shape, local dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        try:
            return DTYPE_ITEMSIZES[self.dtype]
        except KeyError:
            raise LayoutError(f"dtype {self.dtype} can't travel", tensor=self.name) from None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole global tensor."""
        return math.prod(self.shape) * self.itemsize


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One box of one tensor and the local view that holds it. `tensor` indexes `Layout.tensors`."""

    tensor: int
    box: Box
    view: View


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which boxes of which tensors one rank holds (a source) or needs (a sink), and where.

    The order of `tensors` is the order of the forward pass as far as the maker knows it. A source
    that holds nothing of a tensor may still list it (an empty shard). `ties` names tensors that
    share one local memory: `{alias: name}`; an alias has no entries of its own and its `tensors`
    item has the same shape and dtype. `opaque` names tensors that a sink needs whole, for its own
    loader: more than its share of them travels.
    """

    tensors: tuple[TensorSpec, ...]
    entries: tuple[Entry, ...]
    ties: dict[str, str] = {}
    opaque: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all entries in the local dtype."""
        return sum(e.box.numel * self.tensors[e.tensor].itemsize for e in self.entries)
