"""Buckets: sizes, order, alignment; and who sends what."""

from __future__ import annotations

import pytest

from streamsync.layout.region import Box, View, contiguous_strides
from streamsync.plan.balance import balance
from streamsync.plan.schedule import Draft, alignment, schedule


def draft(group: int, tensor: int, shape: tuple[int, ...], itemsize: int = 1) -> Draft:
    box = Box.whole(shape)
    view = View(tensor, 0, contiguous_strides(shape))
    return Draft(group, tensor, box, itemsize, box, view, box, view)


@pytest.mark.parametrize(
    ("numel", "sizes"),
    [(63, [63]), (64, [64]), (65, [64, 1]), (224, [64, 64, 64, 32])],
)
def test_a_tensor_around_the_size_of_a_bucket(numel: int, sizes: list[int]) -> None:
    """Case 22: bucket - 1, bucket, bucket + 1 and 3.5 x bucket bytes."""
    assert [load.nbytes for load in schedule([draft(0, 0, (numel,))], 64)] == sizes


def test_a_bucket_holds_at_least_one_element() -> None:
    """Case 6: from 1 byte upwards."""
    assert [load.nbytes for load in schedule([draft(0, 0, (3,), 4)], 1)] == [4, 4, 4]


def test_a_bucket_never_mixes_groups_and_keeps_forward_order() -> None:
    drafts = [draft(2, 5, (8,)), draft(0, 1, (8,)), draft(1, 2, (8,)), draft(0, 0, (8,))]
    loads = schedule(drafts, 1000)
    assert [(load.group, [d.tensor for d in load.drafts]) for load in loads] == [
        (0, [0, 1]),
        (1, [2]),
        (2, [5]),
    ]


def test_the_end_of_a_cut_tensor_shares_its_bucket() -> None:
    loads = schedule([draft(0, 0, (70,)), draft(0, 1, (30,))], 64)
    assert [load.nbytes for load in loads] == [64, 36]


def test_well_aligned_pieces_come_first_and_small_ones_together() -> None:
    shapes = [(3,), (16,), (4,), (2,), (8192,), (8,)]
    (load,) = schedule([draft(0, i, shape) for i, shape in enumerate(shapes)], 1 << 20)
    assert [d.tensor for d in load.drafts] == [4, 1, 5, 2, 3, 0]
    assert load.offsets == [0, 8192, 8208, 8216, 8220, 8222]
    for d, offset in zip(load.drafts, load.offsets, strict=True):
        assert offset % alignment(d.box, d.itemsize) == 0


def test_alignment_is_that_of_rows() -> None:
    assert alignment(Box.whole((4, 3)), 2) == 2
    assert alignment(Box((0, 2), (4, 4)), 2) == 4
    assert alignment(Box.whole(()), 4) == 4
    assert alignment(Box.whole((5, 1)), 8) == 8


def test_balance_uses_free_choices_to_even_out_fixed_ones() -> None:
    holders = [["a"], ["a", "b"], ["a", "b"], ["b", "a"]]
    assert balance([10, 4, 4, 2], holders) == [0, 1, 1, 0]
    assert balance([], []) == []


def test_balance_places_the_largest_first() -> None:
    assert balance([1, 1, 4, 1, 1], [["a", "b"]] * 5) == [1, 1, 0, 1, 1]
