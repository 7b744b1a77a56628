"""A source takes no share on trust: each way to bend one is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from streamsync.errors import PlanError
from streamsync.layout.region import Box, Entry, Layout, TensorSpec, View
from streamsync.plan.check import check_share
from streamsync.plan.plan import Piece, Rules, Share, share_digest
from streamsync.plan.planner import make_plan

if TYPE_CHECKING:
    from collections.abc import Callable

LAYOUT = Layout(
    tensors=(TensorSpec("a.w", (8, 4), "bfloat16"), TensorSpec("b.w", (6,), "float32")),
    entries=(
        Entry(0, Box((2, 0), (6, 4)), View(0, 16, (4, 1))),
        Entry(1, Box((0,), (6,)), View(1, 0, (1,))),
    ),
)


def share() -> Share:
    plan = make_plan(
        sink="engine0/0",
        sink_layout=LAYOUT,
        sources={"trainer/0": LAYOUT},
        rules=Rules(),
        bucket_bytes=32,
    )
    return plan.source_shares[0]


def test_a_planned_share_passes() -> None:
    assert len(share().buckets) == 3
    check_share(share(), LAYOUT)


def bucket(**changes: object) -> Callable[[Share], Share]:
    def bend(good: Share) -> Share:
        first, *rest = good.buckets
        return replace(good, buckets=(replace(first, **changes), *rest))

    return bend


def piece(**changes: object) -> Callable[[Share], Share]:
    def bend(good: Share) -> Share:
        first, *rest = good.buckets
        bent: Piece = replace(first.pieces[0], **changes)
        return replace(good, buckets=(replace(first, pieces=(bent,)), *rest))

    return bend


@pytest.mark.parametrize(
    ("bend", "text"),
    [
        (bucket(index=7), "not numbered in order"),
        (bucket(group=9), "not numbered in order"),
        (bucket(nbytes=31), "31 bytes said, 32 bytes packed"),
        (bucket(pieces=()), "0 bytes packed"),
        (piece(tensor=5), "no tensor number 5"),
        (piece(tensor=-1), "no tensor number -1"),
        (piece(offset=2), "begins at byte 2, not 0"),
        (piece(box=Box((2,), (4,))), "differ in dims"),
        (piece(box=Box((2, 0), (0, 4))), "empty"),
        (piece(box=Box((2, 0), (-4, -4))), "empty"),
        (piece(box=Box((0, 0), (4, 4))), "no entry of the layout holds box [0:4, 0:4]"),
        (piece(view=View(0, 20, (4, 1))), "no entry"),
        (piece(view=View(1, 16, (4, 1))), "no entry"),
        (piece(view=View(0, 16, (8, 1))), "no entry"),
        (piece(box=Box((2, 0), (400, 4))), "no entry"),
    ],
)
def test_a_bent_share_is_refused(bend: Callable[[Share], Share], text: str) -> None:
    """Case 41: also when its digest is that of the bent content."""
    bent = bend(share())
    with pytest.raises(PlanError) as caught:
        check_share(replace(bent, digest=share_digest(bent)), LAYOUT)
    assert text in str(caught.value)
    assert caught.value.where["peer"] == "engine0/0"


def test_a_digest_of_something_else_is_refused() -> None:
    with pytest.raises(PlanError, match="digest"):
        check_share(replace(share(), digest=1), LAYOUT)


def test_another_dtype_than_the_source_has_is_refused() -> None:
    good = share()
    bent = replace(good, tensors=(replace(good.tensors[0], source_dtype="int8"), good.tensors[1]))
    with pytest.raises(PlanError, match="no entry"):
        check_share(replace(bent, digest=share_digest(bent)), LAYOUT)
