"""Cutting a sink's box along the boxes of its sources."""

from __future__ import annotations

from streamsync.layout.region import Box
from streamsync.plan.cover import extent, first_overlap, split, without
from streamsync.plan.sources import Holding


def held(holders: int, start: tuple[int, int], shape: tuple[int, int]) -> Holding:
    return Holding(Box(start, shape), holders)


def test_equal_boxes_are_not_cut() -> None:
    need = Box((0, 0), (4, 4))
    parts, covered = split(need, [held(0, (0, 0), (4, 4)), held(1, (0, 0), (8, 8))])
    assert covered
    assert [(box, [h.holders for h in hs]) for box, hs in parts] == [(need, [0, 1])]


def test_unequal_boxes_are_cut_where_the_holders_change() -> None:
    need = Box((0, 0), (4, 4))
    parts, covered = split(need, [held(0, (0, 0), (3, 4)), held(1, (2, 0), (2, 4))])
    assert covered
    assert [(str(box), [h.holders for h in hs]) for box, hs in parts] == [
        ("[0:2, 0:4]", [0]),
        ("[2:3, 0:4]", [0, 1]),
        ("[3:4, 0:4]", [1]),
    ]


def test_a_grid_of_shards_covers() -> None:
    grid = [held(2 * r + c, (2 * r, 2 * c), (2, 2)) for r in range(2) for c in range(2)]
    need = Box((1, 1), (2, 2))
    parts, covered = split(need, grid)
    assert covered
    assert [box.numel for box, _ in parts] == [1, 1, 1, 1]
    assert not split(need, grid[1:])[1]


def test_slices_with_a_gap_or_short_of_the_end_do_not_cover() -> None:
    need = Box((0, 0), (6, 2))
    assert not split(need, [held(0, (0, 0), (2, 2)), held(1, (3, 0), (3, 2))])[1]
    assert not split(need, [held(0, (0, 0), (2, 2)), held(1, (2, 0), (3, 2))])[1]
    assert not split(need, [])[1]
    twice = [held(0, (0, 0), (2, 2)), held(1, (1, 0), (2, 2)), held(2, (4, 0), (2, 2))]
    assert not split(need, twice)[1], "as many elements as needed, but not the needed ones"


def test_overlaps_are_found_along_any_dim() -> None:
    columns = [Box((0, c), (4, 1)) for c in range(5)]
    assert first_overlap(columns) is None
    assert first_overlap([*columns, Box((3, 2), (9, 1))]) == Box((3, 2), (1, 1))
    assert first_overlap([Box((), ()), Box((), ())]) == Box((), ())
    assert first_overlap([]) is None


def test_what_is_missing() -> None:
    assert without(Box((0,), (10,)), [Box((2,), (3,)), Box((4,), (2,))]) == [
        Box((0,), (2,)),
        Box((6,), (4,)),
    ]
    assert extent(Box((2, 0), (3, 4)), (9, 4)) == "rows 2:5 of 9"
    assert extent(Box((2, 1), (3, 3)), (9, 4)) == "box [2:5, 1:4]"
    assert extent(Box((), ()), ()) == "everything"
