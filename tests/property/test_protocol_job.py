"""Invariants 4 and 5 over whole jobs: whatever happens in whatever order, no torn model serves,
every publish ends, and the next version heals. And the checker sees a protocol that is wrong."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamsync.control.protocol import coordinator as c
from streamsync.control.protocol import rank as r
from streamsync.control.protocol import source as p
from streamsync.control.protocol.rank import RankState
from streamsync.control.protocol.rank_machine import RankMachine
from streamsync.types import Version
from tests.protocol_job import Job

index = st.integers(0, 30)


class Jobs(RuleBasedStateMachine):
    in_order = True

    @initialize(
        num_sources=st.integers(1, 3),
        num_replicas=st.integers(1, 2),
        num_ranks=st.integers(1, 3),
        policy=st.sampled_from(["supersede", "queue"]),
        links_break=st.booleans(),
    )
    def start(
        self,
        num_sources: int,
        num_replicas: int,
        num_ranks: int,
        policy: str,
        links_break: bool,
    ) -> None:
        self.job = Job(
            num_sources,
            num_replicas,
            num_ranks,
            policy=policy,
            links_break=links_break,
            in_order=self.in_order,
        )

    @rule(steps=st.lists(st.tuples(index, index), min_size=1, max_size=12))
    def deliver(self, steps: list[tuple[int, int]]) -> None:
        for chosen, place in steps:
            self.job.deliver(chosen, place)
            self.job.check()

    @rule(rounds=st.integers(1, 6))
    def get_on(self, rounds: int) -> None:
        """All goes well for a while, so that later stages are reached often."""
        for _ in range(rounds):
            self.job.advance()

    @rule(chosen=index, ok=st.integers(0, 9))
    def call_engine(self, chosen: int, ok: int) -> None:
        self.job.call_engine(chosen, ok=ok > 0)

    @rule(chosen=index, kind=st.sampled_from(["ready", "starved", "verified", "land", "fail"]))
    def progress(self, chosen: int, kind: str) -> None:
        self.job.progress(chosen, kind)

    @rule(chosen=index)
    def publish(self, chosen: int) -> None:
        self.job.publish(chosen)

    @rule(chosen=index)
    def publish_again(self, chosen: int) -> None:
        self.job.publish_again(chosen)

    @rule(chosen=index, ok=st.integers(0, 4))
    def take_snapshot(self, chosen: int, ok: int) -> None:
        self.job.take_snapshot(chosen, ok=ok > 0)

    @rule(chosen=index)
    def cancel_waiting(self, chosen: int) -> None:
        self.job.cancel_waiting(chosen)

    @rule(chosen=index)
    def expire(self, chosen: int) -> None:
        self.job.expire(chosen)

    @rule(chosen=index)
    def fail_link(self, chosen: int) -> None:
        self.job.fail_link(chosen)

    @rule(chosen=index)
    def cut(self, chosen: int) -> None:
        self.job.cut(chosen)

    @rule(chosen=index, source=st.booleans())
    def kill(self, chosen: int, source: bool) -> None:
        (self.job.kill_source if source else self.job.kill_sink)(chosen)

    @rule()
    def reconnect(self) -> None:
        self.job.reconnect()

    @precondition(lambda self: not self.in_order)
    @rule(chosen=index, place=index)
    def repeat(self, chosen: int, place: int) -> None:
        self.job.repeat(chosen, place)

    @invariant()
    def holds(self) -> None:
        self.job.check()

    def teardown(self) -> None:
        self.job.heal()


class JobsOutOfOrder(Jobs):
    in_order = False


TestInOrder = Jobs.TestCase
TestInOrder.settings = settings(stateful_step_count=40)
TestOutOfOrder = JobsOutOfOrder.TestCase
TestOutOfOrder.settings = settings(stateful_step_count=40)


# --- the checker goes red ------------------------------------------------------------------------


def explore(num_jobs: int = 60, **machines: Any) -> None:
    """Jobs in which one thing or another goes wrong."""
    for seed in range(num_jobs):
        draw = random.Random(seed)
        one_mishap(draw, Job(draw.randint(1, 2), 1, draw.randint(2, 3), **machines))


def one_mishap(draw: random.Random, job: Job) -> None:
    def step() -> None:
        match draw.randrange(4):
            case 0 | 1:
                job.deliver(draw.randrange(100))
            case 2:
                job.call_engine(draw.randrange(100))
            case _:
                job.progress(draw.randrange(100), draw.choice(["ready", "land"]))
        job.check()

    for n in range(len(job.sources)):
        job.publish(n)
    for _ in range(draw.randrange(80)):
        step()
    match draw.randrange(3):
        case 0:
            for n in range(len(job.sinks)):
                job.progress(n, "fail")
        case 1:
            job.expire(draw.randrange(100))
    for _ in range(60):
        step()
    job.heal()


def test_the_right_machines_pass() -> None:
    explore()


class OneRankEarly(c.CoordinatorMachine):
    """GO when all but one rank are armed."""

    def feed(self, event: c.Event) -> list[c.Action]:
        if (
            isinstance(event, c.RankSays)
            and event.kind == "armed"
            and self.phase is c.Phase.ARMING
            and len(self.heard) == self.num_ranks - 2
        ):
            self.heard.add(-1)
        return c.CoordinatorMachine.feed(self, event)


class CommitsEarly(c.CoordinatorMachine):
    """COMMIT at the first word of a rank that installed."""

    def feed(self, event: c.Event) -> list[c.Action]:
        if isinstance(event, c.RankSays) and event.kind == "installed":
            self.heard.update(range(self.num_ranks))
        return c.CoordinatorMachine.feed(self, event)


class AbortsAfterGo(c.CoordinatorMachine):
    """ABORT instead of QUARANTINE once ranks may have written."""

    def feed(self, event: c.Event) -> list[c.Action]:
        return [
            c.Broadcast(r.Abort(a.order.version, a.order.text))
            if isinstance(a, c.Broadcast) and isinstance(a.order, r.Quarantine)
            else a
            for a in c.CoordinatorMachine.feed(self, event)
        ]


class NeverAborts(c.CoordinatorMachine):
    """Ends a failed version without telling the ranks."""

    def feed(self, event: c.Event) -> list[c.Action]:
        return [
            a
            for a in c.CoordinatorMachine.feed(self, event)
            if not (isinstance(a, c.Broadcast) and isinstance(a.order, r.Abort | r.Quarantine))
        ]


class DisarmsAlone(RankMachine):
    """Goes back to the old version from ARMED when its own pipeline fails."""

    def feed(self, event: r.Event) -> list[r.Action]:
        if self.state is RankState.ARMED and isinstance(event, r.Failed | r.TimerExpired):
            self.state = RankState.ARMING
        return RankMachine.feed(self, event)


class WritesWhenArmed(RankMachine):
    """Does not wait for GO."""

    def feed(self, event: r.Event) -> list[r.Action]:
        actions = RankMachine.feed(self, event)
        if isinstance(event, r.GatesArmed) and self.state is RankState.ARMED:
            self.state = RankState.INSTALLING
            actions.append(r.StartLoading(event.version))
        return actions


class ResumesTorn(RankMachine):
    """Treats a failure after GO like one before."""

    def feed(self, event: r.Event) -> list[r.Action]:
        if self.state is RankState.INSTALLING and isinstance(event, r.Failed | r.Quarantine):
            self.state = RankState.ARMING
        return RankMachine.feed(self, event)


class NeverAcknowledges(RankMachine):
    """Tells no source how a version ended."""

    def feed(self, event: r.Event) -> list[r.Action]:
        return [a for a in RankMachine.feed(self, event) if not isinstance(a, r.AckSources)]


class ForgetsDeadlines(p.SourceMachine):
    """Waits for ever."""

    def feed(self, event: p.Event) -> list[p.Action]:
        return [a for a in p.SourceMachine.feed(self, event) if not isinstance(a, p.SetTimer)]


class SaysCommitted(p.SourceMachine):
    """Believes that all went well."""

    def feed(self, event: p.Event) -> list[p.Action]:
        if isinstance(event, p.Acknowledged):
            event = p.Acknowledged(event.peer, event.version, "committed")
        return p.SourceMachine.feed(self, event)


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        ({"coordinator": OneRankEarly}, "never armed"),
        ({"coordinator": CommitsEarly}, "COMMIT, but"),
        ({"coordinator": AbortsAfterGo}, "ABORT after GO"),
        ({"rank": DisarmsAlone}, "left ARMED alone"),
        ({"rank": WritesWhenArmed}, "before GO"),
        ({"rank": ResumesTorn}, "disarmed after a write|is torn"),
        ({"rank": NeverAcknowledges}, "does not end|never told"),
        ({"source": ForgetsDeadlines}, "never told"),
        ({"source": SaysCommitted}, "said committed, is not"),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_a_wrong_machine_is_caught(machine: dict[str, Any], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        explore(**machine)


def test_ranks_end_alone_what_a_mute_coordinator_leaves() -> None:
    explore(coordinator=NeverAborts)


def test_a_torn_memory_is_caught() -> None:
    """Case 42: the checker itself."""
    job = Job(1, 1, 1)
    job.heal()
    sink = job.sinks["r0", 0]
    sink.engine.memory[1] = Version(0, 7)
    with pytest.raises(AssertionError, match="torn"):
        job.check()
