"""A sink's subscriptions: one session and one data link per source of its plan."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from streamsync.control import messages as m
from streamsync.control.place import watch_process
from streamsync.control.sockets import Dialer
from streamsync.digest.compiled import compile_bucket
from streamsync.errors import (
    StreamsyncError,
    TransportError,
    root_error,
)
from streamsync.plan.plan import Share, share_digest
from streamsync.runtime.pool import frame_bytes
from streamsync.session.sink_peer import SinkPeer
from streamsync.stages.copies import prepare_copies
from streamsync.stages.load import Feed
from streamsync.transports.choice import choose

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Executor

    from streamsync.config import Config
    from streamsync.control.curve import Curve
    from streamsync.layout.binding import Binding
    from streamsync.plan.plan import Plan
    from streamsync.runtime.pool import Pool
    from streamsync.session.links import OpenTransports
    from streamsync.types import Version

_log = logging.getLogger("streamsync.sink")


class Subscriptions:
    """`peers` are the live sessions by source name. `message(peer, message)` gets what sources say,
    `lost(source, text)` is called once when a session ends by itself. Loop thread only."""

    def __init__(
        self,
        curve: Curve,
        sink: str,
        replica: str,
        place: m.Place,
        binding: Binding,
        config: Config,
        pool: Pool,
        transports: OpenTransports,
        executor: Executor,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        *,
        message: Callable[[SinkPeer, m.AnyMessage], None],
        lost: Callable[[str, str], None],
    ) -> None:
        self._curve = curve
        self._sink = sink
        self._replica = replica
        self._place = place
        self._binding = binding
        self._config = config
        self._pool = pool
        self._transports = transports
        self._executor = executor
        self._spawn = spawn
        self._message = message
        self._lost = lost
        self.peers: dict[str, SinkPeer] = {}
        self._sessions: dict[str, asyncio.Task[None]] = {}
        self._sources: tuple[m.SourceInfo, ...] = ()
        self._plan: Plan | None = None
        self._shares: list[tuple[Share, Share]] = []
        self._feeds: dict[str, Feed] = {}
        self._missed: list[tuple[str, Version]] = []

    def is_planned_for(self, sources: tuple[m.SourceInfo, ...]) -> bool:
        """Whether the current plan was made for exactly these sources in these lives."""
        return self._plan is not None and [(s.name, s.incarnation) for s in sources] == [
            (s.name, s.incarnation) for s in self._sources
        ]

    def use_plan(self, plan: Plan, sources: tuple[m.SourceInfo, ...]) -> None:
        """Takes a new plan; call after `drop_all`. The coordinator's rank (rank 0) also has a
        session with every source that sends it nothing: through it each source learns of the
        replica and of its outcomes. A rank that needs nothing at all has one with the first source,
        through which it hears of versions."""
        self._plan, self._sources, self._feeds = plan, sources, {}
        self._shares = list(zip(plan.source_shares, plan.sink_shares, strict=True))
        needed = {share.source for share in plan.source_shares}
        if self._sink.endswith("/0"):
            idle = [info.name for info in sources if info.name not in needed]
        else:
            idle = [] if needed else [sources[0].name]
        for name in idle:
            empty = Share(
                source=name,
                sink=self._sink,
                tensors=(),
                groups=(),
                buckets=(),
                digest=0,
                membership_epoch=plan.membership_epoch,
            )
            empty = msgspec.structs.replace(empty, digest=share_digest(empty))
            self._shares.append((empty, empty))

    async def connect(self) -> None:
        """Opens every session that is missing; raises the first error after trying all."""
        infos = {info.name: info for info in self._sources}
        missing = [(ours, theirs) for ours, theirs in self._shares if ours.source not in self.peers]
        results = await asyncio.gather(
            *(self._open(infos[source.source], source, sink) for source, sink in missing),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _open(self, info: m.SourceInfo, source_share: Share, sink_share: Share) -> None:
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = self._spawn(self._session(info, source_share, sink_share, opened))
        self._sessions[info.name] = task
        try:
            await asyncio.shield(opened)
        except BaseException:
            task.cancel()
            await asyncio.wait({task})
            raise

    async def _session(
        self,
        info: m.SourceInfo,
        source_share: Share,
        sink_share: Share,
        opened: asyncio.Future[None],
    ) -> None:
        """The whole life of one session; ends when it is lost or cancelled."""
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        linked: asyncio.Future[m.Linked] = asyncio.get_running_loop().create_future()
        peer: SinkPeer | None = None
        early: list[m.AnyMessage] = []  # a source may begin a version right after it linked

        def lost(text: str) -> None:
            if not ended.done():
                ended.set_result(text)
            if not linked.done():
                linked.set_exception(TransportError(text, peer=info.name))

        def handle(message: m.AnyMessage) -> None:
            if isinstance(message, m.Linked) and not linked.done():
                linked.set_result(message)
            elif peer is not None:
                self._message(peer, message)
            elif isinstance(message, m.Error):
                lost(message.text)
            else:
                early.append(message)

        dialer = Dialer(self._curve, info.endpoint, info.name, handle, lost)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(dialer.run())
                try:
                    peer = await self._subscribe(dialer, info, source_share, sink_share, linked)
                    self.peers[info.name] = peer
                    for message in early:
                        self._message(peer, message)
                    opened.set_result(None)
                    with watch_process(
                        info.place.pid if info.place.host_id == self._place.host_id else 0,
                        partial(dialer.fail, f"its process {info.place.pid} ended"),
                    ):
                        text = await ended
                finally:
                    running.cancel()
                    if linked.done() and not linked.cancelled():
                        linked.exception()
                    if peer is not None:
                        await self._forget(info.name, peer)
        except Exception as error:
            if opened.done():
                raise
            opened.set_exception(root_error(error))
            opened.exception()
        else:
            self._lost(info.name, text)
        finally:
            dialer.close()

    async def _forget(self, source: str, peer: SinkPeer) -> None:
        if self.peers.get(source) is peer:
            del self.peers[source]
        peer.ended.set()
        await peer.link.abort()
        if peer.account is not None:
            peer.account.close()

    async def _subscribe(
        self,
        dialer: Dialer,
        info: m.SourceInfo,
        source_share: Share,
        sink_share: Share,
        linked: asyncio.Future[m.Linked],
    ) -> SinkPeer:
        seconds = self._config.deadlines.connect
        await dialer.connect(seconds)
        ours, theirs = self._place, info.place
        choice = choose(
            self._config.transport,
            same_process=ours.process_id == theirs.process_id,
            same_host=ours.host_id == theirs.host_id,
            has_ucx=ours.has_ucx and theirs.has_ucx,
            has_rdma=ours.has_rdma and theirs.has_rdma,
        )
        transport = await self._transports.get(choice.name)
        _log.info("%s takes %s from %s: %s", self._sink, choice.name, info.name, choice.reason)
        feed = self._feeds.get(info.name)
        if feed is None:
            feed = self._feeds[info.name] = await asyncio.get_running_loop().run_in_executor(
                self._executor, partial(self._prepare, sink_share)
            )
        answer = await dialer.request(
            m.Subscribe(
                protocol=m.PROTOCOL,
                sink=self._sink,
                replica=self._replica,
                incarnation=self._place.process_id,
                share=source_share,
                transport=choice.name,
                transport_address=transport.address(),
                place=self._place,
                expected_incarnation=info.incarnation,
                digest=self._config.digest,
            ),
            m.Subscribed,
            seconds,
        )
        async with asyncio.timeout(seconds):
            link = await transport.connect(answer.offer)
        try:
            async with asyncio.timeout(seconds):
                missed = (await asyncio.shield(linked)).missed
            account = None
            frames = sum(frame_bytes(b.nbytes) for b in sink_share.buckets)
            if not link.in_place or frames > answer.lease_bytes:
                # The source's pool could not hold back all of a version for a sink that arms late.
                account = self._pool.open_account(info.name, sink_share.max_bucket_bytes, frames)
        except BaseException as error:
            dialer.send(m.Goodbye(text=f"it could not take its share: {error}"))
            await link.abort()
            raise
        if missed is not None:
            self._missed.append((info.name, missed))
        return SinkPeer(info.name, sink_share, feed, dialer, link, choice.name, account)

    def _prepare(self, share: Share) -> Feed:
        return Feed(
            share,
            prepare_copies(share, self._binding, at_source=False),
            [compile_bucket(share, b) for b in share.buckets] if self._config.digest else None,
        )

    def take_missed(self) -> list[tuple[str, Version]]:
        """Versions that a source had begun before it linked, since the last call."""
        missed, self._missed = self._missed, []
        return missed

    async def refuse(self, sources: tuple[m.SourceInfo, ...], text: str) -> None:
        """Tells every source that no plan with it is possible, so that the trainer sees why."""
        seconds = self._config.deadlines.connect
        for info in sources:
            dialer = Dialer(self._curve, info.endpoint, info.name, lambda _m: None, lambda _t: None)
            try:
                async with asyncio.TaskGroup() as tasks:
                    running = tasks.create_task(dialer.run())
                    try:
                        await dialer.connect(seconds)
                        dialer.send(m.PlanRefused(sink=self._sink, text=text))
                        await asyncio.sleep(0.1)
                    finally:
                        running.cancel()
            except* StreamsyncError:
                _log.warning("%s could not tell %s of its refusal", self._sink, info.name)
            finally:
                dialer.close()

    async def drop_all(self, text: str) -> None:
        """Ends every session; none is reported as lost."""
        tasks = list(self._sessions.values())
        self._sessions.clear()
        for peer in list(self.peers.values()):
            peer.tell(m.Goodbye(text=text))
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
