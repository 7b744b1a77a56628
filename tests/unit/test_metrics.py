from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from streamsync.observability.catalogue import CATALOGUE, as_markdown
from streamsync.observability.metrics import MAX_VERSIONS, Metrics
from streamsync.observability.probe import Event, Probe
from streamsync.types import Version

ROOT = Path(__file__).parents[2]
V1, V2 = Version(7, 1), Version(7, 2)


def event(name: str, at: float = 0.0, **fields: Any) -> Event:
    return Event(name=name, started_at=at, **fields)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"streamsync_{name}", labels)


@pytest.fixture
def sink() -> Metrics:
    return Metrics("sink")


def test_every_exposed_metric_is_in_the_catalogue_and_the_other_way_round(sink: Metrics) -> None:
    scraped = generate_latest(sink.registry).decode()
    exposed = {
        re.sub(r"_created$", "", family.name) + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(scraped)
        if not family.name.endswith("_created")
    }
    assert exposed == {metric.name for metric in CATALOGUE}


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_names_follow_the_rules(metric: Any) -> None:
    assert re.fullmatch(r"streamsync_[a-z_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.name.removesuffix("_total").endswith(metric.unit)
    assert bool(metric.bounds) == (metric.kind == "histogram")
    assert list(metric.bounds) == sorted(set(metric.bounds))
    assert not {"peer", "rank", "tensor", "bucket", "id"} & set(metric.labels)
    assert metric.help.endswith(".")


def test_docs_are_up_to_date() -> None:
    assert (ROOT / "monitoring/metrics.md").read_text() == as_markdown()


def test_stage_spans_add_up(sink: Metrics) -> None:
    for seconds in (0.25, 0.5):
        sink(event("receive", seconds=seconds, bytes=100, peer="trainer/0", version=V1))
    assert value(sink, "stage_busy_seconds_total", stage="receive") == 0.75
    assert value(sink, "stage_bytes_total", stage="receive") == 200
    assert value(sink, "stage_buckets_total", stage="receive") == 2
    assert value(sink, "stage_buckets_total", stage="load") == 0
    assert value(sink, "stage_duration_seconds_bucket", stage="receive", le="0.25") == 1


def test_a_sync_from_announcement_to_commit(sink: Metrics) -> None:
    for at, name, fields in (
        (10.0, "announced", {"peer": "trainer/0"}),
        (10.1, "announced", {"peer": "trainer/1"}),
        (10.5, "landed", {"group": "layers.0"}),
        (11.5, "landed", {"group": "layers.1"}),
        (12.0, "committed", {}),
    ):
        sink(event(name, at, version=V2, **fields))
    assert value(sink, "syncs_started_total") == 1
    assert value(sink, "syncs_finished_total", outcome="ok") == 1
    assert value(sink, "sync_duration_seconds_sum") == 2.0
    assert value(sink, "layer_landed_seconds_count") == 2
    assert value(sink, "first_layer_seconds_sum") == 0.5
    assert value(sink, "live_version", part="epoch") == 7
    assert value(sink, "live_version", part="step") == 2
    assert (value(sink, "last_sync_timestamp_seconds") or 0) > 1e9


def test_an_end_counts_once_per_peer(sink: Metrics) -> None:
    sink(event("announced", version=V1))
    for name, peer in (("failed", "a"), ("aborted", "a"), ("committed", "b"), ("failed", "b")):
        sink(event(name, version=V1, peer=peer))
    assert value(sink, "syncs_finished_total", outcome="failed") == 1
    assert value(sink, "syncs_finished_total", outcome="aborted") == 0
    assert value(sink, "syncs_finished_total", outcome="ok") == 1


def test_publish_quarantine_and_engine(sink: Metrics) -> None:
    sink(event("publish", seconds=0.5, version=V1))
    sink(event("quarantined", version=V1))
    assert value(sink, "quarantined") == 1
    sink(event("healed"))
    sink(event("step", seconds=0.1))
    sink(event("token"))
    assert value(sink, "publish_duration_seconds_sum") == 0.5
    assert value(sink, "published_version", part="step") == 1
    assert value(sink, "quarantined") == 0
    assert value(sink, "quarantines_total") == 1
    assert value(sink, "engine_steps_total") == value(sink, "engine_tokens_total") == 1


def test_memory_stays_bounded_over_many_versions(sink: Metrics) -> None:
    for step in range(3 * MAX_VERSIONS):
        sink(event("announced", version=Version(1, step)))
    assert len(sink._syncs) == MAX_VERSIONS


def test_two_ranks_in_one_process_do_not_meet() -> None:
    first, second = Metrics("source"), Metrics("sink")
    first(event("token"))
    assert value(second, "engine_tokens_total") == 0


def test_a_failing_recorder_never_reaches_the_data_path(
    sink: Metrics, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sink, "_record_stage", lambda _: 1 / 0)
    probe = Probe()
    probe.subscribe(sink)
    probe.emit(event("send"))
    probe.moment("token")
    assert "a listener failed on event send" in caplog.text
    assert value(sink, "engine_tokens_total") == 1
