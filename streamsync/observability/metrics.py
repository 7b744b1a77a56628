"""Listens to events and keeps the catalogue's metrics for Prometheus."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from streamsync._version import __version__
from streamsync.observability.catalogue import CATALOGUE
from streamsync.types import STAGE_NAMES, Version

if TYPE_CHECKING:
    from streamsync.observability.probe import Event

OUTCOMES = {"committed": "ok", "failed": "failed", "aborted": "aborted"}
MAX_VERSIONS = 64
"""Versions remembered at once: those that end without a word are forgotten, oldest first."""


class _Sync:
    """What must be remembered of a version until it ends and a while beyond."""

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self.landed = False
        self.ended_peers: set[str] = set()


class Metrics:
    """The metrics of one rank: `probe.subscribe(metrics)`, then expose `metrics.registry`.

    Has a registry of its own unless given one, so that several ranks can live in one process. May
    be called from any thread. What it raises stays in the probe.
    """

    def __init__(
        self, role: Literal["source", "sink"], *, registry: CollectorRegistry | None = None
    ) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in CATALOGUE:
            name = metric.name.removeprefix("streamsync_")
            arguments = (metric.name, metric.help, metric.labels)
            if metric.kind == "counter":
                self._counters[name] = Counter(*arguments, registry=self.registry)
            elif metric.kind == "gauge":
                self._gauges[name] = Gauge(*arguments, registry=self.registry)
            else:
                self._histograms[name] = Histogram(
                    *arguments, registry=self.registry, buckets=metric.bounds
                )
        self._gauges["build_info"].labels(__version__, role).set(1)
        for stage in STAGE_NAMES:  # series that exist from the start make rates right
            for counter in ("busy_seconds_total", "bytes_total", "buckets_total"):
                self._counters[f"stage_{counter}"].labels(stage)
        for outcome in OUTCOMES.values():
            self._counters["syncs_finished_total"].labels(outcome)
        self._syncs: dict[Version, _Sync] = {}
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Records one event."""
        if event.name in STAGE_NAMES:
            self._record_stage(event)
        elif event.name == "step":
            self._counters["engine_steps_total"].inc()
        elif event.name == "token":
            self._counters["engine_tokens_total"].inc()
        elif event.name == "quarantined":
            self._gauges["quarantined"].set(1)
            self._counters["quarantines_total"].inc()
        elif event.name == "healed":
            self._gauges["quarantined"].set(0)
        elif event.version is not None:
            with self._lock:
                self._record_version(event, event.version)

    def _record_stage(self, event: Event) -> None:
        self._histograms["stage_duration_seconds"].labels(event.name).observe(event.seconds)
        self._counters["stage_busy_seconds_total"].labels(event.name).inc(event.seconds)
        self._counters["stage_bytes_total"].labels(event.name).inc(event.bytes)
        self._counters["stage_buckets_total"].labels(event.name).inc()

    def _record_version(self, event: Event, version: Version) -> None:
        if event.name == "publish":
            self._histograms["publish_duration_seconds"].observe(event.seconds)
            self._set_version("published_version", version)
            return
        sync = self._syncs.get(version)
        if event.name == "announced":
            if sync is None:
                self._counters["syncs_started_total"].inc()
                self._syncs[version] = _Sync(event.started_at)
                while len(self._syncs) > MAX_VERSIONS:
                    del self._syncs[next(iter(self._syncs))]
            return
        since = None if sync is None else event.started_at - sync.started_at
        if event.name == "landed" and sync is not None and since is not None:
            self._histograms["layer_landed_seconds"].observe(since)
            if not sync.landed:
                sync.landed = True
                self._histograms["first_layer_seconds"].observe(since)
        elif event.name in OUTCOMES:
            if sync is not None:
                if event.peer in sync.ended_peers:
                    return
                sync.ended_peers.add(event.peer)
            self._counters["syncs_finished_total"].labels(OUTCOMES[event.name]).inc()
            if event.name == "committed":
                self._set_version("live_version", version)
                self._gauges["last_sync_timestamp_seconds"].set(time.time())
                if since is not None:
                    self._histograms["sync_duration_seconds"].observe(since)

    def _set_version(self, gauge: str, version: Version) -> None:
        self._gauges[gauge].labels("epoch").set(version.epoch)
        self._gauges[gauge].labels("step").set(version.step)
