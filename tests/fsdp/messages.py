"""What the test tells the trainer, and what the trainer's ranks tell the test."""

from __future__ import annotations

import msgspec

from tests.fsdp.scenarios import Scenario


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """`hubs[k]` is where `num_replicas[k]` replicas wait for `scenarios[k]`."""

    scenarios: list[Scenario]
    hubs: list[str]
    num_replicas: list[int]
    secret: str
    steps: int = 3
    seconds: float = 120.0
    """Deadline of each wait."""


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's bytes of one version: what its sinks need of it, what its transports carried."""

    needed_bytes: int
    wire_bytes: int
