"""What the hub answers, and whom it tells of a change: nobody whom it does not concern."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
import pytest

from streamsync.control import messages as m
from streamsync.control.directory import question_digest
from streamsync.control.found import decode_found
from streamsync.control.registry import Registry
from streamsync.errors import ControlError
from streamsync.layout.outline import Outline, Record, outline_digest
from streamsync.layout.region import Box

HOLDS = Outline(records=(Record("w.{}", (((0, 4),),), (8,), "float32", (Box((0,), (8,)),)),))
QUESTION = (Record("w.{}", (((1, 2),),), (8,), "float32", (Box((0,), (4,)),)),)
DIGEST = question_digest(QUESTION)


def join(name: str, num_ranks: int = 2, **changes: Any) -> m.Join:
    unit, _, rank = name.partition("/")
    is_source = unit == "trainer"
    life = changes.pop("life", "first")
    fields: dict[str, Any] = {
        "protocol": m.PROTOCOL,
        "name": name,
        "role": "source" if is_source else "sink",
        "unit": unit,
        "rank": int(rank),
        "num_ranks": num_ranks,
        "endpoint": f"tcp://10.0.0.{int(rank) // 2}:{4000 + int(rank)}",
        "incarnation": life,
        "place": m.Place(host_id=f"host {int(rank) // 2}", process_id=life, pid=7, has_ucx=True),
        "outline_digest": outline_digest(HOLDS) if is_source else "",
    }
    return m.Join(**fields | changes)


def enter(registry: Registry, name: str, num_ranks: int = 2, **changes: Any) -> None:
    message = join(name, num_ranks, **changes)
    if registry.join(message, 100):
        registry.describe(m.Describe(name=name, incarnation=message.incarnation, outline=HOLDS))


def ask(registry: Registry, sink: str, **fields: Any) -> m.Sources:
    return registry.sources(m.AskSources(sink=sink, question_digest=DIGEST, **fields))


def cluster(num_sources: int = 2, replicas: int = 2) -> Registry:
    registry = Registry()
    for rank in range(num_sources):
        enter(registry, f"trainer/{rank}", num_sources)
    for number in range(replicas):
        enter(registry, f"engine{number}/0", 1)
    return registry


def told(registry: Registry) -> dict[str, m.Changed]:
    news = list(registry.due())
    assert len(dict(news)) == len(news), "told twice"
    return dict(news)


def test_a_sink_hears_of_all_sources_and_where_they_are() -> None:
    registry = cluster(num_sources=4)
    assert ask(registry, "engine0/0").wants_question
    answer = ask(registry, "engine0/0", question=QUESTION)
    sought = decode_found(answer.found)
    assert [s.name for s in sought.sources] == [f"trainer/{n}" for n in range(4)]
    for source in sought.sources:
        wanted = join(source.name)
        assert (source.endpoint, source.incarnation) == (wanted.endpoint, wanted.incarnation)
        assert source.place == wanted.place
    (only,) = sought.holders.classes
    assert only.ranks == (0, 1, 2, 3)
    assert answer.epoch == 100
    again = ask(registry, "engine1/0")
    assert again.found is answer.found, "the second to ask gets what the first one got"
    assert ask(registry, "engine0/0", stamp=answer.stamp).found == b"", "not sent twice"


def test_what_is_missing_is_named() -> None:
    registry = Registry()
    enter(registry, "engine0/0", 1)
    assert ask(registry, "engine0/0").waiting_for == "no source has joined"
    enter(registry, "trainer/1", 20)
    assert ask(registry, "engine0/0").waiting_for == (
        "source group trainer lacks ranks 0, 2, 3, 4, 5, 6, 7, 8 and 11 more"
    )
    registry = Registry()
    enter(registry, "engine0/0", 1)
    assert registry.join(join("trainer/0", 1), 100)
    assert "has not described itself" in ask(registry, "engine0/0").waiting_for
    with pytest.raises(ControlError, match="join first"):
        ask(registry, "engine9/0")
    with pytest.raises(ControlError, match="before it joined"):
        registry.describe(m.Describe(name="trainer/9", incarnation="x", outline=HOLDS))


def test_one_outline_is_asked_for_once() -> None:
    registry = Registry()
    assert registry.join(join("trainer/0"), 100)
    registry.describe(m.Describe(name="trainer/0", incarnation="first", outline=HOLDS))
    assert not registry.join(join("trainer/1"), 100)


def test_sinks_that_came_before_the_sources_are_told_once() -> None:
    registry = Registry()
    for number in range(3):
        enter(registry, f"engine{number}/0", 1)
        assert ask(registry, f"engine{number}/0").waiting_for
    assert told(registry) == {}
    enter(registry, "trainer/0")
    assert told(registry) == {}
    enter(registry, "trainer/1")
    news = told(registry)
    assert {name for name in news if name.startswith("engine")} == {
        f"engine{n}/0" for n in range(3)
    }
    assert news["trainer/0"] == news["trainer/1"] == m.Changed(epoch=100)
    assert told(registry) == {}


def test_replicas_that_came_before_the_sources_have_a_slot_each() -> None:
    """One that two replicas shared would have its sources send twice as much as the others."""
    registry = Registry()
    for number in range(32):
        enter(registry, f"engine{number}/0", 1)
    enter(registry, "trainer/0")
    enter(registry, "trainer/1")
    told(registry)
    slots = {ask(registry, f"engine{n}/0", question=QUESTION).slot for n in range(32)}
    assert slots == {(index, 32) for index in range(32)}


def test_a_new_hub_leaves_the_slots_that_replicas_bring() -> None:
    registry = Registry()
    held = {number: (number // 2, 4) for number in range(5)}
    for number, slot in held.items():
        registry.join(msgspec.structs.replace(join(f"engine{number}/0", 1), slot=slot), 100)
    enter(registry, "trainer/0")
    enter(registry, "trainer/1")
    told(registry)
    for number, slot in held.items():
        assert ask(registry, f"engine{number}/0", question=QUESTION).slot == slot


def test_a_new_sink_concerns_nobody_else() -> None:
    registry = cluster(replicas=8)
    for number in range(8):
        ask(registry, f"engine{number}/0", question=QUESTION)
    told(registry)
    enter(registry, "late/0", 1)
    ask(registry, "late/0")
    assert told(registry) == {}


def test_slots_that_were_dealt_anew_are_told() -> None:
    registry = cluster(replicas=4)
    slots = {n: ask(registry, f"engine{n}/0", question=QUESTION).slot for n in range(4)}
    told(registry)
    assert {index for index, _ in slots.values()} <= set(range(4))
    for number in range(4, 8):
        enter(registry, f"engine{number}/0", 1)
        ask(registry, f"engine{number}/0")
    news = told(registry)
    assert {f"engine{n}/0" for n in range(4)} <= set(news)
    final = [ask(registry, f"engine{n}/0").slot for n in range(8)]
    assert len({index for index, _ in final}) >= 6
    assert told(registry) == {}


def test_a_source_in_another_life_is_told_to_sinks_with_the_same_holders() -> None:
    registry = cluster()
    first = ask(registry, "engine0/0", question=QUESTION)
    told(registry)
    enter(registry, "trainer/1", life="second")
    news = told(registry)
    assert {"engine0/0", "engine1/0"} <= set(news)
    assert news["trainer/0"].epoch == 101, "a restart opens a new epoch for all"
    second = ask(registry, "engine0/0", stamp=first.stamp)
    assert second.found
    before, after = decode_found(first.found), decode_found(second.found)
    assert after.encoded_holders == before.encoded_holders, "no reason to plan again"
    assert after.sources[1].incarnation == "second"


def test_a_source_that_left_is_waited_for() -> None:
    registry = cluster()
    told(registry)
    assert registry.forget("trainer/0")
    assert not registry.forget("trainer/0")
    assert "lacks ranks 0" in ask(registry, "engine0/0").waiting_for
    assert told(registry) == {}
    enter(registry, "trainer/0", epoch=100)
    assert set(told(registry)) == {"trainer/0", "engine0/0", "engine1/0"}, "trainer/1 holds 100"


def test_two_source_groups_are_refused_by_name() -> None:
    registry = cluster()
    enter(registry, "other/0", 1, role="source", outline_digest=outline_digest(HOLDS))
    assert ask(registry, "engine0/0").waiting_for == "several source groups joined: other, trainer"
    registry.forget("other/0")
    assert ask(registry, "engine0/0", question=QUESTION).found


def test_a_refused_plan_is_told_to_every_source_once_per_replica() -> None:
    registry = cluster(replicas=20)
    sources = ["trainer/0", "trainer/1"]

    def refuse(number: int) -> list[str]:
        name = f"engine{number}"
        return registry.refusal(m.PlanRefused(sink=f"{name}/0", replica=name, text="no"))

    assert refuse(0) == sources
    assert refuse(0) == []
    assert [bool(refuse(n)) for n in range(1, 20)] == [True] * 7 + [False] * 12
    enter(registry, "engine0/0", 1, life="second")
    assert refuse(0) == sources
    enter(registry, "trainer/1", life="second")
    assert refuse(0) == sources, "another source group is another plan"


def test_another_protocol_is_refused() -> None:
    with pytest.raises(ControlError, match=f"speaks protocol 1, the hub {m.PROTOCOL}"):
        Registry().join(join("trainer/0", protocol=1), 100)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xc1", b"\x93\x90\x91\x00\xc0"])
def test_a_malformed_answer_is_refused(data: bytes) -> None:
    for packed in (data, zlib.compress(data)):
        with pytest.raises(ControlError, match="malformed answer"):
            decode_found(packed)
