"""A forward: one outermost call of a model in one thread, and what the gates count of it.

It *enters*, passes *gates*, has its outputs *held* until its version is committed, and *leaves*.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

    from streamsync.types import Version


@dataclass(slots=True, frozen=True, kw_only=True)
class GateStatistics:
    """What `Gates` did so far and where it stands.

    `wait_seconds` and `num_waits` count every wait of a forward (to enter, in a gate, for COMMIT)
    that did not pass at once; a wait in progress is counted when it ends. `closed` lists the groups
    that forwards wait for now.
    """

    num_waits: int
    wait_seconds: float
    num_active: int
    num_waiting: int
    committed: Version | None
    armed: Version | None
    quarantined: str
    closed: tuple[str, ...]


@dataclass(slots=True, eq=False)
class Call:
    """One watched call on a thread's stack: `scope` is what is called, `frame` a Python frame that
    runs as long as the call does (None when the matching leave is certain)."""

    scope: object
    frame: FrameType | None


@dataclass(slots=True, eq=False)
class Forward:
    """One forward of one thread, from enter to leave. Owned by `Gates`, guarded by its lock."""

    thread: threading.Thread
    calls: list[Call] = field(default_factory=list)
    is_stamped: bool = False
    stamp: Version | None = None
    poisoned: str = ""
    waited_seconds: float = 0.0

    def drop_dead_calls(self) -> None:
        """Forgets calls whose end nobody reported: hooks are skipped by a KeyboardInterrupt, a
        SystemExit and the like. Runs in the thread that the calls belong to."""
        while self.calls and not self._is_running(self.calls[-1].frame):
            self.calls.pop()

    def _is_running(self, frame: FrameType | None) -> bool:
        if frame is None:
            return self.thread is threading.current_thread()
        here: FrameType | None = sys._getframe(1)
        while here is not None:
            if here is frame:
                return True
            here = here.f_back
        return False
