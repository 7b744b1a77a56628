"""What the events of all processes say: stalls, and one trace for all. Pure.

All times are `time.monotonic()` seconds, which the processes of one Linux host share.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import TYPE_CHECKING

from streamsync.observability.trace import Trace, build_trace, overlap
from streamsync.types import STAGE_NAMES, Version

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from streamsync.observability.probe import Event


def stall(token_times: Sequence[float], began: float, ended: float) -> float:
    """The longest gap between two tokens that reaches into the time from `began` to `ended`, minus
    the median of all gaps; in seconds, 0 when no gap was longer than usual.

    `token_times` are the times at which tokens left, in order.
    """
    gaps = [(b - a, a, b) for a, b in pairwise(token_times)]
    during = [gap for gap, a, b in gaps if a < ended and b > began]
    if not during:
        return 0.0
    return max(0.0, max(during) - statistics.median(gap for gap, _, _ in gaps))


def token_times(events: Iterable[Event]) -> list[float]:
    """When each token left, in order."""
    return sorted(e.started_at + e.seconds for e in events if e.name == "token")


def stage_overlap(events: Iterable[Event], version: Version) -> float:
    """The share of a version's time on the way in which at least two stages worked at once."""
    return overlap(
        (event.name, event.started_at, event.started_at + event.seconds)
        for event in events
        if event.version == version and event.name in STAGE_NAMES
    )


def joined_trace(processes: Iterable[tuple[str, int, Sequence[Event]]]) -> Trace:
    """One trace of several processes, each given as its name, its pid and its events."""
    return Trace(
        trace_events=[
            record
            for name, pid, events in processes
            for record in build_trace(name, pid, events).trace_events
        ]
    )
