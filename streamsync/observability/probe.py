"""One frozen event record and who listens to it. Metrics, logs and traces are all listeners."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from streamsync.types import Version

_log = logging.getLogger("streamsync")

EventName = Literal[
    "convert", "pin", "send", "receive", "load",
    "announced", "prepared", "armed", "go", "landed", "installed", "committed", "aborted", "failed",
    "quarantined", "healed", "publish", "step", "token", "train",
]  # fmt: skip


class Event(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that happened, or (`seconds` > 0) a span that ended now.

    `started_at` is `time.monotonic()` seconds. The five stage names are spans of one bucket's work;
    `publish`, `step`, `token` and `train` are spans of the trainer's or the engine's own; the rest
    are moments of a sync.
    """

    name: EventName
    started_at: float
    seconds: float = 0.0
    version: Version | None = None
    peer: str = ""
    bucket: int = -1
    group: str = ""
    bytes: int = 0
    text: str = ""


Listener = Callable[[Event], None]


class Probe:
    """Passes each event to its listeners, in the thread that emits it. Listeners must be quick and
    thread-safe; one that raises is logged and never reaches the data path."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Adds a listener; returns the function that removes it."""
        self._listeners = (*self._listeners, listener)

        def unsubscribe() -> None:
            self._listeners = tuple(x for x in self._listeners if x is not listener)

        return unsubscribe

    def emit(self, event: Event) -> None:
        """Tells every listener."""
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                _log.exception("a listener failed on event %s", event.name)

    def moment(self, name: EventName, **fields: object) -> None:
        """Emits an event without duration, now."""
        if self._listeners:
            self.emit(Event(name=name, started_at=time.monotonic(), **fields))  # type: ignore[arg-type]
