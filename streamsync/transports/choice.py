"""Which transport joins two ranks, and why. Pure, but for `open_transport`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamsync.errors import ConfigError

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from streamsync.config import Config, TransportName
    from streamsync.transports.base import Transport


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport's `name` (never `auto`) and the `reason` as a sentence for a log line."""

    name: TransportName
    reason: str


def choose(
    name: TransportName, *, same_process: bool, same_host: bool, has_ucx: bool, has_rdma: bool
) -> Choice:
    """The transport between two ranks; raises `ConfigError` for one that can't join them.

    `same_host` means one kernel, pid and network namespace (`Place.host_id`); `has_ucx` and
    `has_rdma` hold for both ranks. `auto` takes ucx only for RDMA: over plain TCP the `tcp`
    transport is as fast with fewer moving parts.
    """
    if name == "memory" and not same_process:
        raise ConfigError(
            "transport='memory' joins ranks of one process only, and these are two; use auto"
        )
    if name == "shm" and not same_host:
        raise ConfigError(
            "transport='shm' joins processes of one host (and container) only; use auto, tcp or ucx"
        )
    if name == "ucx" and not has_ucx:
        raise ConfigError(
            "transport='ucx' needs ucxx at both ends: pip install 'streamsync[ucx]' where it lacks"
        )
    if name != "auto":
        return Choice(name, "The settings ask for it.")
    if same_process:
        return Choice("memory", "Source and sink are one process.")
    if same_host:
        return Choice("shm", "Source and sink are processes of one host.")
    if has_rdma and has_ucx:
        return Choice("ucx", "Source and sink are on two hosts, and both have UCX with RDMA.")
    lacking = "a UCX with RDMA at both ends" if has_ucx else "ucxx at both ends"
    return Choice("tcp", f"Source and sink are on two hosts, without {lacking}.")


def open_transport(name: TransportName, config: Config, executor: Executor | None) -> Transport:
    """A transport that is not started yet; imports no other transport's module.

    `executor` runs copies of frames that a sink doesn't use in place.
    """
    match name:
        case "memory":
            from streamsync.transports.memory import MemoryTransport

            return MemoryTransport(executor)
        case "shm":
            from streamsync.transports.shm import ShmTransport

            return ShmTransport(executor)
        case "tcp":
            from streamsync.transports.tcp import TcpTransport

            return TcpTransport(config.host, config.port)
        case "ucx":
            from streamsync.transports.ucx import UcxTransport

            return UcxTransport()
    raise ConfigError(f"no transport is called {name!r}; choose memory, shm, tcp or ucx")
