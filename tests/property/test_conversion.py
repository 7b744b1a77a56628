"""Conversions by geometry, and whole plans of them: any cut on either side gives the same bytes."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from streamsync.layout.region import Box
from streamsync.plan.conversion import Conversion


def boxes_in(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    """Boxes of a tensor that are not empty."""
    cuts = [
        st.tuples(st.integers(0, n - 1), st.integers(1, n)).map(
            lambda p: (min(p[0], p[1] - 1), max(p[0] + 1, p[1]))
        )
        for n in shape
    ]
    return st.tuples(*cuts).map(
        lambda dims: Box(tuple(a for a, _ in dims), tuple(z - a for a, z in dims))
    )


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(a, z) for a, z in zip(box.start, box.stop, strict=True))))


@st.composite
def geometries(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = draw(st.lists(st.integers(1, 9), min_size=2, max_size=3).map(tuple))
    block = tuple(min(draw(st.integers(1, 5)), n) for n in shape[-2:])
    return shape, (1,) * (len(shape) - 2) + block


@given(st.data(), geometries())
def test_a_piece_is_made_of_exactly_the_blocks_that_it_touches(
    data: st.DataObject, geometry: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    shape, block = geometry
    values = Conversion("values", shape, block)
    piece = data.draw(boxes_in(shape))
    touched = {tuple(i // b for i, b in zip(e, block, strict=True)) for e in elements(piece)}
    assert elements(values.blocks(piece)) == touched
    needed = elements(values.source_box(piece))
    assert needed == {
        e
        for e in elements(Box.whole(shape))
        if tuple(i // b for i, b in zip(e, block, strict=True)) in touched
    }
    scales = Conversion("scales", shape, block)
    assert scales.source_box(values.blocks(piece)) == values.source_box(piece)


@given(st.data(), geometries())
def test_a_shard_can_make_exactly_the_blocks_that_it_holds_whole(
    data: st.DataObject, geometry: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    shape, block = geometry
    values = Conversion("values", shape, block)
    held = data.draw(boxes_in(shape))
    whole = {
        index
        for index in elements(Box.whole(values.grid))
        if elements(values.elements(Box(index, (1,) * len(index)))) <= elements(held)
    }
    found = values.whole_blocks(held)
    assert (set() if found is None else elements(found)) == whole


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_scales_of_rows_may_lack_their_last_dim(
    rows: int, columns: int, data: st.DataObject
) -> None:
    scales = Conversion("scales", (rows, columns), (1, columns))
    assert scales.wire_shapes == ((rows, 1), (rows,))
    box = data.draw(boxes_in((rows,)))
    wide = Box((*box.start, 0), (*box.shape, 1))
    assert scales.source_box(box) == scales.source_box(wide)
    assert scales.wire_box(wide, 1) == box
