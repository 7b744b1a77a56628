"""The records of a Chrome trace, made from events, and what can be read out of them. Pure.

Format: "Trace Event Format" of the Chromium project, JSON object form, which Perfetto reads. Only
complete spans (`X`), instants (`i`) and names (`M`) are used. Times are microseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from streamsync.errors import ConfigError
from streamsync.types import STAGE_NAMES, Version

if TYPE_CHECKING:
    from collections.abc import Iterable

    from streamsync.observability.probe import Event

SPAN_LANES: Final[dict[str, str]] = {
    "publish": "trainer",
    "train": "trainer",
    "step": "generation",
    "token": "generation",
}
"""Where spans that are no stage's stand; a stage has a lane per peer."""

Microseconds = Annotated[float, msgspec.Meta(ge=0)]


class Span(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="ph", tag="X"
):
    """Work that took `dur` microseconds from `ts` on. Spans of one `tid` nest or stand apart."""

    name: str
    cat: Literal["stage", "embedder"]
    ts: Microseconds
    dur: Microseconds
    pid: int
    tid: int
    args: dict[str, str | int] = {}


class Instant(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="ph", tag="i"
):
    """A moment of a sync, drawn over the whole process (`s`: scope)."""

    name: str
    cat: Literal["version"]
    ts: Microseconds
    pid: int
    tid: int
    s: Literal["p"] = "p"
    args: dict[str, str | int] = {}


class Name(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="ph", tag="M"
):
    """The name of a process or of one of its lanes."""

    name: Literal["process_name", "thread_name"]
    pid: int
    tid: int
    args: dict[Literal["name"], str]


class Trace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """A trace file: the events of one process, or of several of one host after a merge."""

    trace_events: list[Span | Instant | Name]
    display_time_unit: Literal["ms"] = "ms"


def build_trace(process: str, pid: int, events: Iterable[Event]) -> Trace:
    """Lays out the events of one process in lanes; spans that overlap in a lane get a lane more."""
    records: list[Span | Instant | Name] = [
        Name(name="process_name", pid=pid, tid=0, args={"name": process})
    ]
    tids: dict[str, int] = {}
    ends: dict[str, list[float]] = {}

    def tid_of(lane: str) -> int:
        if lane not in tids:
            tids[lane] = len(tids) + 1
            records.append(Name(name="thread_name", pid=pid, tid=tids[lane], args={"name": lane}))
        return tids[lane]

    for event in sorted(events, key=lambda event: (event.started_at, -event.seconds)):
        ts = round(event.started_at * 1e6, 3)
        is_stage = event.name in STAGE_NAMES
        if not is_stage and event.name not in SPAN_LANES:
            records.append(
                Instant(
                    name=event.name,
                    cat="version",
                    ts=ts,
                    pid=pid,
                    tid=tid_of("versions"),
                    args=_arguments(event),
                )
            )
            continue
        lane = f"{event.name} {event.peer}".rstrip() if is_stage else SPAN_LANES[event.name]
        dur = round(event.seconds * 1e6, 3)
        taken = ends.setdefault(lane, [])
        row = next((row for row, end in enumerate(taken) if end <= ts), len(taken))
        taken[row : row + 1] = [ts + dur]
        records.append(
            Span(
                name=event.name,
                cat="stage" if is_stage else "embedder",
                ts=ts,
                dur=dur,
                pid=pid,
                tid=tid_of(lane if row == 0 else f"{lane} ({row + 1})"),
                args=_arguments(event),
            )
        )
    return Trace(trace_events=records)


def check_trace(trace: Trace) -> None:
    """Raises `ConfigError` unless every lane is named and its spans nest or stand apart: a viewer
    would drop or misplace the others."""
    named = {
        (record.pid, record.tid if record.name == "thread_name" else None)
        for record in trace.trace_events
        if isinstance(record, Name)
    }
    lanes: dict[tuple[int, int], list[Span]] = {}
    for record in trace.trace_events:
        if isinstance(record, Name):
            continue
        for key in ((record.pid, None), (record.pid, record.tid)):
            if key not in named:
                raise ConfigError(f"trace: process {key[0]}, lane {key[1]} has no name")
        if isinstance(record, Span):
            lanes.setdefault((record.pid, record.tid), []).append(record)
    for spans in lanes.values():
        open_ends: list[float] = []
        for span in sorted(spans, key=lambda span: (span.ts, -span.dur)):
            while open_ends and open_ends[-1] <= span.ts + _CLOCK:
                open_ends.pop()
            if open_ends and span.ts + span.dur > open_ends[-1] + _CLOCK:
                raise ConfigError(f"trace: span {span.name} at {span.ts} us crosses another one")
            open_ends.append(span.ts + span.dur)


def stage_overlap(trace: Trace, version: Version | None = None) -> float:
    """The share of the sync's wall time in which at least two different stages worked at once.

    The wall time runs from the first stage's first start to the last one's last end, over all
    processes of `trace`; with `version` only its spans count. 0 when nothing was recorded.
    """
    return overlap(
        (record.name, record.ts, record.ts + record.dur)
        for record in trace.trace_events
        if isinstance(record, Span)
        and record.cat == "stage"
        and (version is None or record.args.get("version") == str(version))
    )


def overlap(spans: Iterable[tuple[str, float, float]]) -> float:
    """The share of the time from first start to last end in which spans of two or more names were
    open at once; a span is (name, start, end)."""
    edges = sorted(
        edge for name, start, end in spans for edge in ((start, 1, name), (end, -1, name))
    )
    if not edges or edges[-1][0] <= edges[0][0]:
        return 0.0
    num_open: dict[str, int] = {}
    shared = 0.0
    before = edges[0][0]
    for at, change, name in edges:
        if sum(count > 0 for count in num_open.values()) >= 2:
            shared += at - before
        num_open[name] = num_open.get(name, 0) + change
        before = at
    return shared / (edges[-1][0] - edges[0][0])


# Rounding of two floats that were added differently; times are written in thousandths.
_CLOCK = 0.01


def _arguments(event: Event) -> dict[str, str | int]:
    arguments: dict[str, str | int] = {}
    if event.version is not None:
        arguments["version"] = str(event.version)
    if event.bucket >= 0:
        arguments["bucket"] = event.bucket
    if event.bytes:
        arguments["bytes"] = event.bytes
    for field in ("peer", "group", "text"):
        if value := getattr(event, field):
            arguments[field] = value
    return arguments
