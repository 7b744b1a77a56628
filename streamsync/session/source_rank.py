"""A source rank's life: it joins the hub, admits sinks, and runs one sync after the other."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any

from streamsync.control import messages as m
from streamsync.control.curve import Curve
from streamsync.control.member import HubMember
from streamsync.control.protocol import source as p
from streamsync.control.protocol.timer import CancelTimer, SetTimer
from streamsync.control.sockets import Listener
from streamsync.errors import (
    ControlError,
    StreamsyncError,
    TransportError,
    VersionError,
    root_error,
)
from streamsync.layout.outline import outline, outline_digest
from streamsync.observability.probe import Event, Probe
from streamsync.plan.check import check_source
from streamsync.runtime.pool import Pool
from streamsync.session.audience import Audience
from streamsync.session.links import OpenTransports
from streamsync.session.source_sync import SourceSync
from streamsync.session.streams import Streams
from streamsync.session.timers import Timers
from streamsync.types import Outcome, SyncReport, Version

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from streamsync.config import Config
    from streamsync.layout.binding import Binding
    from streamsync.session.source_peer import SourcePeer

_log = logging.getLogger("streamsync.source")

_KEPT_VERSIONS = 64
"""Outcomes and reports are kept for this many versions."""
_LAST_WORD_SECONDS = 1.0


class SourceRank:
    """Everything a source does on its loop's thread. `Publisher` is its face."""

    def __init__(
        self,
        binding: Binding,
        *,
        hub: str,
        secret: str,
        name: str,
        group: str,
        rank: int,
        num_ranks: int,
        place: m.Place,
        config: Config,
        probe: Probe,
        executor: Executor,
    ) -> None:
        self._binding = binding
        check_source(name, binding.layout)
        self._outline = outline(binding.layout)
        self._outline_digest = outline_digest(self._outline)
        self._hub = hub
        self._secret = secret
        self._name = name
        self._group = group
        self._rank = rank
        self._num_ranks = num_ranks
        self._place = place
        self._config = config
        self._probe = probe
        self._executor = executor
        self._machine = p.SourceMachine(policy=config.publish_queue)
        self._sync: SourceSync | None = None
        self._announced: Version | None = None
        self._sync_task: asyncio.Task[None] | None = None
        self._snapshots: dict[Version, asyncio.Future[None]] = {}
        self._outcomes: OrderedDict[Version, asyncio.Future[tuple[Outcome, ...]]] = OrderedDict()
        self._published_at: dict[Version, float] = {}
        self._reports: OrderedDict[Version, SyncReport] = OrderedDict()
        self._stop = asyncio.Event()
        self._pool: Pool
        self._streams: Streams
        self._audience: Audience
        self._timers: Timers
        self._listener: Listener
        self._member: HubMember
        self._tasks: asyncio.TaskGroup

    async def main(self, ready: Callable[[], None]) -> None:
        """Lives until `stop`; raises what makes the rank unusable."""
        curve = Curve(self._secret, self._config.deadlines.progress)
        try:
            curve.start()
            self._pool = Pool(self._config.pool_bytes, self._name)
            transports = OpenTransports(self._config, self._executor)
            self._timers = Timers(self._config.deadlines, self._feed)
            self._listener = Listener(
                curve,
                self._config.host,
                0,
                self._on_message,
                lambda control_id, text: self._audience.control_lost(control_id, text),
            )
            self._streams = Streams(
                self._binding,
                self._pool,
                self._executor,
                lambda: self._machine.running is not None,
                digest=self._config.digest,
            )
            self._audience = Audience(
                self._name,
                self._place,
                self._config,
                self._pool,
                self._streams,
                transports,
                self._listener.send,
                lambda coroutine: self._tasks.create_task(coroutine),
                joined=self._peer_joined,
                lost=self._peer_lost,
            )
            self._member = HubMember(
                curve,
                self._hub,
                self._join,
                self._config.deadlines.connect,
                content=self._outline,
                refused=self._audience.refused,
            )
            try:
                async with asyncio.TaskGroup() as self._tasks:
                    running = [
                        self._tasks.create_task(self._listener.run()),
                        self._tasks.create_task(self._member.run()),
                    ]
                    try:
                        await self._member.wait_joined()
                        ready()
                        await self._stop.wait()
                        self._member.leave()
                        for peer in self._audience.peers.values():
                            peer.tell(m.Goodbye(text=f"{self._name} closes"))
                        await asyncio.sleep(0)
                    finally:
                        for task in running:
                            task.cancel()
                        await self._end_sync()
                        await self._audience.close()
            finally:
                self._timers.close()
                self._listener.close()
                await transports.close()
                self._pool.close()
        finally:
            curve.close()

    def stop(self) -> None:
        """Ends `main`."""
        self._stop.set()

    async def _end_sync(self) -> None:
        """Cancels what is still being sent; waiters learn that the source closed."""
        if self._sync_task is not None:
            self._sync_task.cancel()
            await asyncio.wait({self._sync_task})
        closed = ControlError(f"{self._name} closed before the version was over")
        waiting: list[asyncio.Future[Any]] = [*self._snapshots.values(), *self._outcomes.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(closed)
                future.exception()

    def _join(self, epoch: int) -> m.Join:
        return m.Join(
            protocol=m.PROTOCOL,
            name=self._name,
            role="source",
            unit=self._group,
            rank=self._rank,
            num_ranks=self._num_ranks,
            endpoint=self._listener.endpoint,
            incarnation=self._place.process_id,
            place=self._place,
            epoch=epoch,
            outline_digest=self._outline_digest,
        )

    # --- the trainer's side -----------------------------------------------------------------

    async def publish(self, step: int | None) -> Version:
        """See `Publisher.publish`."""
        started_at = time.monotonic()
        version = await self._next_version(step)
        loop = asyncio.get_running_loop()
        snapshot: asyncio.Future[None] = loop.create_future()
        self._snapshots[version] = snapshot
        self._published_at[version] = started_at
        self._outcomes[version] = loop.create_future()
        while len(self._outcomes) > _KEPT_VERSIONS:
            old, future = self._outcomes.popitem(last=False)
            self._reports.pop(old, None)
            future.cancel()
        self._feed(p.Publish(version))
        try:
            await asyncio.shield(snapshot)
        except asyncio.CancelledError:
            if not snapshot.done():
                await self._cancel_publish(version)
            raise
        finally:
            self._snapshots.pop(version, None)
            self._published_at.pop(version, None)
        self._probe.emit(
            Event(
                name="publish",
                started_at=started_at,
                seconds=time.monotonic() - started_at,
                version=version,
            )
        )
        return version

    async def _next_version(self, step: int | None) -> Version:
        try:
            async with asyncio.timeout(self._config.deadlines.connect):
                await self._member.epoch_known.wait()
        except TimeoutError:
            raise ControlError(
                f"the hub named no epoch within {self._config.deadlines.connect:g} s: are all "
                f"{self._num_ranks} ranks of {self._group} up?",
                rank=self._name,
            ) from None
        newest = self._machine.newest
        epoch = self._member.epoch
        if step is None:
            step = newest.step + 1 if newest is not None and newest.epoch == epoch else 0
        if not 0 <= step < 1 << 63:
            raise VersionError(f"step {step} is not a number from 0 below 2**63", rank=self._name)
        version = Version(epoch, step)
        if version in self._outcomes:
            raise VersionError(f"version {version} was published before", rank=self._name)
        return version

    async def _cancel_publish(self, version: Version) -> None:
        """The user gave up: parameters may change at any moment, so the snapshot must not go on."""
        text = "publish was cancelled before the snapshot was taken"
        if self._sync is not None and self._sync.version == version and self._sync_task is not None:
            self._sync_task.cancel()
            await asyncio.wait({self._sync_task})
        self._feed(p.SnapshotFailed(version, text))

    async def wait(self, version: Version, deadline: float) -> tuple[Outcome, ...]:
        """The outcomes of `version` at every replica that took part."""
        future = self._outcomes.get(version)
        if future is None:
            raise VersionError(f"version {version} was never published here, or long ago")
        try:
            async with asyncio.timeout(deadline):
                return await asyncio.shield(future)
        except TimeoutError:
            raise TransportError(
                f"version {version} is not over after {deadline:g} s", rank=self._name
            ) from None

    def report(self, version: Version) -> SyncReport:
        """See `Publisher.report`."""
        report = self._reports.get(version)
        if report is not None:
            return report
        if self._sync is not None and self._sync.version == version:
            return self._sync.report()
        raise VersionError(f"no sync of version {version} ran here, or long ago")

    async def wait_for_replicas(self, num_replicas: int, deadline: float) -> None:
        """See `Publisher.wait_for_replicas`."""
        await self._audience.wait_for_replicas(num_replicas, deadline)

    def transports_in_use(self) -> dict[str, str]:
        """See `Publisher.transports`."""
        return {peer.sink: peer.transport for peer in self._audience.peers.values()}

    # --- the sinks' side --------------------------------------------------------------------

    def _on_message(self, control_id: bytes, message: m.AnyMessage) -> None:
        if isinstance(message, m.Subscribe):
            self._tasks.create_task(self._audience.admit(control_id, message))
            return
        peer = self._audience.find(control_id)
        if peer is None:
            if isinstance(message, m.Goodbye | m.Credit | m.Ack):
                return  # the last words of a session that is over
            raise ControlError(f"{type(message).__name__} from a peer that has not subscribed")
        match message:
            case m.Credit():
                if self._sync is not None and message.version == self._sync.version:
                    peer.credits.grant(message.bytes)
            case m.Ack():
                self._feed(p.Acknowledged(peer.sink, message.version, message.state, message.text))
            case m.ReplicaReady():
                self._audience.whole_replica(peer)
            case m.Goodbye():
                text = message.text or "it said goodbye"
                self._audience.lose(peer, text, returns=message.returns)
            case _:
                raise ControlError(f"a source takes no {type(message).__name__}")

    def _peer_joined(self, peer: SourcePeer) -> Version | None:
        self._feed(p.PeerJoined(peer.sink, peer.replica))
        running = self._machine.running
        if running is None or running.version != self._announced:
            return None
        return running.version

    def _peer_lost(self, peer: SourcePeer, text: str) -> None:
        if self._sync is not None:
            self._sync.drop(peer)
        self._feed(p.PeerLost(peer.sink, text))

    # --- the machine's actions --------------------------------------------------------------

    def _feed(self, event: p.Event) -> None:
        for action in self._machine.feed(event):
            self._perform(action)

    def _perform(self, action: p.Action) -> None:
        peers = self._audience.peers
        match action:
            case SetTimer() | CancelTimer():
                self._timers.apply(action)
            case p.StartSync(version):
                self._sync_task = self._tasks.create_task(self._run_sync(version))
            case p.Refuse(version, text):
                self._outcomes.pop(version, None)
                self._fail_snapshot(version, VersionError(text, rank=self._name))
            case p.Withdraw(version, text, superseded):
                for peer in peers.values():
                    peer.tell(m.Withdrawn(version=version, text=text, superseded=superseded))
                self._fail_snapshot(version, VersionError(text, rank=self._name, version=version))
            case p.AskToDrop(name, version):
                if name in peers:
                    peers[name].tell(m.DropRequest(version=version))
            case p.StopSending(name, version, text):
                if name in peers:
                    self._tasks.create_task(self._stop_sending(peers[name], version, text))
            case p.StopSnapshot(version, text):
                sync = self._sync
                if sync is not None and sync.version == version and self._sync_task is not None:
                    self._sync_task.cancel()
                self._fail_snapshot(version, TransportError(text, rank=self._name))
            case p.Finish(version, outcomes):
                if self._sync is not None and self._sync.version == version:
                    self._reports[version] = self._sync.report()
                future = self._outcomes.get(version)
                if future is not None and not future.done():
                    future.set_result(outcomes)

    def _fail_snapshot(self, version: Version, error: StreamsyncError) -> None:
        snapshot = self._snapshots.get(version)
        if snapshot is not None and not snapshot.done():
            snapshot.set_exception(error)
            snapshot.exception()  # a cancelled `publish` does not look at it any more

    async def _run_sync(self, version: Version) -> None:
        await self._audience.all_back()
        running = self._machine.running
        if running is None or running.version != version:
            return  # given up meanwhile
        self._announced = version
        for name in self._audience.peers:
            self._feed(p.Include(version, name))
        peers = list(self._audience.peers.values())
        for peer in peers:
            peer.credits = type(peer.credits)()
        sync = self._sync = SourceSync(
            version,
            peers,
            self._pool,
            self._probe,
            self._executor,
            self._published_at.pop(version, time.monotonic()),
            self._config.deadlines.progress,
            partial(self._snapshot_taken, version),
            partial(self._send_failed, version),
        )
        self._probe.moment("announced", version=version)
        for peer in peers:
            peer.tell(m.Begin(version=version))
        try:
            await self._streams.rebind()
            await sync.run()
        except Exception as error:
            single = root_error(error)
            text = f"{type(single).__name__}: {single}"
            _log.error("version %s failed at %s: %s", version, self._name, text)
            failure = (single if isinstance(single, StreamsyncError) else StreamsyncError(text)).at(
                rank=self._name, version=version
            )
            self._fail_snapshot(version, failure)
            self._feed(p.SnapshotFailed(version, text))

    def _snapshot_taken(self, version: Version) -> None:
        snapshot = self._snapshots.get(version)
        if snapshot is not None and not snapshot.done():
            snapshot.set_result(None)
        self._feed(p.SnapshotTaken(version))

    def _send_failed(self, version: Version, peer: SourcePeer, text: str) -> None:
        self._tasks.create_task(self._fail_peer(peer, version, text))

    async def _fail_peer(self, peer: SourcePeer, version: Version, text: str) -> None:
        """A sink that gives a version up closes its link and says why, on two sockets: its own word
        is better than what we saw of it, so that has a moment to come first."""
        try:
            async with asyncio.timeout(_LAST_WORD_SECONDS):
                await peer.ended.wait()
        except TimeoutError:
            self._feed(p.SendFailed(peer.sink, version, text))

    async def _stop_sending(self, peer: SourcePeer, version: Version, text: str) -> None:
        """The version failed for one peer. If frames are on their way the link can't be used again:
        the session ends and the sink subscribes anew."""
        peer.tell(m.Withdrawn(version=version, text=text))
        if peer.credits.granted_bytes:
            await self._audience.send_back(peer, f"version {version} failed: {text}")
        elif self._sync is not None:
            self._sync.drop(peer)
