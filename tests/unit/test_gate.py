"""Gates alone: real threads, no torch."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from streamsync.engines.gate import Gates
from streamsync.errors import EngineError, PoisonedStepError, QuarantinedError, VersionError
from streamsync.types import Version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

V1, V2, V3 = (Version(1, step) for step in (1, 2, 3))
A, B = frozenset({"a"}), frozenset({"b"})
LONG = 20.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "what the test waits for did not happen"
        time.sleep(0.001)


def waiting(gates: Gates, count: int = 1) -> Callable[[], bool]:
    return lambda: gates.statistics().num_waiting == count


def committed(gates: Gates, version: Version) -> None:
    gates.arm(version, ("a", "b"), whole=False, deadline=LONG)
    for group in ("a", "b"):
        gates.open(version, group)
    gates.commit(version)


def walk(gates: Gates, *groups: frozenset[str]) -> Version | None:
    with gates.forward():
        for group in groups or (A, B):
            gates.pass_gate(group)
    return gates.last_version


class Held:
    """A forward in a thread of its own, stopped inside after its first gate."""

    def __init__(self, gates: Gates, pool: ThreadPoolExecutor) -> None:
        self.inside, self.go = threading.Event(), threading.Event()

        def run() -> Version | None:
            with gates.forward():
                gates.pass_gate(A)
                self.inside.set()
                assert self.go.wait(LONG)
                gates.pass_gate(B)
            return gates.last_version

        self.result: Future[Version | None] = pool.submit(run)
        assert self.inside.wait(LONG)


def test_forwards_run_freely_while_nothing_is_armed() -> None:
    gates = Gates()
    assert gates.last_version is None
    assert walk(gates) is None
    committed(gates, V1)
    assert walk(gates) == V1
    assert gates.statistics().num_waits == 0
    assert gates.statistics().num_active == 0


def test_arm_waits_for_the_forward_that_runs_and_it_keeps_its_version(
    pool: ThreadPoolExecutor,
) -> None:
    gates = Gates()
    committed(gates, V1)
    held = Held(gates, pool)
    arm = pool.submit(gates.arm, V2, ("a", "b"), whole=False, deadline=LONG)
    until(lambda: gates._arming is not None)
    late = pool.submit(walk, gates)
    until(waiting(gates))
    assert not arm.done()
    assert gates.statistics().armed is None
    held.go.set()
    assert held.result.result(LONG) == V1
    arm.result(LONG)
    until(waiting(gates))
    assert not late.done()
    for group in ("b", "a"):
        gates.open(V2, group)
    until(waiting(gates))
    assert not late.done(), "outputs of an uncommitted version left"
    gates.commit(V2)
    assert late.result(LONG) == V2
    assert gates.statistics().wait_seconds > 0
    assert gates.statistics().num_waits >= 1


def test_a_gate_waits_for_its_own_group_only(pool: ThreadPoolExecutor) -> None:
    gates = Gates()
    gates.arm(V1, ("a", "b"), whole=False, deadline=LONG)
    gates.open(V1, "a")
    held = Held(gates, pool)  # a is passed while b is closed
    held.go.set()
    until(waiting(gates))
    assert gates.statistics().closed == ("b",)
    gates.open(V1, "b")
    gates.commit(V1)
    assert held.result.result(LONG) == V1


def test_whole_makes_the_first_gate_wait_for_every_group(pool: ThreadPoolExecutor) -> None:
    gates = Gates()
    gates.arm(V1, ("a", "b"), whole=True, deadline=LONG)
    gates.open(V1, "a")
    passed = threading.Event()

    def run() -> None:
        with gates.forward():
            gates.pass_gate(A)
            passed.set()

    forward = pool.submit(run)
    until(waiting(gates))
    assert not passed.is_set()
    gates.open(V1, "b")
    assert passed.wait(LONG)
    gates.commit(V1)
    forward.result(LONG)


def test_an_arm_is_not_starved_by_back_to_back_forwards(pool: ThreadPoolExecutor) -> None:
    gates = Gates()
    stop = threading.Event()
    # Two forwards that always overlap: without priority there is never a moment without one.
    turn = threading.Barrier(2)

    def run() -> int:
        count = 0
        while not stop.is_set():
            with gates.forward():
                gates.pass_gate(A)
                try:
                    turn.wait(0.2)
                except threading.BrokenBarrierError:
                    turn.reset()
                count += 1
        return count

    runs = [pool.submit(run) for _ in range(2)]
    for step in range(1, 6):
        committed(gates, Version(1, step))
    stop.set()
    for forward in runs:
        assert forward.result(LONG) > 0


def test_nested_calls_are_one_forward_and_hold_once(pool: ThreadPoolExecutor) -> None:
    gates = Gates()
    gates.arm(V1, ("a", "b"), whole=False, deadline=LONG)
    gates.open(V1, "a")
    gates.open(V1, "b")
    inner_done = threading.Event()

    def run() -> None:
        with gates.forward():
            with gates.forward():
                gates.pass_gate(A)
            inner_done.set()
            gates.pass_gate(B)

    forward = pool.submit(run)
    assert inner_done.wait(LONG), "a nested call waited for COMMIT"
    until(waiting(gates))
    gates.commit(V1)
    forward.result(LONG)
    assert gates.statistics().num_active == 0


def test_a_nested_call_does_not_wait_for_the_arm_that_waits_for_it(
    pool: ThreadPoolExecutor,
) -> None:
    gates = Gates()
    inside, go = threading.Event(), threading.Event()

    def run() -> None:
        with gates.forward():
            inside.set()
            assert go.wait(LONG)
            with gates.forward():
                gates.pass_gate(A)

    forward = pool.submit(run)
    assert inside.wait(LONG)
    arm = pool.submit(gates.arm, V1, ("a",), whole=False, deadline=LONG)
    until(lambda: gates._arming is not None)
    go.set()
    forward.result(LONG)
    arm.result(LONG)


def test_an_exception_in_a_forward_leaves_nothing_behind() -> None:
    gates = Gates()
    gates.arm(V1, ("a",), whole=False, deadline=LONG)
    gates.open(V1, "a")

    def fail(error: type[BaseException]) -> None:
        with gates.forward():
            gates.pass_gate(A)
            raise error  # and nobody waits for COMMIT

    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error):
            fail(error)
    assert gates.statistics().num_active == 0
    gates.commit(V1)
    gates.arm(V2, ("a",), whole=False, deadline=LONG)


def test_a_call_whose_leave_never_came_is_forgotten_by_its_thread() -> None:
    gates = Gates(gate_seconds=0.05)

    def call() -> None:
        gates.enter_forward("model", sys._getframe())
        gates.pass_gate(A)

    call()  # as after a KeyboardInterrupt, which skips the hook that leaves
    assert gates.statistics().num_active == 1
    with pytest.raises(EngineError, match="still runs in thread MainThread"):
        gates.arm(V1, ("a",), whole=False, deadline=0.05)
    assert walk(gates) is None
    gates.arm(V1, ("a",), whole=False, deadline=LONG)


def test_a_thread_that_died_in_a_forward_does_not_block_arming() -> None:
    gates = Gates()
    thread = threading.Thread(target=gates.enter_forward, args=("model",))
    thread.start()
    thread.join()
    assert gates.statistics().num_active == 1
    gates.arm(V1, ("a",), whole=False, deadline=LONG)


def test_leaving_without_having_entered_changes_nothing(pool: ThreadPoolExecutor) -> None:
    gates = Gates()
    gates.leave_forward("model")
    held = Held(gates, pool)
    gates.leave_forward("model")
    assert gates.statistics().num_active == 1
    held.go.set()
    held.result.result(LONG)
    with gates.forward():
        gates.leave_forward("another")
        assert gates.statistics().num_active == 1


def test_disarm_lets_the_old_version_go_on(pool: ThreadPoolExecutor) -> None:
    gates = Gates()
    committed(gates, V1)
    gates.arm(V2, ("a",), whole=False, deadline=LONG)
    forward = pool.submit(walk, gates)
    until(waiting(gates))
    gates.disarm(V2)
    assert forward.result(LONG) == V1
    with pytest.raises(VersionError, match="too late to open a gate"):
        gates.open(V2, "a")


def test_disarm_gives_the_old_stamp_back_to_a_forward_that_read_untouched_groups(
    pool: ThreadPoolExecutor,
) -> None:
    gates = Gates()
    committed(gates, V1)
    gates.arm(V2, ("b",), whole=False, deadline=LONG)  # a partial version: a stays
    held = Held(gates, pool)  # passed the gate of a, stamped 2
    held.go.set()
    until(waiting(gates))
    gates.disarm(V2)
    assert held.result.result(LONG) == V1


def test_disarm_is_refused_once_a_group_landed() -> None:
    gates = Gates()
    gates.arm(V1, ("a", "b"), whole=False, deadline=LONG)
    gates.open(V1, "a")
    with pytest.raises(EngineError, match="group a landed already"):
        gates.disarm(V1)
    assert gates.statistics().armed == V1


def test_disarm_and_quarantine_end_an_arm_that_waits(pool: ThreadPoolExecutor) -> None:
    gates = Gates()
    held = Held(gates, pool)
    arm = pool.submit(gates.arm, V1, ("a",), whole=False, deadline=LONG)
    until(lambda: gates._arming is not None)
    gates.disarm(V1)
    with pytest.raises(VersionError, match="aborted while it waited"):
        arm.result(LONG)
    arm = pool.submit(gates.arm, V2, ("a",), whole=False, deadline=LONG)
    until(lambda: gates._arming is not None)
    gates.quarantine("the test says so")
    with pytest.raises(QuarantinedError, match="the test says so"):
        arm.result(LONG)
    held.go.set()
    with pytest.raises(PoisonedStepError):
        held.result.result(LONG)
    assert gates.statistics().armed is None


def test_quarantine_poisons_forwards_in_gates_and_before_commit(pool: ThreadPoolExecutor) -> None:
    """Case 35: a failure half way serves nothing, until the next version heals."""
    gates = Gates()
    gates.arm(V1, ("a", "b"), whole=False, deadline=LONG)
    gates.open(V1, "a")
    in_gate = pool.submit(walk, gates)
    at_end = pool.submit(walk, gates, A)
    until(waiting(gates, 2))
    gates.quarantine("source 0 died")
    for forward in (in_gate, at_end):
        with pytest.raises(PoisonedStepError, match="source 0 died"):
            forward.result(LONG)
    for late in (lambda: gates.open(V1, "b"), lambda: gates.commit(V1), lambda: gates.disarm(V1)):
        with pytest.raises(VersionError, match="no version is armed"):
            late()
    assert gates.last_version is None
    new = pool.submit(walk, gates)
    until(waiting(gates))
    gates.arm(V2, ("a", "b"), whole=False, deadline=LONG)  # healing
    gates.open(V2, "a")
    gates.open(V2, "b")
    assert not new.done(), "a forward started on a quarantined engine"
    gates.commit(V2)
    assert new.result(LONG) == V2
    assert gates.statistics().quarantined == ""


def test_a_forward_past_all_gates_is_poisoned_too(pool: ThreadPoolExecutor) -> None:
    gates = Gates()
    held = Held(gates, pool)
    gates.quarantine("half written")
    held.go.set()
    with pytest.raises(PoisonedStepError):
        held.result.result(LONG)


def test_every_wait_ends_at_the_gate_deadline_and_says_for_what(pool: ThreadPoolExecutor) -> None:
    gates = Gates(gate_seconds=0.05)
    gates.arm(V1, ("a", "b"), whole=False, deadline=LONG)
    gates.open(V1, "a")
    with pytest.raises(EngineError, match="group b did not land"):
        walk(gates)
    gates.open(V1, "b")
    with pytest.raises(EngineError, match="COMMIT did not come"):
        walk(gates)
    gates.quarantine("no source left")
    with pytest.raises(QuarantinedError, match="no source left"):
        walk(gates)
    assert gates.statistics().num_active == 0
    committed(gates, V2)
    held = Held(gates, pool)
    arm = pool.submit(gates.arm, V3, ("a",), whole=False, deadline=LONG)
    until(lambda: gates._arming is not None)
    with pytest.raises(EngineError, match=r"arming waits for the forward of thread .*version=1.3"):
        walk(gates)
    held.go.set()
    arm.result(LONG)


def test_the_gate_deadline_bounds_all_waits_of_one_forward_together() -> None:
    gates = Gates(gate_seconds=LONG)
    gates.arm(V1, ("a",), whole=False, deadline=LONG)

    def late() -> None:
        with gates.forward():
            gates._active[threading.get_ident()].waited_seconds = LONG  # spent in earlier gates
            gates.pass_gate(A)

    with pytest.raises(EngineError, match="group a did not land"):
        late()


def test_an_arm_that_found_no_moment_leaves_nothing_armed(pool: ThreadPoolExecutor) -> None:
    gates = Gates()
    held = Held(gates, pool)
    with pytest.raises(EngineError, match="a forward still runs"):
        gates.arm(V1, ("a",), whole=False, deadline=0.02)
    assert gates.statistics().armed is None
    assert walk(gates) is None  # and forwards start again
    held.go.set()
    held.result.result(LONG)
    gates.arm(V1, ("a",), whole=False, deadline=LONG)


def test_late_and_repeated_messages_are_refused() -> None:
    gates = Gates()
    committed(gates, V2)
    for late in (
        lambda: gates.open(V2, "a"),
        lambda: gates.commit(V2),
        lambda: gates.disarm(V2),
        lambda: gates.arm(V1, ("a",), whole=False, deadline=LONG),
        lambda: gates.arm(V2, ("a",), whole=False, deadline=LONG),
    ):
        with pytest.raises(VersionError):
            late()
    gates.arm(V3, ("a",), whole=False, deadline=LONG)
    with pytest.raises(VersionError, match=r"while 1\.3 is"):
        gates.arm(Version(2, 0), ("a",), whole=False, deadline=LONG)
    with pytest.raises(EngineError, match="group b was not armed"):
        gates.open(V3, "b")
    with pytest.raises(EngineError, match="group a did not land"):
        gates.commit(V3)
    gates.open(V3, "a")
    with pytest.raises(EngineError, match="group a was opened before"):
        gates.open(V3, "a")
    gates.commit(V3)


def test_each_thread_reads_the_version_of_its_own_forward(pool: ThreadPoolExecutor) -> None:
    gates = Gates()
    committed(gates, V1)
    assert walk(gates) == V1
    committed(gates, V2)
    assert pool.submit(walk, gates).result(LONG) == V2
    assert gates.last_version == V1
    assert pool.submit(lambda: gates.last_version).result(LONG) == V2
