"""A replica's coordinator: PREPARE, ARM, GO, COMMIT; ABORT until GO, QUARANTINE after it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from streamsync.control.protocol.coordinator import (
    Action,
    Broadcast,
    CoordinatorMachine,
    Phase,
    RankLost,
    RankSays,
)
from streamsync.control.protocol.rank import Abort, Arm, Commit, Go, Prepare, Quarantine
from streamsync.control.protocol.timer import CancelTimer, SetTimer, TimerExpired
from streamsync.types import Version

V0, V1, V2, V3 = (Version(1, n) for n in range(4))


def feed(machine: CoordinatorMachine, *events: Any) -> list[Action]:
    return [action for event in events for action in machine.feed(event)]


def all_say(kind: Any, version: Version) -> tuple[RankSays, RankSays]:
    return RankSays(0, kind, version), RankSays(1, kind, version)


def orders(actions: list[Action]) -> list[Any]:
    return [a.order for a in actions if isinstance(a, Broadcast)]


PATH: dict[Phase, tuple[RankSays, ...]] = {
    Phase.RECEIVING: all_say("announced", V1),
    Phase.ARMING: (*all_say("announced", V1), *all_say("ready", V1)),
    Phase.INSTALLING: (
        *all_say("announced", V1),
        *all_say("ready", V1),
        *all_say("armed", V1),
    ),
}
BUSY = tuple(PATH)


def at(phase: Phase) -> CoordinatorMachine:
    machine = CoordinatorMachine(2)
    feed(machine, *PATH[phase])
    assert (machine.phase, machine.target) == (phase, V1)
    return machine


def test_a_whole_sync_waits_for_every_rank() -> None:
    machine = CoordinatorMachine(2)
    assert machine.feed(RankSays(0, "announced", V1)) == [SetTimer("announce", V1)]
    assert machine.feed(RankSays(1, "announced", V1)) == [
        CancelTimer("announce", V1),
        SetTimer("total", V1),
        Broadcast(Prepare(V1)),
    ]
    assert machine.feed(RankSays(1, "ready", V1)) == []
    assert machine.feed(RankSays(0, "ready", V1)) == [SetTimer("arm", V1), Broadcast(Arm(V1))]
    assert machine.feed(RankSays(0, "armed", V1)) == []
    assert machine.feed(RankSays(1, "armed", V1)) == [CancelTimer("arm", V1), Broadcast(Go(V1))]
    assert machine.feed(RankSays(0, "installed", V1)) == []
    assert machine.feed(RankSays(1, "installed", V1)) == [
        CancelTimer("total", V1),
        CancelTimer("arm", V1),
        Broadcast(Commit(V1)),
    ]
    assert (machine.phase, machine.target, machine.over) == (Phase.IDLE, None, V1)


def test_one_starved_rank_arms_all() -> None:
    machine = at(Phase.RECEIVING)
    assert orders(machine.feed(RankSays(1, "starved", V1))) == [Arm(V1)]


def test_one_rank_alone() -> None:
    machine = CoordinatorMachine(1)
    kinds = ("announced", "ready", "armed", "installed")
    actions = feed(machine, *(RankSays(0, kind, V1) for kind in kinds))
    assert orders(actions) == [Prepare(V1), Arm(V1), Go(V1), Commit(V1)]


@pytest.mark.parametrize("phase", BUSY)
def test_repeated_late_and_unknown_words_change_nothing(phase: Phase) -> None:
    machine = at(phase)
    before = copy.deepcopy(machine)
    for word in PATH[phase]:
        assert machine.feed(word) == []
    for version in (V0, V3):
        for kind in ("ready", "starved", "armed", "installed"):
            assert feed(machine, *all_say(kind, version)) == []
        for name in ("announce", "total", "arm"):
            assert machine.feed(TimerExpired(name, version)) == []  # type: ignore[arg-type]
    for kind in ("failed", "quarantined"):
        assert feed(machine, *all_say(kind, V0)) == []
    assert machine.feed(TimerExpired("announce", V1)) == []
    assert machine == before


def test_words_of_ranks_that_do_not_exist_count_for_nothing() -> None:
    machine = at(Phase.ARMING)
    feed(machine, RankSays(0, "armed", V1))
    for rank in (-1, 2, 1000):
        assert machine.feed(RankSays(rank, "armed", V1)) == []
        assert machine.feed(RankSays(rank, "failed", V1)) == []
        assert machine.feed(RankLost(rank, "?")) == []
    assert machine.phase is Phase.ARMING


def test_one_rank_twice_is_not_two_ranks() -> None:
    machine = at(Phase.ARMING)
    assert feed(machine, *[RankSays(0, "armed", V1)] * 3) == []
    assert machine.phase is Phase.ARMING


@pytest.mark.parametrize(
    "event",
    [
        RankSays(1, "failed", V1, "digest"),
        RankSays(1, "quarantined", V1, "gate deadline"),
        RankLost(1, "reset"),
        TimerExpired("total", V1),
    ],
    ids=str,
)
@pytest.mark.parametrize("phase", BUSY)
def test_a_failure_aborts_until_go_and_quarantines_after_it(phase: Phase, event: Any) -> None:
    machine = at(phase)
    (order,) = orders(machine.feed(event))
    assert type(order) is (Quarantine if phase is Phase.INSTALLING else Abort)
    assert order.version == V1
    assert getattr(event, "text", "") in order.text
    assert "1" in order.text
    assert (machine.phase, machine.over) == (Phase.IDLE, V1)
    assert machine.feed(event) == []


def test_the_arm_deadline_names_who_is_missing() -> None:
    machine = at(Phase.ARMING)
    feed(machine, RankSays(0, "armed", V1))
    (order,) = orders(machine.feed(TimerExpired("arm", V1)))
    assert isinstance(order, Abort)
    assert order.text.endswith("no word of ranks [1]")


@pytest.mark.parametrize("phase", [Phase.RECEIVING, Phase.INSTALLING])
def test_a_late_arm_deadline_changes_nothing(phase: Phase) -> None:
    assert at(phase).feed(TimerExpired("arm", V1)) == []


def test_a_rank_that_drops_tells_the_others_why() -> None:
    machine = at(Phase.RECEIVING)
    (order,) = orders(machine.feed(RankSays(1, "failed", V1, "lagging", "dropped")))
    assert order == Abort(V1, "rank 1: lagging", "dropped")


def test_the_newest_that_all_announced_is_next() -> None:
    machine = at(Phase.INSTALLING)
    feed(machine, *all_say("announced", V2), RankSays(0, "announced", V3))
    assert orders(feed(machine, *all_say("installed", V1))) == [Commit(V1), Prepare(V2)]
    feed(machine, RankSays(1, "announced", V3))
    assert orders(machine.feed(RankSays(0, "failed", V2, "full"))) == [
        Abort(V2, "rank 0: full", "failed"),
        Prepare(V3),
    ]


def test_preparing_the_newest_forgets_the_older() -> None:
    machine = at(Phase.INSTALLING)
    feed(machine, RankSays(0, "announced", V2), *all_say("announced", V3))
    actions = feed(machine, *all_say("installed", V1))
    assert CancelTimer("announce", V2) in actions
    (order,) = orders(machine.feed(RankSays(1, "announced", V2)))
    assert order == Abort(V2, f"version {V3} is newer here", "superseded")


def test_an_announcement_of_what_is_over_is_answered() -> None:
    machine = at(Phase.INSTALLING)
    feed(machine, *all_say("installed", V1))
    (order,) = orders(machine.feed(RankSays(0, "announced", V0)))
    assert order == Abort(V0, f"version {V1} is newer here", "superseded")


def test_what_one_rank_can_not_have_is_aborted_at_all() -> None:
    """A rank that subscribed too late can't hold up a version that the others announced."""
    machine = CoordinatorMachine(2)
    feed(machine, RankSays(0, "announced", V1))
    abort = Abort(V1, "rank 1: subscribed too late", "failed")
    assert orders(machine.feed(RankSays(1, "failed", V1, "subscribed too late"))) == [abort]

    machine = CoordinatorMachine(2)
    assert orders(machine.feed(RankSays(1, "failed", V1, "subscribed too late"))) == [abort]
    assert orders(machine.feed(RankSays(0, "announced", V1))) == [abort]
    assert orders(feed(machine, *all_say("announced", V2))) == [Prepare(V2)]


