from __future__ import annotations

from typing import Any

import msgspec
import pytest

from streamsync.demo.ledger import ENGINE, Ledger, Sender
from streamsync.demo.messages import Answered, Copied, Done, Happened, Installed, Published, Ready
from streamsync.demo.options import DemoOptions
from streamsync.demo.results import DemoResults, demo_results
from streamsync.demo.screen import summary, table
from streamsync.observability.probe import Event
from streamsync.types import STAGE_NAMES, StageReport, SyncReport, Version

RANKS = (Sender("trainer", 0), Sender("trainer", 1))
VERSIONS = (Version(9, 0), Version(9, 4))


def report(version: Version, *stages: str, **fields: Any) -> SyncReport:
    fields = {"needed_bytes": 50, "wire_bytes": 50, "seconds": 2.0, "started_at": 10.0} | fields
    busy = {name: StageReport(busy_seconds=1.0, blocked_seconds=0.5, bytes=50) for name in stages}
    return SyncReport(version=version, transport="tcp", stages=busy, **fields)


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger(num_source_ranks=2)
    for sender in (*RANKS, ENGINE):
        ledger.take(sender, Ready(num_parameters=100))
    for index, version in enumerate(VERSIONS):
        at = 10.0 + 10 * index
        for sender in RANKS:
            source = report(
                version, *STAGE_NAMES[:3], started_at=at + sender.rank, publish_blocked_seconds=0.5
            )
            ledger.take(sender, Copied(index=index, path=f"{sender.rank}"))
            ledger.take(sender, Published(index=index, report=source))
        sink = report(
            version,
            *STAGE_NAMES[3:],
            started_at=at + 1,
            seconds=3.0,
            needed_bytes=100,
            wire_bytes=100,
            first_layer_seconds=0.25,
        )
        ledger.take(ENGINE, Installed(index=index, report=sink, path="p"))
        ledger.take(ENGINE, Answered(version=version, answers=(f"a{index}", "b", "c")))
        ledger.mismatched[index] = []
        for second in (0, 1, 4):
            event = Event(name="token", started_at=at + second, version=version)
            ledger.take(ENGINE, Happened(event=event))
    ledger.take(ENGINE, Done())
    return ledger


def results(ledger: Ledger, **options: Any) -> DemoResults:
    return demo_results(DemoOptions(syncs=2, **options), ledger)


def test_every_field_of_the_json_is_there(ledger: Ledger) -> None:
    found = msgspec.json.decode(msgspec.json.encode(results(ledger)))
    assert found["ok"] is True
    assert found["failures"] == []
    assert {
        name: found[name]
        for name in (
            "model", "num_parameters", "source_ranks", "sink_ranks", "transport", "needed_bytes",
            "wire_bytes", "tokens_generated", "answers",
        )
    } == {
        "model": "smollm2", "num_parameters": 100, "source_ranks": 2, "sink_ranks": 1,
        "transport": "tcp", "needed_bytes": 100, "wire_bytes": 100, "tokens_generated": 6,
        "answers": [["a0", "b", "c"], ["a1", "b", "c"]],
    }  # fmt: skip
    sync = found["syncs"][0]
    assert sync["version"] == "9.0"
    assert (sync["bytes"], sync["seconds"], sync["gb_per_s"]) == (100, 4.0, 100 / 4.0 / 1e9)
    assert sync["first_layer_seconds"] == 0.25
    assert sync["publish_blocked_seconds"] == 0.5
    assert sync["stall_seconds"] == 0.0  # gaps 1, 3, 6, 1, 3: the median is 3
    assert sync["mismatched_tensors"] == 0
    assert sync["overlap"] == 0.0
    assert sync["stages"]["send"] == {"busy_seconds": 2.0, "blocked_seconds": 1.0, "bytes": 100}
    assert sync["stages"]["load"] == {"busy_seconds": 1.0, "blocked_seconds": 0.5, "bytes": 50}
    assert list(sync["stages"]) == list(STAGE_NAMES)


def test_a_tensor_that_differs_fails_the_run(ledger: Ledger) -> None:
    ledger.mismatched[1] = ["w", "x"]
    found = results(ledger)
    assert not found.ok
    assert found.failures == ["version 9.4: 2 tensors differ (w, x)"]
    assert [sync.mismatched_tensors for sync in found.syncs] == [0, 2]
    assert any("FAILED" in line for line in summary(found, "t"))


def test_bytes_beyond_the_needed_ones_fail_the_run(ledger: Ledger) -> None:
    ledger.published[1][0] = report(VERSIONS[1], wire_bytes=51)
    found = results(ledger)
    assert found.failures == ["version 9.4: sent 101 bytes, needed 100"]
    assert (found.wire_bytes, found.needed_bytes) == (101, 100)


def test_bytes_that_never_arrived_fail_the_run(ledger: Ledger) -> None:
    sink = ledger.installed[0].report
    short = msgspec.structs.replace(sink, wire_bytes=99)
    ledger.installed[0] = Installed(index=0, report=short, path="p")
    assert results(ledger).failures == ["version 9.0: received 99 bytes, needed 100"]


def test_answers_must_change_but_for_the_random_model(ledger: Ledger) -> None:
    ledger.answers[VERSIONS[1]] = ledger.answers[VERSIONS[0]]
    assert results(ledger).failures == ["the last version's answers are the first one's"]
    assert results(ledger, model="tiny").ok


def test_conditions_of_the_next_step(ledger: Ledger) -> None:
    assert ledger.is_installed(1)
    assert ledger.is_answered(1)
    assert ledger.is_published(1)
    del ledger.copies[1][1], ledger.answers[VERSIONS[1]], ledger.published[1][0]
    assert not ledger.is_installed(1)
    assert not ledger.is_answered(1)
    assert not ledger.is_published(1)
    assert not ledger.is_answered(7)


def test_the_summary_says_all(ledger: Ledger) -> None:
    text = "\n".join(summary(results(ledger), "/tmp/the-trace.json"))
    words = ("step 0", "step 4", "a1", "/tmp/the-trace.json", "bit-equal", "6 tokens", "convert")
    for word in words:
        assert word in text


def test_columns_are_aligned() -> None:
    assert table([("a", ["1", "100"]), ("long", ["x", "y"])]) == [
        "  a  long",
        "  1     x",
        "100     y",
    ]
