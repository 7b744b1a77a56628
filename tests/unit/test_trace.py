from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from streamsync.errors import ConfigError
from streamsync.observability.probe import Event, Probe
from streamsync.observability.trace import overlap, stage_overlap
from streamsync.observability.tracing import ChromeTrace, merge_traces, read_trace
from streamsync.types import Version

if TYPE_CHECKING:
    from pathlib import Path

V1, V2 = Version(1, 1), Version(1, 2)


def span(name: str, start: float, end: float, **fields: Any) -> Event:
    return Event(name=name, started_at=start, seconds=end - start, **fields)


def written(path: Path, *events: Event, process: str = "trainer 0") -> Path:
    probe, trace = Probe(), ChromeTrace(process)
    probe.subscribe(trace)
    for event in events:
        probe.emit(event)
    trace.write(path)
    return path


def test_span_has_its_times_in_microseconds_and_its_lane_a_name(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t.json",
        span("send", 2.0, 2.5, peer="engine/0", version=V1, bucket=3, group="layers.0", bytes=7),
    )
    raw = json.loads(path.read_text())
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in raw["traceEvents"]
        if event["ph"] == "M"
    }
    (found,) = [event for event in raw["traceEvents"] if event["ph"] == "X"]
    assert (found["ts"], found["dur"]) == (2_000_000, 500_000)
    assert found["args"] == {
        "version": "1.1", "bucket": 3, "bytes": 7, "peer": "engine/0", "group": "layers.0",
    }  # fmt: skip
    assert names["process_name", found["pid"], 0] == "trainer 0"
    assert names["thread_name", found["pid"], found["tid"]] == "send engine/0"


def test_spans_that_cross_get_lanes_of_their_own(tmp_path: Path) -> None:
    path = written(tmp_path / "t.json", span("load", 0, 2), span("load", 1, 3), span("load", 2, 4))
    trace = read_trace(path)
    lanes = [event.tid for event in trace.trace_events if event.name == "load"]
    assert lanes[0] == lanes[2] != lanes[1]


def test_moments_are_instants(tmp_path: Path) -> None:
    path = written(tmp_path / "t.json", Event(name="armed", started_at=1.5, version=V1))
    (instant,) = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "i"]
    assert (instant["name"], instant["ts"], instant["s"]) == ("armed", 1_500_000, "p")


def test_merge_keeps_every_process(tmp_path: Path) -> None:
    paths = [
        written(tmp_path / f"{name}.json", span(name, 0, 1), process=name)
        for name in ("send", "receive")
    ]
    merge_traces(paths, tmp_path / "all.json")
    names = {event.args.get("name") for event in read_trace(tmp_path / "all.json").trace_events}
    assert {"send", "receive"} <= names


def test_the_newest_events_are_kept() -> None:
    trace = ChromeTrace("p", max_events=2)
    for start in range(5):
        trace(span("pin", start, start + 1))
    starts = [event.ts for event in trace.trace().trace_events if event.name == "pin"]
    assert starts == [3e6, 4e6]


def test_overlap_of_one_version_counts_only_its_stages(tmp_path: Path) -> None:
    trace = read_trace(
        written(
            tmp_path / "t.json",
            span("convert", 0, 2, version=V1),
            span("send", 1, 4, version=V1),
            span("load", 2, 3, version=V2),
            span("step", 0, 9, version=V1),
        )
    )
    assert stage_overlap(trace, V1) == pytest.approx(1 / 4)
    assert stage_overlap(trace, V2) == 0
    assert stage_overlap(trace) == pytest.approx(2 / 4)


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([], 0.0),
        ([("a", 1, 1)], 0.0),
        ([("a", 0, 4), ("a", 1, 2)], 0.0),
        ([("a", 0, 1), ("b", 1, 2)], 0.0),
        ([("a", 0, 1), ("b", 9, 10)], 0.0),
        ([("a", 0, 4), ("b", 0, 4), ("c", 0, 4)], 1.0),
        ([("a", 0, 2), ("a", 1, 3), ("b", 2, 4)], 0.25),
    ],
)
def test_overlap_counts_time_with_two_names_open(spans: list[Any], share: float) -> None:
    assert overlap(spans) == pytest.approx(share)


NAMES = [
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "p"}},
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "t"}},
]
SPAN = {"ph": "X", "name": "pin", "cat": "stage", "ts": 1, "dur": 2, "pid": 1, "tid": 1, "args": {}}


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([SPAN], "no name"),
        ([*NAMES, SPAN | {"tid": 2}], "lane 2 has no name"),
        ([*NAMES, SPAN, SPAN | {"ts": 2}], "crosses"),
        ([*NAMES, SPAN | {"dur": -1}], ">= 0"),
        ([*NAMES, SPAN | {"ph": "B"}], "Invalid value 'B'"),
        ([*NAMES, SPAN | {"extra": 1}], "unknown field"),
    ],
)
def test_a_trace_that_cannot_be_shown_is_refused(
    tmp_path: Path, events: list[dict[str, Any]], text: str
) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    with pytest.raises(ConfigError, match=text):
        read_trace(path)


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read the trace"):
        read_trace(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="can't write the trace"):
        ChromeTrace("p").write(tmp_path / "none" / "t.json")
