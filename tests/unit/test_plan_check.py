"""A source takes no share on trust: each way to bend one is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from streamsync.errors import PlanError
from streamsync.layout.region import Box, Entry, Layout, TensorSpec, View
from streamsync.plan.check import check_share
from streamsync.plan.holders import holders_of
from streamsync.plan.plan import Piece, Rules, Share, share_digest
from streamsync.plan.planner import make_plan
from streamsync.plan.resolve import resolve

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
        holders=holders_of({"trainer/0": LAYOUT}),
        rules=Rules(),
        bucket_bytes=32,
    )
    return plan.shares[0]


def take(share: Share) -> None:
    """What a source does with a share that a sink made for it."""
    check_share(share)
    resolve(share, LAYOUT, at_source=True)


def test_a_planned_share_passes() -> None:
    assert len(share().buckets) == 3
    take(share())


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
        (piece(box=Box((2, 0), (400, 4))), "lies outside"),
        (piece(box=Box((-2, 0), (4, 4))), "lies outside"),
    ],
)
def test_a_bent_share_is_refused(bend: Callable[[Share], Share], text: str) -> None:
    """Case 41: also when its digest is that of the bent content."""
    bent = bend(share())
    with pytest.raises(PlanError) as caught:
        check_share(replace(bent, digest=share_digest(bent)))
    assert text in str(caught.value)
    assert caught.value.where["peer"] == "engine0/0"


@pytest.mark.parametrize("box", [Box((0, 0), (4, 4)), Box((1, 0), (4, 4))])
def test_a_box_that_the_source_does_not_hold_is_refused(box: Box) -> None:
    """Whatever a sink asks for, nothing but boxes of the source's own layout is read."""
    bent = piece(box=box)(share())
    with pytest.raises(PlanError, match="in no single place") as caught:
        take(replace(bent, digest=share_digest(bent)))
    assert caught.value.where["tensor"] == "a.w"


def test_a_digest_of_something_else_is_refused() -> None:
    with pytest.raises(PlanError, match="digest"):
        check_share(replace(share(), digest=1))


@pytest.mark.parametrize(
    "changes", [{"source_dtype": "int8"}, {"source_name": "b.w"}, {"source_name": "c.w"}]
)
def test_a_tensor_that_the_source_has_otherwise_is_refused(changes: dict[str, str]) -> None:
    good = share()
    bent = replace(good, tensors=(replace(good.tensors[0], **changes), good.tensors[1]))
    with pytest.raises(PlanError, match="the share says"):
        take(replace(bent, digest=share_digest(bent)))
