"""Cutting an arbitrary strided view of a row-major tensor into boxes of it. Pure."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from streamsync.errors import LayoutError
from streamsync.layout.region import Box, View, contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BOXES = 1 << 16
"""More boxes than this for one view mean that it moves single elements about: no layout."""

_Dim = tuple[int, int, int]
"""Stride in the whole, stride in the other memory, length."""


def align(
    whole: tuple[int, ...], shape: tuple[int, ...], at: View, other: View
) -> list[tuple[Box, View]]:
    """Expresses a correspondence of two views as boxes of a tensor and the other's view of each.

    `at` and `other` both are views of `shape`; `at` lies in a row-major tensor of shape `whole`
    (its `storage` is not looked at). Every pair `(box, view)` of the answer says: this box of the
    tensor corresponds, element by element, to `view` of `other`'s memory; together they are the
    same pairs of elements, each once. Views that split, merge, permute, step over or broadcast
    dims are cut into as many boxes as that takes. Raises `LayoutError` above `MAX_BOXES`.
    """
    if math.prod(shape) == 0:
        return []
    found: list[tuple[Box, View]] = []
    steps = contiguous_strides(whole)
    corner = tuple(at.offset // s % max(n, 1) for s, n in zip(steps, whole, strict=True))
    if len(shape) == len(whole) and all(
        (stride == step or n == 1) and a + n <= length
        for stride, step, n, a, length in zip(at.strides, steps, shape, corner, whole, strict=True)
    ):
        return [(Box(corner, shape), other)]  # nearly always: a box as it is
    dims = [d for d in zip(at.strides, other.strides, shape, strict=True) if d[2] > 1]
    # Dims of length 1 have the stride of a neighbour and would only confuse which dim is meant.
    axes = [d for d in range(len(whole)) if whole[d] > 1]
    walks = [(steps[d], whole[d]) for d in axes]
    for dims_left, start, offset in _cut(dims, at.offset, other.offset, walks):
        if len(found) == MAX_BOXES:
            raise LayoutError(
                f"a view of shape {shape} and strides {at.strides} of a tensor of shape {whole} "
                f"falls into more than {MAX_BOXES} boxes"
            )
        corner = tuple(start // steps[d] % whole[d] for d in range(len(whole)))
        lengths, strides = [1] * len(whole), [1] * len(whole)
        for step, stride, n in dims_left:
            axis = next(d for d in axes if steps[d] == step)
            lengths[axis], strides[axis] = n, stride
        found.append((Box(corner, tuple(lengths)), View(other.storage, offset, tuple(strides))))
    return found


def _cut(
    dims: list[_Dim], start: int, offset: int, axes: list[tuple[int, int]]
) -> Iterator[tuple[list[_Dim], int, int]]:
    """Yields dims of which each walks along an axis of its own, by ones and not beyond its end."""
    dims = _merged(dims, axes)
    taken: set[int] = set()
    walking: list[_Dim] = []
    unrolled: list[_Dim] = []
    for dim in sorted(dims, key=lambda d: -d[2]):
        if 0 < dim[0] == _step(dim[0], axes) and dim[0] not in taken:
            taken.add(dim[0])
            walking.append(dim)
        else:
            unrolled.append(dim)
    for index in itertools.product(*(range(n) for _, _, n in unrolled)):
        a = start + sum(i * step for i, (step, _, _) in zip(index, unrolled, strict=True))
        b = offset + sum(i * stride for i, (_, stride, _) in zip(index, unrolled, strict=True))
        yield from _cut_at_ends(walking, a, b, axes)


def _cut_at_ends(
    dims: list[_Dim], start: int, offset: int, axes: list[tuple[int, int]]
) -> Iterator[tuple[list[_Dim], int, int]]:
    for position, (step, stride, n) in enumerate(dims):
        length = dict(axes)[step]
        at = start // step % length
        if at + n <= length:
            continue
        rest = dims[:position] + dims[position + 1 :]
        head = (length - at) % length
        rows, tail = divmod(n - head, length)
        for done, lines, columns in ((0, 1, head), (head, rows, length), (n - tail, 1, tail)):
            if lines and columns:
                block = [(step * length, stride * length, lines), (step, stride, columns)]
                dims_left = rest + [d for d in block if d[2] > 1]
                yield from _cut(dims_left, start + done * step, offset + done * stride, axes)
        return
    yield dims, start, offset


def _step(step: int, axes: list[tuple[int, int]]) -> int:
    """The stride of the outermost axis that a walk with `step` follows; 0 for a broadcast."""
    return next((s for s, _ in axes if s <= step and step % s == 0), 0)


def _merged(dims: list[_Dim], axes: list[tuple[int, int]]) -> list[_Dim]:
    """Joins dims that continue each other along one axis in both memories."""
    dims = sorted(dims, key=lambda d: -d[0])
    merged: list[_Dim] = []
    for step, stride, n in reversed(dims):
        if merged:
            inner_step, inner_stride, inner_n = merged[-1]
            if (step, stride) == (inner_step * inner_n, inner_stride * inner_n) and _step(
                step, axes
            ) == _step(inner_step, axes) != 0:
                merged[-1] = (inner_step, inner_stride, inner_n * n)
                continue
        merged.append((step, stride, n))
    return merged
