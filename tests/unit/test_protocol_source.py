"""One source rank: the publish queue, and every replica's outcome."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from streamsync.control.protocol.source import (
    Acknowledged,
    Action,
    AskToDrop,
    Finish,
    Include,
    PeerJoined,
    PeerLost,
    Publish,
    Refuse,
    SendFailed,
    SnapshotFailed,
    SnapshotTaken,
    SourceMachine,
    StartSync,
    StopSending,
    StopSnapshot,
    Withdraw,
)
from streamsync.control.protocol.timer import CancelTimer, SetTimer, TimerExpired
from streamsync.types import Outcome, Version

V0, V1, V2, V3 = (Version(1, n) for n in range(4))
A0, A1, B0 = "a/0", "a/1", "b/0"


def feed(machine: SourceMachine, *events: Any) -> list[Action]:
    return [action for event in events for action in machine.feed(event)]


def joined(policy: Any = "supersede") -> SourceMachine:
    """Two replicas; `a` has two ranks."""
    machine = SourceMachine(policy)
    feed(machine, PeerJoined(A0, "a"), PeerJoined(A1, "a"), PeerJoined(B0, "b"))
    return machine


def running(policy: Any = "supersede") -> SourceMachine:
    machine = joined(policy)
    feed(machine, Publish(V1))
    return machine


def committed(*peers: str, version: Version = V1) -> list[Acknowledged]:
    return [Acknowledged(peer, version, "committed") for peer in peers]


def finished(actions: list[Action]) -> dict[Version, dict[str, str]]:
    return {
        a.version: {o.replica: o.state for o in a.outcomes}
        for a in actions
        if isinstance(a, Finish)
    }


def test_a_whole_sync() -> None:
    machine = joined()
    assert machine.feed(Publish(V1)) == [StartSync(V1, (A0, A1, B0)), SetTimer("total", V1)]
    assert machine.feed(SnapshotTaken(V1)) == []
    assert feed(machine, *committed(A0, A1)) == [SetTimer("lag", V1), SetTimer("lag", V1)]
    assert feed(machine, *committed(B0)) == [
        CancelTimer("lag", V1),
        CancelTimer("total", V1),
        Finish(
            V1,
            (
                Outcome(replica="a", version=V1, state="committed"),
                Outcome(replica="b", version=V1, state="committed"),
            ),
        ),
    ]


def test_it_is_over_only_when_the_snapshot_is_taken_too() -> None:
    machine = running()
    assert not finished(feed(machine, *committed(A0, A1, B0)))
    assert finished(machine.feed(SnapshotTaken(V1))) == {V1: {"a": "committed", "b": "committed"}}


def test_nobody_listens() -> None:
    """Case 38: a version may be published before any engine is there."""
    machine = SourceMachine()
    assert machine.feed(Publish(V0)) == [StartSync(V0, ()), SetTimer("total", V0)]
    assert finished(machine.feed(SnapshotTaken(V0))) == {V0: {}}


# --- versions and the queue ----------------------------------------------------------------------


@pytest.mark.parametrize("version", [V0, V1, Version(0, 99)])
def test_versions_are_never_reused(version: Version) -> None:
    machine = running()
    before = copy.deepcopy(machine)
    (refusal,) = machine.feed(Publish(version))
    assert isinstance(refusal, Refuse)
    assert f"{version} is not above {V1}" in refusal.text
    assert machine == before


def test_a_failed_version_is_never_reused_either() -> None:
    machine = running()
    feed(machine, SnapshotFailed(V1, "out of memory"))
    assert [type(a) for a in machine.feed(Publish(V1))] == [Refuse]


def test_a_new_epoch_may_begin_at_step_0_again() -> None:
    machine = running()
    feed(machine, SnapshotTaken(V1), *committed(A0, A1, B0))
    assert StartSync(Version(2, 0), (A0, A1, B0)) in machine.feed(Publish(Version(2, 0)))


def test_the_newest_supersedes_what_waits_but_not_what_runs() -> None:
    machine = running()
    assert machine.feed(Publish(V2)) == []
    actions = machine.feed(Publish(V3))
    text = f"superseded by {V3} while it waited"
    assert actions[0] == Withdraw(V2, text, superseded=True)
    assert finished(actions) == {V2: {"a": "superseded", "b": "superseded"}}
    actions = feed(machine, SnapshotTaken(V1), *committed(A0, A1, B0))
    assert finished(actions) == {V1: {"a": "committed", "b": "committed"}}
    assert actions[-2:] == [StartSync(V3, (A0, A1, B0)), SetTimer("total", V3)]


def test_queue_runs_every_version_in_order() -> None:
    machine = running("queue")
    assert feed(machine, Publish(V2), Publish(V3)) == []
    for version, following in ((V1, V2), (V2, V3)):
        actions = feed(machine, SnapshotTaken(version), *committed(A0, A1, B0, version=version))
        assert StartSync(following, (A0, A1, B0)) in actions


@pytest.mark.parametrize("policy", ["supersede", "queue"])
def test_a_publish_cancelled_while_it_waits_never_runs(policy: Any) -> None:
    """When its turn came, its snapshot would be of other parameters."""
    machine = running(policy)
    feed(machine, Publish(V2))
    actions = machine.feed(SnapshotFailed(V2, "cancelled"))
    assert actions[0] == Withdraw(V2, "cancelled", superseded=False)
    assert finished(actions) == {V2: {"a": "failed", "b": "failed"}}
    actions = feed(machine, SnapshotTaken(V1), *committed(A0, A1, B0))
    assert not [a for a in actions if isinstance(a, StartSync)]
    assert machine.running is None


def test_a_peer_that_joins_takes_part_from_the_next_version_on() -> None:
    machine = running()
    feed(machine, PeerJoined("c/0", "c"), Publish(V2))
    assert feed(machine, *committed("c/0")) == []
    actions = feed(machine, SnapshotTaken(V1), *committed(A0, A1, B0))
    assert finished(actions) == {V1: {"a": "committed", "b": "committed"}}
    assert StartSync(V2, (A0, A1, B0, "c/0")) in actions


# --- outcomes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["failed", "dropped", "superseded"])
def test_a_rank_that_ends_badly_stops_being_served(state: Any) -> None:
    """Case 33."""
    machine = running()
    feed(machine, SnapshotTaken(V1))
    assert machine.feed(Acknowledged(A1, V1, state, "why")) == [StopSending(A1, V1, "why")]
    actions = feed(machine, *committed(A0, B0))
    assert finished(actions) == {V1: {"a": state, "b": "committed"}}
    (finish,) = [a for a in actions if isinstance(a, Finish)]
    assert finish.outcomes[0].text == "why"


@pytest.mark.parametrize(
    "event", [SendFailed(A0, V1, "broken pipe"), PeerLost(A0, "broken pipe")], ids=str
)
def test_a_peer_that_can_not_be_served_fails_its_replica_only(event: Any) -> None:
    """Cases 32 and 43."""
    machine = running()
    feed(machine, SnapshotTaken(V1))
    assert machine.feed(event) == [StopSending(A0, V1, "broken pipe")]
    assert finished(feed(machine, *committed(A1, B0))) == {V1: {"a": "failed", "b": "committed"}}
    assert (A0 in machine.peers) is isinstance(event, SendFailed)


def test_a_failed_snapshot_fails_who_has_not_ended() -> None:
    """Case 31."""
    machine = running()
    feed(machine, Publish(V2))
    actions = machine.feed(SnapshotFailed(V1, "out of memory"))
    stopped = [a for a in actions if isinstance(a, StopSending)]
    assert stopped == [StopSending(peer, V1, "out of memory") for peer in (A0, A1, B0)]
    assert finished(actions) == {V1: {"a": "failed", "b": "failed"}}
    assert StartSync(V2, (A0, A1, B0)) in actions


@pytest.mark.parametrize(
    "event",
    [
        *committed(A0),
        Acknowledged(A0, V1, "failed", "late"),
        SendFailed(A0, V1, "late"),
        SnapshotTaken(V1),
        SnapshotFailed(V1, "late"),
        TimerExpired("total", V1),
        TimerExpired("lag", V1),
        PeerLost("x/0", "late"),
        Acknowledged("x/0", V2, "failed", "unknown"),
        *committed(A0, version=V3),
        TimerExpired("total", V3),
        SnapshotFailed(V3, "unknown"),
    ],
    ids=str,
)
@pytest.mark.parametrize("next_runs", [False, True])
def test_late_and_unknown_events_change_nothing(event: Any, next_runs: bool) -> None:
    """Case 30: an ack of an old version is nothing to the new one."""
    machine = running()
    feed(machine, SnapshotTaken(V1), *committed(A0, A1, B0))
    if next_runs:
        feed(machine, Publish(V2))
    before = copy.deepcopy(machine)
    assert machine.feed(event) == []
    assert machine == before


def test_the_first_word_of_a_peer_counts() -> None:
    machine = running()
    feed(machine, SnapshotTaken(V1), *committed(A0))
    assert machine.feed(Acknowledged(A0, V1, "failed", "again")) == []
    assert finished(feed(machine, *committed(A1, B0))) == {V1: {"a": "committed", "b": "committed"}}


# --- deadlines -----------------------------------------------------------------------------------


def test_late_replicas_are_asked_to_drop_and_may_still_commit() -> None:
    """Case 43."""
    machine = running()
    feed(machine, SnapshotTaken(V1), *committed(B0))
    assert machine.feed(TimerExpired("lag", V1)) == [AskToDrop(A0, V1), AskToDrop(A1, V1)]
    assert finished(feed(machine, *committed(A0, A1))) == {V1: {"a": "committed", "b": "committed"}}


def test_the_total_deadline_ends_it() -> None:
    machine = running()
    feed(machine, SnapshotTaken(V1), *committed(B0), Publish(V2))
    actions = machine.feed(TimerExpired("total", V1))
    assert [a.peer for a in actions if isinstance(a, StopSending)] == [A0, A1]
    assert finished(actions) == {V1: {"a": "failed", "b": "committed"}}
    assert StartSync(V2, (A0, A1, B0)) in actions


def test_the_total_deadline_ends_a_snapshot_that_never_comes() -> None:
    machine = running()
    feed(machine, *committed(A0, A1), Publish(V2))
    actions = machine.feed(TimerExpired("total", V1))
    (stopped,) = [a for a in actions if isinstance(a, StopSnapshot)]
    assert stopped.version == V1
    assert actions.index(stopped) < actions.index(StartSync(V2, (A0, A1, B0)))
    assert finished(actions) == {V1: {"a": "committed", "b": "failed"}}
    assert machine.feed(SnapshotTaken(V1)) == []


def test_what_a_replica_lacks_needs_republishing_unless_a_newer_version_waits() -> None:
    machine = running()
    actions = feed(
        machine,
        SnapshotTaken(V1),
        Acknowledged(A0, V1, "failed", "no"),
        *committed(A1, B0),
    )
    (finish,) = [a for a in actions if isinstance(a, Finish)]
    assert {o.replica: o.needs_republish for o in finish.outcomes} == {"a": True, "b": False}
    machine = running()
    actions = feed(
        machine,
        Publish(V2),
        SnapshotTaken(V1),
        Acknowledged(A0, V1, "failed", "no"),
        *committed(A1, B0),
    )
    (finish,) = [a for a in actions if isinstance(a, Finish)]
    assert not any(o.needs_republish for o in finish.outcomes)


def test_a_peer_that_is_back_before_the_announcement_takes_part() -> None:
    """V2 waited behind V1, which failed at `a/0` and cost it its session."""
    machine = running()
    feed(machine, Publish(V2), SnapshotTaken(V1), *committed(A1, B0))
    actions = feed(machine, Acknowledged(A0, V1, "failed", "no"))
    assert StartSync(V2, (A0, A1, B0)) in actions
    feed(machine, PeerLost(A0, "its link was given up"))
    feed(machine, PeerJoined(A0, "a"), Include(V2, A0), Include(V2, "never/0"), Include(V1, B0))
    actions = feed(machine, SnapshotTaken(V2), *committed(A0, A1, B0, version=V2))
    assert finished(actions) == {V2: {"a": "committed", "b": "committed"}}
