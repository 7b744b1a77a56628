from __future__ import annotations

import pytest

from streamsync.demo.timeline import joined_trace, stage_overlap, stall, token_times
from streamsync.observability.probe import Event
from streamsync.observability.trace import check_trace
from streamsync.types import Version

ONE, TWO = Version(1, 1), Version(1, 2)


def stage(name: str, began: float, ended: float, version: Version = ONE) -> Event:
    return Event(name=name, started_at=began, seconds=ended - began, version=version)  # type: ignore[arg-type]


def test_the_stall_is_the_longest_gap_in_the_sync_beyond_the_median() -> None:
    times = [0.0, 1.0, 2.0, 6.0, 7.0, 17.0, 18.0]
    assert stall(times, began=2.5, ended=3.0) == 3.0  # the gap 2..6 reaches into the sync
    assert stall(times, began=0.1, ended=1.5) == 0.0
    assert stall(times, began=0.0, ended=20.0) == 9.0


def test_no_tokens_are_no_stall() -> None:
    assert stall([], 0.0, 1.0) == 0.0
    assert stall([0.5], 0.0, 1.0) == 0.0


def test_overlap_needs_two_stages_of_the_same_version() -> None:
    events = [stage("convert", 0, 4), stage("send", 2, 8), stage("send", 3, 5)]
    assert stage_overlap(events, ONE) == pytest.approx(0.25)
    assert stage_overlap([stage("convert", 0, 4), stage("send", 2, 8, TWO)], ONE) == 0.0
    training = Event(name="train", started_at=0, seconds=8, version=ONE)
    assert stage_overlap([stage("convert", 0, 4), training], ONE) == 0.0
    assert stage_overlap([], ONE) == 0.0


def test_tokens_leave_at_their_end() -> None:
    events = [Event(name="token", started_at=2, seconds=1), Event(name="token", started_at=0)]
    assert token_times([*events, stage("load", 0, 1)]) == [0.0, 3.0]


def test_one_trace_holds_all_processes() -> None:
    trace = joined_trace([("trainer rank 0", 7, [stage("send", 1, 2)]), ("engine", 8, [])])
    check_trace(trace)
    assert {record.pid for record in trace.trace_events} == {7, 8}
