"""Settings, each with its unit and the reason for its default."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

from streamsync.errors import ConfigError

TransportName = Literal["auto", "memory", "shm", "tcp", "ucx"]

MIB = 1 << 20


@dataclass(kw_only=True, slots=True, frozen=True)
class Deadlines:
    """How long each kind of wait may last, in seconds. Every wait in streamsync has one."""

    connect: float = 10.0
    """Reaching the hub or a peer, and each request to it: generous for a loaded host."""
    progress: float = 30.0
    """Without a single byte or message from a peer that owes one. A trainer can hold the GIL for
    long, so a peer is not declared lost before this much silence."""
    total: float = 300.0
    """A whole sync, from the first announcement to COMMIT."""
    gate: float = 60.0
    """A forward that waits in a gate. Keep it below the engine's own step timeout."""
    lag: float = 20.0
    """After the other replicas took a version, how long the sources hold its bytes for a late one.
    Shorter than `gate`, so that a replica that waits in its gates is never the late one."""

    def __post_init__(self) -> None:
        for name in ("connect", "progress", "total", "gate", "lag"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"deadlines.{name} must be above 0 seconds, got {getattr(self, name)}"
                )
        if self.lag >= self.gate:
            raise ConfigError(
                f"deadlines.lag ({self.lag} s) must be shorter than deadlines.gate ({self.gate} s)"
            )


@dataclass(kw_only=True, slots=True, frozen=True)
class Config:
    """Settings of one rank. Sources and sinks of one job may differ in any of them."""

    transport: TransportName = "auto"
    """`auto` takes shm between processes of one host and ucx (when installed) or tcp elsewhere."""
    host: str = "127.0.0.1"
    """Address or name that this rank listens on and tells its peers. Loopback until told
    otherwise: the data plane is not encrypted."""
    port: int = 0
    """TCP port on which this rank's tcp transport listens (sources only); 0 takes any free one.
    Name one where a firewall wants to know."""
    bucket_bytes: int = 4 * MIB
    """Largest bucket the plan cuts. 4 MiB keeps every transport within a few percent of its best
    and lets small layers land early."""
    pool_bytes: int = 512 * MIB
    """Host memory for leases. As large as the rank's share, `publish()` never waits for the wire;
    smaller, backpressure reaches it."""
    digest: bool = True
    """Proves each landed bucket. Off only to measure what it costs (`streamsync bench`)."""
    copy_threads: int = field(default_factory=lambda: min(4, os.cpu_count() or 1))
    """Threads of the one executor that runs blocking copies and digests."""
    publish_queue: Literal["supersede", "queue"] = "supersede"
    """What a `publish()` does to a version that still waits for its turn."""
    deadlines: Deadlines = field(default_factory=Deadlines)

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes must be at least 1, got {self.bucket_bytes}")
        if self.pool_bytes < 1:
            raise ConfigError(f"pool_bytes must be at least 1, got {self.pool_bytes}")
        if self.copy_threads < 1:
            raise ConfigError(f"copy_threads must be at least 1, got {self.copy_threads}")
