"""Buckets: sizes, order, alignment."""

from __future__ import annotations

import pytest

from streamsync.layout.region import Box
from streamsync.plan.schedule import Draft, alignment, cut, schedule


def draft(
    group: int, tensor: int, shape: tuple[int, ...], itemsize: int = 1, bucket_bytes: int = 1 << 20
) -> Draft:
    return Draft(group, tensor, itemsize, cut(Box.whole(shape), itemsize, bucket_bytes))


@pytest.mark.parametrize(
    ("numel", "sizes"),
    [(63, [63]), (64, [64]), (65, [64, 1]), (224, [64, 64, 64, 32])],
)
def test_a_tensor_around_the_size_of_a_bucket(numel: int, sizes: list[int]) -> None:
    """Case 22: bucket - 1, bucket, bucket + 1 and 3.5 x bucket bytes."""
    buckets = schedule([draft(0, 0, (numel,), bucket_bytes=64)], 64)
    assert [bucket.nbytes for bucket in buckets] == sizes
    assert [bucket.index for bucket in buckets] == list(range(len(sizes)))


def test_a_bucket_holds_at_least_one_element() -> None:
    """Case 6: from 1 byte upwards."""
    buckets = schedule([draft(0, 0, (3,), 4, bucket_bytes=1)], 1)
    assert [bucket.nbytes for bucket in buckets] == [4, 4, 4]


def test_a_bucket_never_mixes_groups_and_keeps_forward_order() -> None:
    drafts = [draft(0, 0, (8,)), draft(0, 1, (8,)), draft(1, 2, (8,)), draft(2, 5, (8,))]
    buckets = schedule(drafts, 1000)
    assert [(bucket.group, [p.tensor for p in bucket.pieces]) for bucket in buckets] == [
        (0, [0, 1]),
        (1, [2]),
        (2, [5]),
    ]


def test_the_end_of_a_cut_tensor_shares_its_bucket() -> None:
    drafts = [draft(0, 0, (70,), bucket_bytes=64), draft(0, 1, (30,), bucket_bytes=64)]
    assert [bucket.nbytes for bucket in schedule(drafts, 64)] == [64, 36]


def test_no_drafts_make_no_buckets() -> None:
    assert schedule([], 64) == ()


def test_well_aligned_pieces_come_first_and_small_ones_together() -> None:
    shapes = [(3,), (16,), (4,), (2,), (8192,), (8,)]
    (bucket,) = schedule([draft(0, i, shape) for i, shape in enumerate(shapes)], 1 << 20)
    assert [p.tensor for p in bucket.pieces] == [4, 1, 5, 2, 3, 0]
    assert [p.offset for p in bucket.pieces] == [0, 8192, 8208, 8216, 8220, 8222]
    for piece in bucket.pieces:
        assert piece.offset % alignment(piece.box, 1) == 0


def test_alignment_is_that_of_rows() -> None:
    assert alignment(Box.whole((4, 3)), 2) == 2
    assert alignment(Box((0, 2), (4, 4)), 2) == 4
    assert alignment(Box.whole(()), 4) == 4
    assert alignment(Box.whole((5, 1)), 8) == 8
