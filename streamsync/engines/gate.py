"""Gates between the writer of weights and the forwards that read them: thread synchronisation."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from streamsync.engines.forward import Call, Forward, GateStatistics
from streamsync.errors import EngineError, PoisonedStepError, QuarantinedError, VersionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from streamsync.types import Version


class Gates:
    """Which version forwards run on, which groups they may read, which outputs may leave.

    One lock guards all state; any method may be called from any thread. `arm`, `open`, `commit`,
    `disarm` and `quarantine` belong to the engine; the rest to the thread that runs a forward.
    A forward waits at most `gate_seconds` in all, over its start, its gates and COMMIT; then it
    gets an `EngineError` that names what it waited for, and the sync goes on without it.
    """

    def __init__(self, gate_seconds: float = 60.0) -> None:
        self._gate_seconds = gate_seconds
        self._changed = threading.Condition()
        self._active: dict[int, Forward] = {}
        self._committed: Version | None = None
        self._arming: Version | None = None
        self._armed: Version | None = None
        self._whole = False
        self._closed: set[str] = set()
        self._opened: set[str] = set()
        self._quarantined = ""
        self._last: Version | None = None
        self._last_here = threading.local()
        self._num_waits = 0
        self._num_waiting = 0
        self._wait_seconds = 0.0

    # ---- the engine's side

    def arm(self, version: Version, groups: Iterable[str], *, whole: bool, deadline: float) -> None:
        """Closes the gates of `groups` once no forward runs; forwards that want to start wait.

        A waiting arm goes before every forward that has not started, so that back-to-back forwards
        never starve it. A quarantined engine arms as well (healing) and stays quarantined until
        COMMIT. Raises `EngineError` when forwards still run after `deadline` seconds,
        `QuarantinedError` when `quarantine` came meanwhile, `VersionError` when `disarm` did, when
        another version is armed, or when `version` is not newer than the committed one. Then
        nothing is armed.
        """
        with self._changed:
            self._check_new(version)
            self._arming = version
            try:
                idle = self._changed.wait_for(
                    lambda: self._arming is not version or self._is_idle(), deadline
                )
                if self._arming is not version:
                    raise self._arm_ended(version)
                if not idle:
                    raise EngineError(
                        f"not armed: after {deadline:g} s a forward still runs in thread "
                        f"{self._threads()}; allow more seconds than one forward takes",
                        version=version,
                    )
                self._armed = version
                self._whole = whole
                self._closed = set(groups)
                self._opened = set()
            finally:
                if self._arming is version:
                    self._arming = None
                self._changed.notify_all()

    def open(self, version: Version, group: str) -> None:
        """Lets forwards read `group`. Raises `VersionError` unless `version` is armed, and
        `EngineError` for a group that was not armed with it or is open already."""
        with self._changed:
            self._check_armed(version, "open a gate")
            if group not in self._closed:
                why = "was opened before" if group in self._opened else "was not armed"
                raise EngineError(f"group {group} {why}", version=version)
            self._closed.remove(group)
            self._opened.add(group)
            self._changed.notify_all()

    def commit(self, version: Version) -> None:
        """Lets outputs of `version` leave, and ends a quarantine. Raises `VersionError` unless
        `version` is armed, and `EngineError` while groups have not landed."""
        with self._changed:
            self._check_armed(version, "commit")
            if self._closed:
                raise EngineError(
                    f"can't commit: {_listed(self._closed)} did not land", version=version
                )
            self._committed = version
            self._armed = None
            self._quarantined = ""
            self._changed.notify_all()

    def disarm(self, version: Version) -> None:
        """ABORT: opens all gates, the old version goes on. Also ends an `arm` that still waits.

        Raises `VersionError` unless `version` is armed or arming, and `EngineError` when one of its
        groups has landed: the old version is gone then, only `quarantine` is right.
        """
        with self._changed:
            if self._arming == version:
                self._arming = None
                self._changed.notify_all()
                return
            self._check_armed(version, "disarm")
            if self._opened:
                raise EngineError(
                    f"can't go back to the old version: {_listed(self._opened)} landed already; "
                    "quarantine instead",
                    version=version,
                )
            for forward in self._active.values():
                if forward.is_stamped:
                    # It passed gates of groups that this version leaves alone: old weights all.
                    forward.stamp = self._committed
            self._armed = None
            self._closed = set()
            self._changed.notify_all()

    def quarantine(self, reason: str) -> None:
        """Poisons every running forward, gives up the armed version and lets no forward start until
        the next `commit`. A second reason does not replace the first."""
        with self._changed:
            self._quarantined = self._quarantined or reason or "no reason given"
            for forward in self._active.values():
                forward.poisoned = forward.poisoned or self._quarantined
            self._arming = None
            self._armed = None
            self._closed = set()
            self._changed.notify_all()

    # ---- the forward's side

    def enter_forward(self, scope: object, frame: FrameType | None = None) -> bool:
        """Starts a forward in this thread, or a call nested in the one that it runs.

        `scope` is what is called, and names the call for `leave_forward`. `frame` is a Python frame
        that runs exactly as long as the call, for callers that can't promise the matching leave.
        Returns whether this is the outermost call; only that one waits, while an arm waits or the
        engine is quarantined. Raises `EngineError` (`QuarantinedError`) at the gate deadline.
        """
        ident = threading.get_ident()
        with self._changed:
            forward = self._active.get(ident)
            if forward is not None:
                forward.drop_dead_calls()
                if forward.calls:
                    forward.calls.append(Call(scope, frame))
                    return False
                del self._active[ident]
                self._changed.notify_all()
            forward = Forward(threading.current_thread())
            self._wait(
                forward, lambda: self._arming is None and not self._quarantined, self._not_entered
            )
            forward.calls.append(Call(scope, frame))
            self._active[ident] = forward
            return True

    def pass_gate(self, groups: frozenset[str]) -> None:
        """Waits until all of `groups` may be read by this thread's forward, and stamps the forward
        with its version at its first gate.

        Groups that the armed version leaves alone are open. With `arm(whole=True)` every gate waits
        for all groups. Raises `PoisonedStepError` when the version can't finish, `EngineError` at
        the gate deadline.
        """
        with self._changed:
            forward = self._active[threading.get_ident()]
            self._wait(
                forward,
                lambda: bool(forward.poisoned) or not self._blocked(groups),
                lambda: EngineError(
                    f"a forward waited {self._gate_seconds:g} s in its gates and "
                    f"{_listed(self._blocked(groups))} did not land",
                    version=self._armed,
                ),
            )
            self._check_poison(forward)
            if not forward.is_stamped:
                forward.is_stamped = True
                forward.stamp = self._committed if self._armed is None else self._armed

    def hold_outputs(self) -> None:
        """At the end of the outermost call: waits for COMMIT of the version that it ran on.

        Returns at once for nested calls and for committed versions. Raises `PoisonedStepError` when
        the outputs must not leave, `EngineError` at the gate deadline.
        """
        with self._changed:
            forward = self._active.get(threading.get_ident())
            if forward is None:
                return
            forward.drop_dead_calls()
            if len(forward.calls) > 1:
                return
            self._wait(
                forward,
                lambda: bool(forward.poisoned) or not self._is_uncommitted(forward),
                lambda: EngineError(
                    f"a forward waited {self._gate_seconds:g} s in all and COMMIT did not come; "
                    "its outputs are dropped",
                    version=forward.stamp,
                ),
            )
            self._check_poison(forward)
            if forward.is_stamped:
                self._last = self._last_here.version = forward.stamp

    def leave_forward(self, scope: object) -> None:
        """Ends the innermost call of `scope` in this thread. Never waits, never raises: a call that
        failed, or never entered, leaves too."""
        ident = threading.get_ident()
        with self._changed:
            forward = self._active.get(ident)
            if forward is None or all(call.scope is not scope for call in forward.calls):
                return
            while forward.calls.pop().scope is not scope:
                pass
            if not forward.calls:
                del self._active[ident]
                self._changed.notify_all()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """One forward around a block: everything in it runs on one version. The block's results are
        held until COMMIT; after an exception nothing is held."""
        scope = object()
        self.enter_forward(scope)
        try:
            yield
            self.hold_outputs()
        finally:
            self.leave_forward(scope)

    # ---- for people and metrics

    @property
    def last_version(self) -> Version | None:
        """The version that the last forward of the calling thread ran on; in a thread that ran
        none, the last of any thread. None when there was none, or it ran before any COMMIT."""
        if hasattr(self._last_here, "version"):
            version: Version | None = self._last_here.version
            return version
        return self._last

    def statistics(self) -> GateStatistics:
        """A snapshot."""
        with self._changed:
            return GateStatistics(
                num_waits=self._num_waits,
                wait_seconds=self._wait_seconds,
                num_active=len(self._active),
                num_waiting=self._num_waiting,
                committed=self._committed,
                armed=self._armed,
                quarantined=self._quarantined,
                closed=tuple(sorted(self._closed)),
            )

    # ---- with the lock held

    def _wait(
        self, forward: Forward, ready: Callable[[], bool], late: Callable[[], EngineError]
    ) -> None:
        if ready():
            return
        began = time.monotonic()
        self._num_waiting += 1
        try:
            done = self._changed.wait_for(ready, self._gate_seconds - forward.waited_seconds)
        finally:
            seconds = time.monotonic() - began
            forward.waited_seconds += seconds
            self._wait_seconds += seconds
            self._num_waits += 1
            self._num_waiting -= 1
        if not done:
            raise late()

    def _blocked(self, groups: frozenset[str]) -> set[str]:
        return self._closed if self._whole else self._closed & groups

    def _is_uncommitted(self, forward: Forward) -> bool:
        return forward.is_stamped and self._armed is not None and forward.stamp == self._armed

    def _is_idle(self) -> bool:
        # A thread that died inside a forward (SystemExit skips hooks) reads nothing any more.
        self._active = {i: f for i, f in self._active.items() if f.thread.is_alive()}
        return not self._active

    def _threads(self) -> str:
        return ", ".join(sorted(forward.thread.name for forward in self._active.values()))

    def _arm_ended(self, version: Version) -> EngineError | VersionError:
        if self._quarantined:
            return QuarantinedError(
                f"not armed: the engine was quarantined meanwhile ({self._quarantined})",
                version=version,
            )
        return VersionError("aborted while it waited for running forwards", version=version)

    def _not_entered(self) -> EngineError:
        if self._quarantined:
            return QuarantinedError(
                f"no forward starts: the weights may be torn ({self._quarantined}) and no full "
                f"transfer healed them within {self._gate_seconds:g} s"
            )
        return EngineError(
            f"a forward waited {self._gate_seconds:g} s to start: arming waits for the forward of "
            f"thread {self._threads()}",
            version=self._arming,
        )

    def _check_new(self, version: Version) -> None:
        busy = self._armed if self._arming is None else self._arming
        if busy is not None:
            raise VersionError(
                f"can't be armed while {busy} is: commit, disarm or quarantine first",
                version=version,
            )
        if self._committed is not None and version <= self._committed:
            raise VersionError(
                f"can't be armed: {self._committed} is committed and versions only grow",
                version=version,
            )

    def _check_armed(self, version: Version, what: str) -> None:
        if version != self._armed:
            armed = "no version" if self._armed is None else str(self._armed)
            raise VersionError(f"too late to {what}: {armed} is armed", version=version)

    def _check_poison(self, forward: Forward) -> None:
        if forward.poisoned:
            raise PoisonedStepError(
                f"this forward's version can't finish ({forward.poisoned}): drop its outputs and "
                "the caches that it wrote, and run it again",
                version=forward.stamp,
            )


def _listed(groups: Iterable[str], most: int = 8) -> str:
    names = sorted(groups)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return f"group{'s' if len(names) > 1 else ''} {', '.join(names[:most])}{rest}"
