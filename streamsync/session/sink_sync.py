"""One sync at a sink: one receive per source, one load."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from streamsync.control.messages import Credit
from streamsync.errors import IntegrityError, TransferTimeout
from streamsync.runtime.channel import open_channel
from streamsync.stages.arrival import Arrival
from streamsync.stages.clock import StageClock
from streamsync.stages.load import Loader
from streamsync.stages.receive import Receiver
from streamsync.types import SyncReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    import torch

    from streamsync.control.messages import End
    from streamsync.layout.landing import Landing
    from streamsync.observability.probe import Probe
    from streamsync.runtime.channel import ReceiveHalf, SendHalf
    from streamsync.runtime.pool import Pool
    from streamsync.session.engine_gates import EngineGates
    from streamsync.session.sink_peer import SinkPeer
    from streamsync.stages.stream import Received
    from streamsync.types import Apply, Arm, Version


_STALLED_SECONDS = 1.0


class SinkSync:
    """The pipeline of one version at one sink rank.

    `ready(starved, verified)` is called when the version may be armed; `go()` allows the first
    write. `run` returns when every group landed and every source said what it sent. On an error or
    cancel, leases not yet loaded are released after `abort_links`.
    """

    def __init__(
        self,
        version: Version,
        peers: Sequence[SinkPeer],
        groups: Sequence[str],
        landings: Sequence[Landing],
        gates: EngineGates,
        scratch: torch.Tensor,
        pool: Pool,
        probe: Probe,
        executor: Executor,
        *,
        apply: Apply,
        arm: Arm,
        load_bytes_per_second: float,
        progress_seconds: float,
        ready: Callable[[bool, bool], None],
    ) -> None:
        self.version = version
        self.peers = list(peers)
        self._pool = pool
        self._num_lanes = scratch.shape[0]
        self._probe = probe
        self._whole = apply == "version"
        self._arm_at_begin = arm == "begin" and not self._whole
        self._progress_seconds = progress_seconds
        self._ready = ready
        self._may_load = asyncio.Event()  # this rank said that it is ready, or GO came without
        self._needed_bytes = sum(peer.share.nbytes for peer in self.peers)
        self._arrival = Arrival(self._needed_bytes, load_bytes_per_second)
        self._clocks = {
            "receive": StageClock("receive", version, probe),
            "load": StageClock("load", version, probe),
        }
        self._loader = Loader(
            [peer.feed for peer in self.peers],
            groups,
            version,
            gates.open,
            scratch,
            self._clocks["load"],
            executor,
            whole=self._whole,
            arrived=self._arrived,
            landed=self._landed,
            landings=landings,
            land=gates.land,
        )
        self._receivers: list[Receiver] = []
        loop = asyncio.get_running_loop()
        self._ends: dict[str, asyncio.Future[End]] = {}
        for peer in self.peers:
            future = self._ends[peer.source] = loop.create_future()
            if peer.early_end is not None and peer.early_end.version == version:
                future.set_result(peer.early_end)
        self._wire_before = [peer.link.wire_bytes for peer in self.peers]
        self._started_at = time.monotonic()
        self._go_at = 0.0
        self._first_landed_at = 0.0

    async def run(self) -> None:
        """Receives, waits for `go`, loads."""
        to_load: SendHalf[Received]
        from_receive: ReceiveHalf[Received]
        to_load, from_receive = open_channel("receive-load", max(self._needed_bytes, 1))
        if self._arm_at_begin or not self._needed_bytes:
            self._tell_ready(starved=False, verified=self._whole)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._loader.run(from_receive))
            tasks.create_task(self._receive_all(to_load))
            tasks.create_task(self._arm_when_stalled())
        for receiver, peer, before in zip(
            self._receivers, self.peers, self._wire_before, strict=True
        ):
            await self._check_end(receiver, peer, peer.link.wire_bytes - before)

    async def _receive_all(self, out: SendHalf[Received]) -> None:
        with out:
            async with asyncio.TaskGroup() as tasks:
                for number, peer in enumerate(self.peers):
                    receiver = Receiver(
                        number,
                        peer.share,
                        peer.link,
                        peer.account,
                        self.version,
                        progress_seconds=self._progress_seconds,
                        grant=lambda n, peer=peer: self._grant(peer, n),  # type: ignore[misc]
                        starved=lambda: self._tell_ready(starved=True, verified=False),
                    )
                    self._receivers.append(receiver)
                    tasks.create_task(receiver.run(out, self._clocks["receive"]))

    def _grant(self, peer: SinkPeer, granted_bytes: int) -> None:
        peer.has_granted = True
        peer.tell(Credit(version=self.version, bytes=granted_bytes))

    def end(self, source: str, message: End) -> None:
        """A source says that it sent everything."""
        future = self._ends.get(source)
        if future is not None and not future.done():
            future.set_result(message)

    async def _check_end(self, receiver: Receiver, peer: SinkPeer, wire_bytes: int) -> None:
        try:
            async with asyncio.timeout(self._progress_seconds):
                end = await self._ends[peer.source]
        except TimeoutError:
            raise TransferTimeout(
                f"the source did not say within {self._progress_seconds:g} s that it sent all",
                peer=peer.source,
                version=self.version,
                stage="receive",
            ) from None
        if (end.wire_bytes, end.digest) != (wire_bytes, receiver.digest):
            raise IntegrityError(
                f"{end.wire_bytes} bytes with digest sum {end.digest:016x} were sent, "
                f"{wire_bytes} bytes with {receiver.digest:016x} came",
                peer=peer.source,
                version=self.version,
                stage="receive",
            )

    def _arrived(self, nbytes: int) -> None:
        now = time.monotonic()
        self._arrival.add(nbytes, now)
        if self._whole:
            if self._arrival.arrived_bytes == self._needed_bytes:
                self._tell_ready(starved=False, verified=True)
        elif self._arrival.may_arm(now):
            self._tell_ready(starved=False, verified=False)

    async def _arm_when_stalled(self) -> None:
        """Leases of an in-place link are the source's, which may have too few left for us to hold
        back a whole version: when nothing comes any more, only loading frees them."""
        while not self._may_load.is_set():
            arrived = self._arrival.arrived_bytes
            try:
                async with asyncio.timeout(_STALLED_SECONDS):
                    await self._may_load.wait()
            except TimeoutError:
                if arrived and arrived == self._arrival.arrived_bytes and not self._whole:
                    self._tell_ready(starved=True, verified=False)

    def _tell_ready(self, *, starved: bool, verified: bool) -> None:
        if not self._may_load.is_set():
            self._may_load.set()
            self._ready(starved, verified)

    def go(self) -> None:
        """The coordinator allowed the first write."""
        self._go_at = time.monotonic()
        self._may_load.set()
        self._loader.go.set()

    def _landed(self, group: str) -> None:
        if not self._first_landed_at:
            self._first_landed_at = time.monotonic()
        self._probe.moment("landed", version=self.version, group=group)

    async def abort_links(self) -> None:
        """After a failed `run`: closes the links on which something may be under way, then takes
        their leases back."""
        for peer in self.peers:
            if peer.has_granted:
                await peer.link.abort()
        for receiver in self._receivers:
            receiver.release_left()

    def load_bytes_per_second(self) -> float:
        """What loading reached in this sync, for the next one's prediction; 0 if unknown."""
        report = self._clocks["load"].report()
        lane_seconds = report.busy_seconds / self._num_lanes
        return report.bytes / lane_seconds if lane_seconds else 0.0

    def report(self, committed_at: float) -> SyncReport:
        """The account of this sync."""
        return SyncReport(
            version=self.version,
            needed_bytes=self._needed_bytes,
            wire_bytes=sum(
                peer.link.wire_bytes - before
                for peer, before in zip(self.peers, self._wire_before, strict=True)
            ),
            started_at=self._started_at,
            seconds=committed_at - self._started_at,
            first_layer_seconds=max(0.0, self._first_landed_at - self._started_at),
            install_seconds=max(0.0, committed_at - self._go_at),
            peak_pool_bytes=self._pool.peak_bytes,
            transport=", ".join(sorted({peer.transport for peer in self.peers})),
            stages={name: clock.report() for name, clock in self._clocks.items()},
        )
