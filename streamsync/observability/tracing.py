"""Listens to events and writes them as a Chrome trace, which Perfetto and browsers show."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from streamsync.errors import ConfigError
from streamsync.observability.trace import Trace, build_trace, check_trace

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from streamsync.observability.probe import Event


class ChromeTrace:
    """Collects events: `probe.subscribe(trace)`, later `trace.write(path)`.

    `process` names this process in the trace. The newest `max_events` are kept, about 300 bytes
    each. May be called from any thread. Times are `time.monotonic()`, which all processes of one
    host share, so that `merge_traces` needs no alignment.
    """

    def __init__(self, process: str, *, max_events: int = 1_000_000) -> None:
        self.process = process
        self._events: deque[Event] = deque(maxlen=max_events)

    def __call__(self, event: Event) -> None:
        """Keeps one event."""
        self._events.append(event)

    def trace(self) -> Trace:
        """What was collected so far."""
        return build_trace(self.process, os.getpid(), self._events.copy())

    def write(self, path: Path) -> None:
        """Writes what was collected so far; raises `ConfigError` when `path` can't be written."""
        _write(path, self.trace())


def read_trace(path: Path) -> Trace:
    """The trace in `path`; raises `ConfigError` when it is none of ours or can't be shown."""
    try:
        trace = msgspec.json.decode(path.read_bytes(), type=Trace)
        check_trace(trace)
    except (OSError, msgspec.MsgspecError, ConfigError) as error:
        raise ConfigError(f"can't read the trace {path}: {error}") from error
    return trace


def merge_traces(paths: Iterable[Path], out: Path) -> Trace:
    """Writes the traces of several processes of one host as one file, and returns it."""
    merged = Trace(
        trace_events=[event for path in paths for event in read_trace(path).trace_events]
    )
    _write(out, merged)
    return merged


def _write(path: Path, trace: Trace) -> None:
    try:
        path.write_bytes(msgspec.json.encode(trace))
    except OSError as error:
        raise ConfigError(f"can't write the trace {path}: {error}") from error
