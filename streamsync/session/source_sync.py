"""One sync at a source: convert and pin once per stream, send once per peer."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from streamsync.control.messages import End
from streamsync.runtime.channel import open_channel
from streamsync.stages.clock import StageClock
from streamsync.stages.convert import convert
from streamsync.stages.pin import pin
from streamsync.stages.send import send
from streamsync.types import SyncReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from streamsync.observability.probe import Probe
    from streamsync.runtime.channel import ReceiveHalf, SendHalf
    from streamsync.runtime.pool import Pool
    from streamsync.session.source_peer import SourcePeer
    from streamsync.stages.stream import Filled, Stream
    from streamsync.types import Version

_log = logging.getLogger("streamsync.source")


class SourceSync:
    """The pipeline of one version at one source.

    `snapshot_taken()` is called when the last byte left the parameters, `failed(peer, text)` when a
    peer can't be given its buckets; other peers go on. `run` raises only for the stages that all
    peers share. Cancelling leaks no lease.
    """

    def __init__(
        self,
        version: Version,
        peers: Sequence[SourcePeer],
        pool: Pool,
        probe: Probe,
        executor: Executor,
        published_at: float,
        progress_seconds: float,
        snapshot_taken: Callable[[], None],
        failed: Callable[[SourcePeer, str], None],
    ) -> None:
        self.version = version
        self._peers = list(peers)
        self._pool = pool
        self._executor = executor
        self._published_at = published_at
        self._progress_seconds = progress_seconds
        self._snapshot_taken = snapshot_taken
        self._failed = failed
        self._clocks = {
            "convert": StageClock("convert", version, probe),
            "pin": StageClock("pin", version, probe),
            "send": StageClock("send", version, probe),
        }
        self._sends: dict[str, asyncio.Task[None]] = {}
        self._given_up: set[str] = set()
        self._started_at = time.monotonic()
        self._snapshot_at = 0.0
        self._wire_before = {peer.sink: peer.link.wire_bytes for peer in self._peers}

    async def run(self) -> None:
        """Runs until every peer's buckets are sent or given up."""
        streams: dict[int, tuple[Stream, list[SourcePeer]]] = {}
        for peer in self._peers:
            streams.setdefault(id(peer.stream), (peer.stream, []))[1].append(peer)
        async with asyncio.TaskGroup() as tasks:
            converts = []
            for stream, peers in streams.values():
                capacity = max(stream.share.nbytes, 1)
                to_pin, from_convert = _open(f"convert-pin {peers[0].sink}", capacity)
                outs = []
                for peer in peers:
                    to_send, from_pin = _open(f"pin-send {peer.sink}", capacity)
                    outs.append(to_send)
                    self._sends[peer.sink] = tasks.create_task(self._send(stream, from_pin, peer))
                converts.append(
                    tasks.create_task(
                        convert(stream, to_pin, self._clocks["convert"], self._executor)
                    )
                )
                tasks.create_task(
                    pin(
                        stream,
                        self.version,
                        from_convert,
                        outs,
                        self._clocks["pin"],
                        self._executor,
                    )
                )
            if converts:
                await asyncio.wait(converts)
            if all(not task.cancelled() and task.exception() is None for task in converts):
                self._snapshot_at = time.monotonic()
                self._snapshot_taken()

    async def _send(self, stream: Stream, source: ReceiveHalf[Filled], peer: SourcePeer) -> None:
        try:
            sent = await send(
                stream,
                source,
                peer.link,
                peer.sink,
                peer.credits,
                self._clocks["send"],
                progress_seconds=self._progress_seconds,
            )
        except asyncio.CancelledError:
            if peer.sink not in self._given_up:
                raise
        except Exception as error:
            _log.warning("sending version %s to %s failed: %s", self.version, peer.sink, error)
            self._failed(peer, f"{type(error).__name__}: {error}")
        else:
            peer.tell(End(version=self.version, wire_bytes=sent.wire_bytes, digest=sent.digest))

    def drop(self, peer: SourcePeer) -> None:
        """Sends `peer` nothing more; its leases go back."""
        self._given_up.add(peer.sink)
        task = self._sends.get(peer.sink)
        if task is not None:
            task.cancel()

    def report(self) -> SyncReport:
        """The account of this sync so far."""
        now = time.monotonic()
        return SyncReport(
            version=self.version,
            needed_bytes=sum(peer.stream.share.nbytes for peer in self._peers),
            wire_bytes=sum(
                peer.link.wire_bytes - self._wire_before[peer.sink] for peer in self._peers
            ),
            started_at=self._started_at,
            seconds=now - self._started_at,
            publish_blocked_seconds=max(0.0, self._snapshot_at - self._published_at),
            peak_pool_bytes=self._pool.peak_bytes,
            transport=", ".join(sorted({peer.transport for peer in self._peers})),
            stages={name: clock.report() for name, clock in self._clocks.items()},
        )


def _open(edge: str, capacity_bytes: int) -> tuple[SendHalf[Filled], ReceiveHalf[Filled]]:
    """A channel whose bound never bites: leases bound what is in flight."""
    return open_channel(edge, capacity_bytes)
