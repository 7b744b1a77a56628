"""Random boxes and strided views against torch's own slicing and copying."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamsync.errors import LayoutError
from streamsync.layout.region import Box, View, contiguous_strides
from streamsync.layout.strided import align

small_shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    start = tuple(draw(st.integers(0, n - 1)) if n else 0 for n in shape)
    return Box(start, tuple(draw(st.integers(0, n - a)) for n, a in zip(shape, start, strict=True)))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def painted(shape: tuple[int, ...], boxes: list[Box]) -> torch.Tensor:
    count = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        count[slices(box)] += 1
    return count


@given(st.data())
def test_subtract_and_intersect_partition(data: st.DataObject) -> None:
    shape = data.draw(small_shapes)
    one, two = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    common = one.intersect(two)
    rest = one.subtract(two)
    assert len(rest) <= 2 * max(len(shape), 1)
    assert all(box.numel for box in rest)
    assert torch.equal(
        painted(shape, [*rest, *([common] if common else [])]), painted(shape, [one])
    )
    both = painted(shape, [one]) * painted(shape, [two])
    assert torch.equal(painted(shape, [common] if common else []), both)
    assert one.contains(two) == (bool((painted(shape, [two]) <= painted(shape, [one])).all()))


@given(st.data())
def test_cut_partitions_in_row_major_order(data: st.DataObject) -> None:
    shape = data.draw(small_shapes)
    box = data.draw(boxes_in(shape))
    max_numel = data.draw(st.integers(1, 40))
    parts = list(box.cut(max_numel))
    assert all(part.numel <= max_numel for part in parts)
    assert torch.equal(painted(shape, parts), painted(shape, [box]))
    index = torch.arange(math.prod(shape)).reshape(shape)
    order = [i for part in parts for i in index[slices(part)].reshape(-1).tolist()]
    assert order == index[slices(box)].reshape(-1).tolist()


@st.composite
def views(draw: st.DrawFn, tensor: torch.Tensor, *, expand: bool) -> torch.Tensor:
    """A random chain of view operations on `tensor`."""
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["slice", "permute", "flatten", "split", "select", "expand"]))
        dims = tensor.ndim
        if kind == "permute" and dims:
            tensor = tensor.permute(draw(st.permutations(range(dims))))
        elif kind == "slice" and dims:
            d = draw(st.integers(0, dims - 1))
            if tensor.shape[d]:
                a = draw(st.integers(0, tensor.shape[d] - 1))
                b = draw(st.integers(a + 1, tensor.shape[d]))
                step = draw(st.integers(1, 3))
                tensor = tensor[(slice(None),) * d + (slice(a, b, step),)]
        elif kind == "select" and dims:
            d = draw(st.integers(0, dims - 1))
            tensor = tensor.select(d, draw(st.integers(0, tensor.shape[d] - 1)))
        elif kind == "flatten" and dims > 1:
            d = draw(st.integers(0, dims - 2))
            try:
                tensor = tensor.view(
                    *tensor.shape[:d], tensor.shape[d] * tensor.shape[d + 1], *tensor.shape[d + 2 :]
                )
            except RuntimeError:
                continue
        elif kind == "split" and dims:
            d = draw(st.integers(0, dims - 1))
            n = draw(st.sampled_from([k for k in range(1, 7) if tensor.shape[d] % k == 0]))
            tensor = tensor.unflatten(d, (n, tensor.shape[d] // n))
        elif kind == "expand" and expand:
            tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape)
    return tensor


@given(st.data())
def test_within_addresses_the_slice(data: st.DataObject) -> None:
    """Case 23: a part of any strided view, by address, is torch's slice of it."""
    base = torch.arange(data.draw(st.integers(1, 60)))
    view = data.draw(views(base, expand=True))
    outer = Box(tuple(data.draw(st.integers(0, 3)) for _ in view.shape), tuple(view.shape))
    part = data.draw(boxes_in(outer.shape))
    inner = Box(tuple(a + b for a, b in zip(outer.start, part.start, strict=True)), part.shape)
    place = View(0, int(view.storage_offset()), tuple(view.stride())).within(outer, inner)
    assert torch.equal(base.as_strided(part.shape, place.strides, place.offset), view[slices(part)])
    assert place.is_contiguous(part.shape) == view[slices(part)].is_contiguous()


