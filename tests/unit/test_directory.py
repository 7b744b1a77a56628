"""The hub's index: equal things are kept once, equal questions are answered once."""

from __future__ import annotations

import random

import msgspec
import pytest

from streamsync.control.directory import Directory, question_digest
from streamsync.errors import ControlError
from streamsync.layout.outline import Outline, Record, outline_digest
from streamsync.layout.region import Box
from streamsync.plan.holders import Holders, catalogue

NORM = "model.layers.{}.norm.weight"
UP = "model.layers.{}.up.weight"
EXPERT = "model.layers.{}.experts.{}.up.weight"


def rows(start: int, stop: int) -> tuple[Box, ...]:
    return (Box((start, 0), (stop - start, 4)),)


def part(tp: int, layers: tuple[int, int] = (0, 4), experts: tuple[int, int] = (0, 8)) -> Outline:
    """What a rank of tensor parallelism 2 holds of its layers and experts."""
    return Outline(
        records=(
            Record(NORM, ((layers,),), (4,), "float32", (Box((0,), (4,)),)),
            Record(UP, ((layers,),), (8, 4), "bfloat16", rows(4 * tp, 4 * tp + 4)),
            Record(EXPERT, ((layers,), (experts,)), (8, 4), "bfloat16", rows(0, 8)),
        ),
        ties={"head": "embed"},
    )


def group(*outlines: Outline) -> Directory:
    directory = Directory()
    for number, content in enumerate(outlines):
        add(directory, number, content)
    return directory


def add(directory: Directory, number: int, content: Outline) -> None:
    if not directory.add(f"trainer/{number}", number, outline_digest(content)):
        directory.describe(content)


def decode(data: bytes | None) -> Holders:
    assert data is not None
    return msgspec.msgpack.decode(data, type=Holders)


UP_ROWS = (Record(UP, (((1, 2),),), (8, 4), "bfloat16", rows(0, 2)),)


def test_a_question_finds_the_parts_that_overlap_it() -> None:
    holders = group(part(0), part(1), part(0)).holders(UP_ROWS)
    assert holders.ranks == ("trainer/0", "trainer/1", "trainer/2")
    (only,) = holders.classes
    assert only.ranks == (0, 2)
    assert only.records == (Record(UP, (((1, 2),),), (8, 4), "bfloat16", rows(0, 4)),)
    assert holders.ties == {"head": "embed"}
    assert [record.pattern for record in holders.catalogue] == [EXPERT, NORM, UP]
    assert all(not record.boxes for record in holders.catalogue)


def test_ranks_that_hold_the_same_of_it_are_one_class() -> None:
    """They may differ in what was not asked for: expert parallel ranks and a dense tensor."""
    holders = group(part(0, experts=(0, 4)), part(0, experts=(4, 8)), part(1)).holders(UP_ROWS)
    (only,) = holders.classes
    assert only.ranks == (0, 1)


def test_what_no_rank_holds_has_no_class() -> None:
    nothing = (Record("another.{}", (((0, 4),),), (8, 4), "bfloat16", rows(0, 8)),)
    assert group(part(0)).holders(nothing).classes == ()


def test_a_tensor_of_another_shape_is_reported_for_the_sink_to_refuse() -> None:
    wide = (Record(UP, (((1, 2),),), (8, 4, 1), "bfloat16", (Box((0, 0, 0), (8, 4, 1)),)),)
    (only,) = group(part(0)).holders(wide).classes
    assert only.records[0].shape == (8, 4)


def test_equal_questions_are_answered_once_until_something_changes() -> None:
    directory = group(part(0), part(1))
    digest = question_digest(UP_ROWS)
    assert directory.answer(digest, None) is None, "the question is not known yet"
    first = directory.answer(digest, UP_ROWS)
    assert directory.answer(digest, None) is first
    assert directory.answer(digest, UP_ROWS) is first
    before = directory.generation
    add(directory, 2, part(0))
    assert directory.generation > before
    assert decode(directory.answer(digest, None)).classes[0].ranks == (0, 2)
    before = directory.generation
    add(directory, 2, part(0))
    assert directory.generation == before, "the same rank with the same content is no change"


def test_equal_outlines_are_told_once() -> None:
    directory = group(part(0))
    digest = outline_digest(part(0))
    assert all(directory.add(f"trainer/{n}", n, digest) for n in range(1, 5))
    for n in range(4):
        directory.remove(f"trainer/{n}")
    assert directory.add("trainer/7", 7, digest), "the last holder of it is still there"
    directory.remove("trainer/4")
    directory.remove("trainer/7")
    assert not directory.add("trainer/8", 8, digest), "nobody had it any more"
    assert not directory.is_described
    directory.describe(part(0))
    assert directory.is_described


def test_answers_do_not_depend_on_the_order_of_joins() -> None:
    """A new hub gives the same bytes, so that no sink plans again because of it."""
    outlines = [part(n % 2, (n // 4 * 2, n // 4 * 2 + 2), (n % 4 * 2, n % 4 * 2 + 2)) for n in
                range(12)]  # fmt: skip
    everything = part(0).records
    wanted = group(*outlines).answer(question_digest(everything), everything)
    for seed in range(5):
        order = list(enumerate(outlines))
        random.Random(seed).shuffle(order)
        directory = Directory()
        for number, content in order:
            add(directory, number, content)
        assert directory.answer(question_digest(everything), everything) == wanted


def test_the_catalogue_lists_every_tensor_once() -> None:
    records = [*part(0, (0, 2), (0, 4)).records, *part(1, (1, 4), (2, 8)).records]
    listed = [
        (name, record.shape, record.dtype)
        for record in catalogue(records)
        for name in record.names()
    ]
    assert len(set(listed)) == len(listed)
    assert set(listed) == {(n, r.shape, r.dtype) for r in records for n in r.names()}


def test_a_tensor_of_two_dtypes_is_listed_twice() -> None:
    one, other = (Record("a", (), (2,), dtype) for dtype in ("float32", "bfloat16"))
    assert catalogue([one, other]) == (other, one)


def test_what_is_not_what_its_digest_says_is_refused() -> None:
    directory = group(part(0))
    with pytest.raises(ControlError, match="no source named"):
        directory.describe(part(1))
    with pytest.raises(ControlError, match="digest"):
        directory.answer(question_digest(part(0).records), UP_ROWS)
    assert directory.answer(question_digest(UP_ROWS), UP_ROWS)