def test_a_rank_that_never_announces_is_named() -> None:
    machine = CoordinatorMachine(3)
    feed(machine, *all_say("announced", V1))
    (order,) = orders(machine.feed(TimerExpired("announce", V1)))
    assert order == Abort(V1, "never announced by ranks [2]")
    assert orders(machine.feed(RankSays(2, "announced", V1))) == [order]


def test_a_lost_rank_ends_what_it_had_announced() -> None:
    machine = at(Phase.RECEIVING)
    feed(machine, RankSays(1, "announced", V2), RankSays(0, "announced", V3))
    assert orders(machine.feed(RankLost(1, "reset"))) == [
        Abort(V2, "rank 1 lost: reset"),
        Abort(V1, "rank 1 lost: reset"),
    ]
    assert orders(machine.feed(RankSays(1, "announced", V3))) == [Prepare(V3)]


def test_a_rank_lost_at_rest_changes_nothing() -> None:
    machine = at(Phase.INSTALLING)
    feed(machine, *all_say("installed", V1))
    before = copy.deepcopy(machine)
    assert machine.feed(RankLost(1, "reset")) == []
    assert machine == before


def test_memory_of_dead_versions_is_bounded() -> None:
    machine = CoordinatorMachine(2)
    for step in range(500):
        feed(machine, RankSays(1, "failed", Version(1, step), "withdrawn"))
    assert len(machine.dead) == 64
    newest = Version(1, 500)
    for kind in ("announced", "ready", "armed", "installed"):
        feed(machine, *all_say(kind, newest))
    assert machine.over == newest
    assert machine.dead == {}


def test_replicas_commit_independently() -> None:
    """Case 43: one replica's failure is nothing to the other's coordinator."""
    good, bad = at(Phase.INSTALLING), at(Phase.INSTALLING)
    assert orders(bad.feed(RankSays(0, "failed", V1, "digest"))) == [
        Quarantine(V1, "rank 0: digest")
    ]
    assert orders(feed(good, *all_say("installed", V1))) == [Commit(V1)]