@given(st.data())
def test_align_equals_the_copy(data: st.DataObject) -> None:
    """Any view of a tensor copied into any view of another: the boxes make the same copy."""
    whole = data.draw(small_shapes)
    source = torch.arange(1, 1 + math.prod(whole)).reshape(whole)
    view = data.draw(views(source, expand=True))
    # The other memory: any view with as many elements as that shape has, gaps and order random.
    gap = data.draw(st.integers(1, 3))
    order = data.draw(st.permutations(range(view.ndim)))
    permuted = tuple(view.shape[d] for d in order)
    strides = [0] * view.ndim
    for d, stride in zip(order, contiguous_strides(permuted), strict=True):
        strides[d] = stride * gap
    offset = data.draw(st.integers(0, 4))
    memory = torch.zeros(offset + gap * max(view.numel(), 1) + 1, dtype=torch.int64)
    expected = memory.clone()
    expected.as_strided(view.shape, strides, offset).copy_(view)

    at = View(0, int(view.storage_offset()), tuple(view.stride()))
    written = torch.zeros_like(memory)
    found = align(whole, tuple(view.shape), at, View(3, offset, tuple(strides)))
    for box, place in found:
        assert place.storage == 3
        memory.as_strided(box.shape, place.strides, place.offset).copy_(source[slices(box)])
        written.as_strided(box.shape, place.strides, place.offset).add_(1)
    assert torch.equal(memory, expected)
    assert written.sum() == view.numel()
    assert written.max() <= 1


@pytest.mark.parametrize(
    ("whole", "shape", "at", "other", "num_boxes"),
    [
        ((4, 6), (4, 6), View(0, 0, (6, 1)), View(0, 0, (6, 1)), 1),
        ((4, 6), (24,), View(0, 0, (1,)), View(0, 0, (1,)), 1),  # flattened
        ((4, 6), (6, 4), View(0, 0, (1, 6)), View(0, 0, (4, 1)), 1),  # transposed
        ((8, 6), (2, 2, 2, 6), View(0, 0, (24, 12, 6, 1)), View(0, 0, (24, 12, 6, 1)), 1),
        # Rows of two groups, each group elsewhere: as many boxes as groups, not as rows.
        ((8, 6), (2, 4, 6), View(0, 0, (24, 6, 1)), View(0, 0, (48, 6, 1)), 2),
        ((4, 6), (13,), View(0, 3, (1,)), View(0, 0, (1,)), 3),  # head, rows, tail
        ((8, 6), (4, 6), View(0, 6, (12, 1)), View(0, 0, (6, 1)), 4),  # every second row
        ((1, 4, 1, 6), (4, 6), View(0, 0, (6, 1)), View(0, 0, (6, 1)), 1),
        ((), (), View(0, 0, ()), View(0, 0, ()), 1),
        ((1,), (3,), View(0, 0, (0,)), View(0, 0, (1,)), 3),  # broadcast
        ((0, 4), (0, 4), View(0, 0, (4, 1)), View(0, 0, (4, 1)), 0),
    ],
)
def test_number_of_boxes(
    whole: tuple[int, ...], shape: tuple[int, ...], at: View, other: View, num_boxes: int
) -> None:
    assert len(align(whole, shape, at, other)) == num_boxes


def test_scattered_elements_are_refused() -> None:
    with pytest.raises(LayoutError, match="boxes"):
        align((1 << 18,), (1 << 17,), View(0, 0, (2,)), View(0, 0, (1,)))
