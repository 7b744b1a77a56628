"""One sink rank: every transition, every failure in every state, and what changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from streamsync.control.protocol.rank import (
    Abort,
    AckSources,
    Action,
    AllLanded,
    Announced,
    Arm,
    ArmGates,
    AskedToDrop,
    Commit,
    CommitEngine,
    CoordinatorLost,
    DropReceived,
    Failed,
    GatesArmed,
    Go,
    Prepare,
    Quarantine,
    QuarantineEngine,
    RankState,
    Ready,
    SourceLost,
    SourcesChanged,
    StartLoading,
    StartReceiving,
    TellCoordinator,
    Withdrawn,
)
from streamsync.control.protocol.rank_machine import RankMachine
from streamsync.control.protocol.timer import CancelTimer, SetTimer, TimerExpired
from streamsync.types import Version

V0, V1, V2, V3 = (Version(1, n) for n in range(4))
S = RankState


def feed(machine: RankMachine, *events: Any) -> list[Action]:
    return [action for event in events for action in machine.feed(event)]


def announce(version: Version) -> tuple[Announced, Announced]:
    return Announced("a", version), Announced("b", version)


PATH: dict[RankState, tuple[Any, ...]] = {
    S.RECEIVING: (Prepare(V1),),
    S.VERIFIED: (Prepare(V1), Ready(V1, verified=True)),
    S.ARMING: (Prepare(V1), Ready(V1), Arm(V1)),
    S.ARMED: (Prepare(V1), Ready(V1), Arm(V1), GatesArmed(V1)),
    S.INSTALLING: (Prepare(V1), Ready(V1), Arm(V1), GatesArmed(V1), Go(V1)),
}
IN_SYNC = tuple(PATH)
BEFORE_ARMED = (S.RECEIVING, S.VERIFIED, S.ARMING)


def joining() -> RankMachine:
    machine = RankMachine()
    feed(machine, SourcesChanged(frozenset("ab")))
    return machine


def serving() -> RankMachine:
    machine = joining()
    feed(machine, *announce(V0), Prepare(V0), Arm(V0), GatesArmed(V0), Go(V0), Commit(V0))
    assert (machine.state, machine.serving) == (S.SERVING, V0)
    return machine


def at(state: RankState) -> RankMachine:
    """Serves 0 and is on its way to 1."""
    machine = serving()
    feed(machine, *announce(V1), *PATH[state])
    assert machine.state is state
    return machine


def assert_aborted(machine: RankMachine, actions: list[Action], *, disarm: bool) -> None:
    assert (machine.state, machine.serving, machine.target) == (S.SERVING, V0, None)
    assert DropReceived(V1, disarm) in actions
    assert not [a for a in actions if isinstance(a, QuarantineEngine | CommitEngine)]
    assert {CancelTimer("total", V1), CancelTimer("gate", V1)} <= set(actions)


def assert_quarantined(machine: RankMachine, actions: list[Action]) -> None:
    assert (machine.state, machine.target) == (S.QUARANTINED, None)
    assert {CancelTimer("total", V1), CancelTimer("gate", V1)} <= set(actions)
    assert [type(a) for a in actions if isinstance(a, QuarantineEngine | DropReceived)] == [
        QuarantineEngine,
        DropReceived,
    ]
    assert DropReceived(V1, disarm=False) in actions
    assert [a.state for a in actions if isinstance(a, AckSources)] == ["failed"]


# --- the way to a new version --------------------------------------------------------------------


def test_a_whole_sync() -> None:
    machine = joining()
    assert machine.feed(Announced("a", V1)) == [SetTimer("announce", V1)]
    assert machine.feed(Announced("b", V1)) == [
        CancelTimer("announce", V1),
        TellCoordinator("announced", V1),
    ]
    assert machine.state is S.JOINING
    assert machine.feed(Prepare(V1)) == [SetTimer("total", V1), StartReceiving(V1)]
    assert machine.feed(Ready(V1)) == [TellCoordinator("ready", V1)]
    assert machine.feed(Arm(V1)) == [ArmGates(V1)]
    assert machine.feed(GatesArmed(V1)) == [SetTimer("gate", V1), TellCoordinator("armed", V1)]
    assert machine.feed(Go(V1)) == [StartLoading(V1)]
    assert machine.feed(AllLanded(V1)) == [TellCoordinator("installed", V1)]
    assert machine.state is S.INSTALLING
    assert machine.serving is None
    assert machine.feed(Commit(V1)) == [
        CancelTimer("total", V1),
        CancelTimer("gate", V1),
        CommitEngine(V1),
        AckSources(V1, "committed"),
    ]
    assert (machine.state, machine.serving, machine.target) == (S.SERVING, V1, None)


@pytest.mark.parametrize(
    ("event", "kind", "state"),
    [
        (Ready(V1), "ready", S.RECEIVING),
        (Ready(V1, starved=True), "starved", S.RECEIVING),
        (Ready(V1, verified=True), "ready", S.VERIFIED),
    ],
)
def test_ready(event: Ready, kind: Any, state: RankState) -> None:
    machine = at(S.RECEIVING)
    assert machine.feed(event) == [TellCoordinator(kind, V1)]
    assert machine.state is state
    assert machine.feed(Arm(V1)) == [ArmGates(V1)]


def test_a_rank_that_is_not_ready_is_armed_with_the_others() -> None:
    assert at(S.RECEIVING).feed(Arm(V1)) == [ArmGates(V1)]


def test_the_next_version_is_announced_during_a_sync_and_waits() -> None:
    machine = at(S.INSTALLING)
    assert TellCoordinator("announced", V2) in feed(machine, *announce(V2))
    assert machine.feed(Prepare(V2)) == []
    feed(machine, Commit(V1))
    assert StartReceiving(V2) in machine.feed(Prepare(V2))


def test_preparing_the_newest_supersedes_what_waited() -> None:
    machine = serving()
    feed(machine, *announce(V1), Announced("a", V2), *announce(V3))
    actions = machine.feed(Prepare(V3))
    superseded = [a for a in actions if isinstance(a, AckSources)]
    assert [(a.version, a.state) for a in superseded] == [(V1, "superseded"), (V2, "superseded")]
    assert CancelTimer("announce", V2) in actions
    assert machine.feed(Announced("b", V2)) == [
        AckSources(V2, "superseded", f"version {V3} is newer or over here")
    ]


# --- what changes nothing ------------------------------------------------------------------------


@pytest.mark.parametrize("state", IN_SYNC)
def test_events_of_other_versions_change_nothing(state: RankState) -> None:
    machine = at(state)
    before = copy.deepcopy(machine)
    for version in (V0, V3):
        for kind in (Prepare, Ready, Arm, GatesArmed, Go, AllLanded, Commit):
            assert machine.feed(kind(version)) == []
        assert machine.feed(Abort(version, "late")) == []
        assert machine.feed(Quarantine(version, "late")) == []
        assert machine.feed(Failed(version, "late")) == []
        assert machine.feed(AskedToDrop("a", version)) == []
        for name in ("announce", "total", "gate", "arm", "lag"):
            assert machine.feed(TimerExpired(name, version)) == []  # type: ignore[arg-type]
    assert machine.feed(Withdrawn("a", V0, "late")) == []
    assert machine == before


@pytest.mark.parametrize("state", IN_SYNC)
def test_repeated_events_change_nothing(state: RankState) -> None:
    machine = at(state)
    before = copy.deepcopy(machine)
    for event in (*announce(V1), *PATH[state]):
        assert machine.feed(event) == []
    assert machine.feed(TimerExpired("announce", V1)) == []
    assert machine == before


@pytest.mark.parametrize(
    ("state", "early"),
    [
        (S.RECEIVING, (GatesArmed, Go, AllLanded, Commit)),
        (S.ARMING, (Go, AllLanded, Commit, Ready)),
        (S.ARMED, (AllLanded, Commit, Arm, Ready)),
        (S.INSTALLING, (Arm, GatesArmed, Ready)),
    ],
)
def test_orders_out_of_turn_change_nothing(state: RankState, early: tuple[Any, ...]) -> None:
    machine = at(state)
    for kind in early:
        assert machine.feed(kind(V1)) == []
        assert machine.state is state


def test_strangers_are_ignored() -> None:
    machine = serving()
    before = copy.deepcopy(machine)
    assert feed(machine, Withdrawn("x", V1, "?"), SourceLost("x", "?")) == []
    assert machine == before


def test_a_rank_without_sources_ignores_prepare() -> None:
    assert RankMachine().feed(Prepare(V1)) == []


@pytest.mark.parametrize("version", [V1, V2])
def test_prepare_needs_every_source(version: Version) -> None:
    machine = serving()
    feed(machine, Announced("a", V1))
    assert machine.feed(Prepare(version)) == []
    assert machine.state is S.SERVING


@pytest.mark.parametrize("kind", [GatesArmed, AllLanded, Go, Commit])
def test_answers_after_abort_are_ignored(kind: Any) -> None:
    machine = at(S.ARMED)
    feed(machine, Abort(V1, "why"))
    assert machine.feed(kind(V1)) == []
    assert machine.state is S.SERVING


def test_no_version_is_taken_twice_or_backwards() -> None:
    machine = serving()
    for version in (V0, Version(0, 9)):
        (ack,) = machine.feed(Announced("a", version))
        assert isinstance(ack, AckSources)
        assert ack.state == "superseded"
    feed(machine, *announce(V1), Prepare(V1), Failed(V1, "full"))
    (ack,) = machine.feed(Announced("a", V1))
    assert ack == AckSources(V1, "failed", f"version {V1} is newer or over here")
    assert machine.feed(Prepare(V1)) == []


def test_a_newer_epoch_begins_at_a_lower_step() -> None:
    machine = serving()
    feed(machine, *announce(Version(2, 0)))
    assert StartReceiving(Version(2, 0)) in machine.feed(Prepare(Version(2, 0)))


# --- failures ------------------------------------------------------------------------------------

FAILURES: tuple[Any, ...] = (
    Failed(V1, "digest"),
    SourceLost("a", "reset"),
    Withdrawn("a", V1, "its snapshot failed"),
    TimerExpired("total", V1),
    SourcesChanged(frozenset("ac")),
)


@pytest.mark.parametrize("event", FAILURES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("state", BEFORE_ARMED)
def test_a_failure_before_armed_goes_back_and_tells(state: RankState, event: Any) -> None:
    machine = at(state)
    actions = machine.feed(event)
    assert_aborted(machine, actions, disarm=state is S.ARMING)
    (told,) = [a for a in actions if isinstance(a, TellCoordinator)]
    (ack,) = [a for a in actions if isinstance(a, AckSources)]
    assert (told.kind, told.version, ack.state) == ("failed", V1, "failed")
    assert told.text == ack.text != ""


@pytest.mark.parametrize(
    "event",
    [e for e in FAILURES if not isinstance(e, TimerExpired)],
    ids=lambda e: type(e).__name__,
)
def test_armed_tells_of_a_failure_but_never_goes_back_alone(event: Any) -> None:
    machine = at(S.ARMED)
    (told,) = machine.feed(event)
    assert isinstance(told, TellCoordinator)
    assert (told.kind, machine.state, machine.target) == ("failed", S.ARMED, V1)
    assert_aborted(machine, machine.feed(Abort(V1, told.text)), disarm=True)


@pytest.mark.parametrize(
    "event", [CoordinatorLost("reset"), TimerExpired("gate", V1), TimerExpired("total", V1)]
)
@pytest.mark.parametrize("state", [S.ARMED, S.INSTALLING])
def test_without_its_coordinator_an_armed_rank_is_quarantined(state: RankState, event: Any) -> None:
    """Case 35."""
    machine = at(state)
    actions = machine.feed(event)
    assert_quarantined(machine, actions)
    assert [a.kind for a in actions if isinstance(a, TellCoordinator)] == ["quarantined"]


@pytest.mark.parametrize("state", BEFORE_ARMED)
def test_without_its_coordinator_an_unarmed_rank_goes_back(state: RankState) -> None:
    machine = at(state)
    assert_aborted(machine, machine.feed(CoordinatorLost("reset")), disarm=state is S.ARMING)


@pytest.mark.parametrize("event", FAILURES, ids=lambda e: type(e).__name__)
def test_any_failure_after_go_quarantines(event: Any) -> None:
    """Case 35."""
    machine = at(S.INSTALLING)
    actions = machine.feed(event)
    assert_quarantined(machine, actions)
    assert [a.kind for a in actions if isinstance(a, TellCoordinator)] == ["quarantined"]


def test_abort_after_go_quarantines() -> None:
    machine = at(S.INSTALLING)
    assert_quarantined(machine, machine.feed(Abort(V1, "too late")))


@pytest.mark.parametrize("outcome", ["failed", "superseded", "dropped"])
@pytest.mark.parametrize("state", [*BEFORE_ARMED, S.ARMED])
def test_abort_goes_back_and_says_why(state: RankState, outcome: Any) -> None:
    machine = at(state)
    actions = machine.feed(Abort(V1, "rank 1: full", outcome))
    assert_aborted(machine, actions, disarm=state in {S.ARMING, S.ARMED})
    assert AckSources(V1, outcome, "rank 1: full") in actions
    assert not [a for a in actions if isinstance(a, TellCoordinator)]


@pytest.mark.parametrize("state", [S.ARMED, S.INSTALLING])
def test_the_coordinator_quarantines(state: RankState) -> None:
    machine = at(state)
    actions = machine.feed(Quarantine(V1, "rank 1: digest"))
    assert_quarantined(machine, actions)
    assert not [a for a in actions if isinstance(a, TellCoordinator)]


@pytest.mark.parametrize("state", BEFORE_ARMED)
def test_quarantine_of_a_rank_that_never_armed_goes_back(state: RankState) -> None:
    machine = at(state)
    assert_aborted(machine, machine.feed(Quarantine(V1, "?")), disarm=state is S.ARMING)


def test_a_quarantined_rank_heals_with_the_next_version_only() -> None:
    machine = at(S.INSTALLING)
    feed(machine, Failed(V1, "digest"))
    assert machine.feed(Commit(V1)) == []
    feed(machine, *announce(V2), Prepare(V2), Arm(V2), GatesArmed(V2))
    feed(machine, Abort(V2, "not this time"))
    assert machine.state is S.QUARANTINED
    feed(machine, *announce(V3), Prepare(V3), Arm(V3), GatesArmed(V3), Go(V3))
    assert CommitEngine(V3) in machine.feed(Commit(V3))
    assert (machine.state, machine.serving) == (S.SERVING, V3)


def test_a_joining_rank_that_fails_after_go_is_quarantined() -> None:
    machine = joining()
    feed(machine, *announce(V1), *PATH[S.INSTALLING])
    assert_quarantined(machine, machine.feed(Failed(V1, "digest")))


# --- before PREPARE ------------------------------------------------------------------------------


def test_a_source_that_never_announces_is_named() -> None:
    machine = serving()
    feed(machine, Announced("a", V1))
    actions = machine.feed(TimerExpired("announce", V1))
    assert AckSources(V1, "failed", "never announced by b") in actions
    assert TellCoordinator("failed", V1, "never announced by b") in actions
    assert machine.feed(Announced("b", V1)) == [AckSources(V1, "failed", "never announced by b")]
    assert machine.feed(TimerExpired("announce", V1)) == []


def test_a_late_announce_deadline_changes_nothing() -> None:
    machine = serving()
    feed(machine, *announce(V1))
    assert machine.feed(TimerExpired("announce", V1)) == []
    assert StartReceiving(V1) in machine.feed(Prepare(V1))


def test_a_version_that_began_before_the_plan_was_known_fails_at_once() -> None:
    """A source may publish while this sink still opens its session with another one."""
    machine = RankMachine()
    actions = machine.feed(Announced("a", V1))
    text = "a began it before this sink had a session with every source"
    assert actions == [
        CancelTimer("announce", V1),
        AckSources(V1, "failed", text),
        TellCoordinator("failed", V1, text),
    ]
    feed(machine, SourcesChanged(frozenset("ab")))
    assert machine.feed(Announced("b", V1)) == [AckSources(V1, "failed", text)]
    assert TellCoordinator("announced", V2) in feed(machine, *announce(V2))


def test_withdrawn_before_any_announcement() -> None:
    machine = serving()
    actions = machine.feed(Withdrawn("a", V2, "superseded by 3", superseded=True))
    assert actions == [TellCoordinator("failed", V2, "a: superseded by 3", "superseded")]
    assert machine.feed(Withdrawn("a", V2, "again")) == []
    assert machine.feed(Announced("b", V2)) == [AckSources(V2, "superseded", "a: superseded by 3")]
    assert TellCoordinator("announced", V3) in feed(machine, *announce(V3))


def test_withdrawing_a_waiting_version_leaves_the_one_that_runs_at_the_source() -> None:
    """Publishing faster than the wire must not starve the engine."""
    machine = serving()
    feed(machine, Announced("a", V1), Withdrawn("a", V2, "superseded by 3", superseded=True))
    assert TellCoordinator("announced", V1) in machine.feed(Announced("b", V1))
    assert StartReceiving(V1) in machine.feed(Prepare(V1))


def test_what_a_source_passed_over_can_not_complete() -> None:
    machine = serving()
    feed(machine, Announced("b", V1))
    actions = machine.feed(Withdrawn("a", V2, "this sink subscribed after it had begun"))
    assert [(a.version, a.state) for a in actions if isinstance(a, AckSources)] == [(V1, "failed")]


@pytest.mark.parametrize(
    ("event", "state"),
    [
        (Withdrawn("a", V1, "superseded by 2", superseded=True), "superseded"),
        (SourceLost("b", "reset"), "failed"),
        (CoordinatorLost("reset"), "failed"),
        (SourcesChanged(frozenset("ac")), "failed"),
        (AskedToDrop("a", V1), "dropped"),
        (Abort(V1, "rank 1: full", "failed"), "failed"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_announced_version_ends(event: Any, state: str) -> None:
    machine = serving()
    feed(machine, *announce(V1))
    actions = machine.feed(event)
    assert [(a.version, a.state) for a in actions if isinstance(a, AckSources)] == [(V1, state)]
    told = [(a.kind, a.state) for a in actions if isinstance(a, TellCoordinator)]
    assert told == ([] if isinstance(event, Abort) else [("failed", state)])
    assert machine.feed(Prepare(V1)) == []
    assert machine.state is S.SERVING


def test_a_source_that_dies_between_two_announcements() -> None:
    machine = serving()
    feed(machine, Announced("a", V1), SourceLost("a", "reset"))
    (ack,) = machine.feed(Announced("b", V1))
    assert isinstance(ack, AckSources)
    assert "source a lost" in ack.text


def test_memory_of_dead_versions_is_bounded() -> None:
    machine = serving()
    for step in range(1, 500):
        feed(machine, Withdrawn("a", Version(1, step), "superseded", superseded=True))
    assert len(machine.dead) == 64
    newest = Version(1, 500)
    feed(machine, *announce(newest), Prepare(newest), Failed(newest, "full"))
    assert machine.dead == {}
    assert machine.announced == {}


# --- DropRequest ---------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [S.RECEIVING, S.VERIFIED])
def test_a_lagging_rank_drops_before_it_arms(state: RankState) -> None:
    """Case 43."""
    machine = at(state)
    actions = machine.feed(AskedToDrop("a", V1))
    assert_aborted(machine, actions, disarm=False)
    assert [a.state for a in actions if isinstance(a, AckSources)] == ["dropped"]
    assert [a.state for a in actions if isinstance(a, TellCoordinator)] == ["dropped"]


@pytest.mark.parametrize("state", [S.ARMING, S.ARMED, S.INSTALLING])
def test_a_rank_in_its_gates_is_never_dropped(state: RankState) -> None:
    machine = at(state)
    assert machine.feed(AskedToDrop("a", V1)) == []
    assert machine.state is state


@pytest.mark.parametrize("state", IN_SYNC)
def test_what_waits_behind_a_sync_may_be_dropped(state: RankState) -> None:
    machine = at(state)
    feed(machine, *announce(V2))
    actions = machine.feed(AskedToDrop("a", V2))
    assert [(a.version, a.state) for a in actions if isinstance(a, AckSources)] == [(V2, "dropped")]
    assert (machine.state, machine.target) == (state, V1)


@pytest.mark.parametrize("version", [V0, V3])
def test_a_drop_request_for_another_version_changes_nothing(version: Version) -> None:
    machine = serving()
    before = copy.deepcopy(machine)
    assert machine.feed(AskedToDrop("a", version)) == []
    assert machine == before
