"""What the test tells the trainer, and what the trainer's ranks tell the test."""

from __future__ import annotations

import msgspec

from tests.megatron.scenarios import Scenario


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """`hubs[k]` is where the sinks of `scenarios[k]` wait: a replica of each of `num_sizes`, and
    one more where there is a draft."""

    scenarios: list[Scenario]
    hubs: list[str]
    secret: str
    num_sizes: int
    steps: int = 3
    seconds: float = 120.0
    """Deadline of each wait."""
    transport: str = "auto"
    bucket_bytes: int = 4096


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's bytes of one version: what its sinks need of it, what its transports carried."""

    needed_bytes: int
    wire_bytes: int
