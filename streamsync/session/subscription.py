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
    TransportError,
    root_error,
)
from streamsync.plan.plan import Share, share_digest
from streamsync.plan.resolve import Places
from streamsync.runtime.pool import frame_bytes
from streamsync.session.sink_peer import SinkPeer
from streamsync.stages.copies import prepare_copies
from streamsync.stages.load import Feed
from streamsync.stages.wide import stage_wide
from streamsync.transports.choice import choose

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from concurrent.futures import Executor

    from streamsync.config import Config
    from streamsync.control.curve import Curve
    from streamsync.control.found import SourceInfo
    from streamsync.layout.binding import Binding
    from streamsync.layout.landing import Landing
    from streamsync.plan.conversion import Wide
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
        replica: str,
        rank: int,
        num_ranks: int,
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
        self._sink = f"{replica}/{rank}"
        self._replica = replica
        self._rank = rank
        self._num_ranks = num_ranks
        self._place = place
        self._binding = binding
        self._wide: tuple[Wide, ...] = ()
        self._staged = binding  # with memory for what is wide
        self._places = Places(binding.layout)
        self._config = config
        self._pool = pool
        self._transports = transports
        self._executor = executor
        self._spawn = spawn
        self._message = message
        self._lost = lost
        self.peers: dict[str, SinkPeer] = {}
        self._sessions: dict[str, asyncio.Task[None]] = {}
        self._infos: dict[str, SourceInfo] = {}
        self._shares: dict[str, Share] = {}
        self._feeds: dict[str, Feed] = {}
        self._missed: list[tuple[str, Version]] = []

    async def use_plan(self, plan: Plan, sources: tuple[SourceInfo, ...]) -> None:
        """Takes a plan, and ends the sessions that it changes: those with other shares than before
        or with sources in another life.

        Source number i also has a session with rank i modulo the number of ranks, where that takes
        no bytes from it: through one rank at least, each source learns of the replica and of its
        outcomes. A rank that would have none has one with some source, to hear of versions.
        """
        needed = {share.source: share for share in plan.shares}
        idle = [info.name for info in sources[self._rank :: self._num_ranks]]
        if not needed and not idle:
            idle = [sources[self._rank % len(sources)].name]
        for name in idle:
            if name not in needed:
                needed[name] = _empty_share(name, self._sink, plan.membership_epoch)
        infos = {info.name: info for info in sources if info.name in needed}
        old, new = self._wide, plan.wide
        restaged = {wide.name for wide in (*old, *new)} if old != new else set()
        changed = [
            name
            for name, share in self._shares.items()
            if name not in needed
            or needed[name].digest != share.digest
            or infos[name] != self._infos[name]
            or any(tensor.name in restaged for tensor in share.tensors)
        ]
        await self._drop(changed, "the plan changed", returning=set(needed))
        for name in changed:
            self._feeds.pop(name, None)
        if restaged:
            self._wide = plan.wide
            self._staged = await asyncio.get_running_loop().run_in_executor(
                self._executor, partial(stage_wide, plan, self._binding)
            )
            self._places = Places(self._staged.layout)
        self._infos, self._shares = (
            infos,
            needed | {name: share for name, share in self._shares.items() if name not in changed},
        )

    @property
    def landings(self) -> tuple[Landing, ...]:
        """What is done with tensors that landed in staging memory, the plan's and the engine's."""
        return self._staged.landings

    @property
    def are_whole(self) -> bool:
        """Whether every session of the plan stands."""
        return len(self.peers) == len(self._shares)

    async def connect(self) -> None:
        """Opens every session that is missing; raises the first error after trying all."""
        missing = [name for name in self._shares if name not in self.peers]
        results = await asyncio.gather(
            *(self._open(self._infos[name], self._shares[name]) for name in missing),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _open(self, info: SourceInfo, share: Share) -> None:
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = self._spawn(self._session(info, share, opened))
        self._sessions[info.name] = task
        try:
            await asyncio.shield(opened)
        except BaseException:
            task.cancel()
            await asyncio.wait({task})
            raise

    async def _session(
        self,
        info: SourceInfo,
        share: Share,
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
                    peer = await self._subscribe(dialer, info, share, linked)
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
        info: SourceInfo,
        share: Share,
        linked: asyncio.Future[m.Linked],
    ) -> SinkPeer:
        seconds = self._config.deadlines.connect
        await dialer.connect(seconds, patient=False)
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
                self._executor, partial(self._prepare, share)
            )
        answer = await dialer.request(
            m.Subscribe(
                protocol=m.PROTOCOL,
                sink=self._sink,
                replica=self._replica,
                incarnation=self._place.process_id,
                share=share,
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
            frames = sum(frame_bytes(b.nbytes) for b in share.buckets)
            if not link.in_place or frames > answer.lease_bytes:
                # The source's pool could not hold back all of a version for a sink that arms late.
                account = self._pool.open_account(info.name, share.max_bucket_bytes, frames)
        except BaseException as error:
            dialer.send(m.Goodbye(text=f"it could not take its share: {error}"))
            await link.abort()
            raise
        if missed is not None:
            self._missed.append((info.name, missed))
        return SinkPeer(info.name, share, feed, dialer, link, choice.name, account)

    def _prepare(self, share: Share) -> Feed:
        views = self._places.resolve(share, at_source=False)
        return Feed(
            share,
            prepare_copies(share, views, self._staged, at_source=False),
            [compile_bucket(share, b) for b in share.buckets] if self._config.digest else None,
        )

    def take_missed(self) -> list[tuple[str, Version]]:
        """Versions that a source had begun before it linked, since the last call."""
        missed, self._missed = self._missed, []
        return missed

    async def drop_all(self, text: str) -> None:
        """Ends every session; none is reported as lost."""
        await self._drop(list(self._sessions), text, returning=set())

    async def _drop(self, sources: Iterable[str], text: str, *, returning: set[str]) -> None:
        tasks = []
        for name in sources:
            peer = self.peers.get(name)
            if peer is not None:
                peer.tell(m.Goodbye(text=text, returns=name in returning))
            task = self._sessions.pop(name, None)
            if task is not None:
                tasks.append(task)
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _empty_share(source: str, sink: str, membership_epoch: int) -> Share:
    share = Share(
        source=source,
        sink=sink,
        tensors=(),
        groups=(),
        buckets=(),
        digest=0,
        membership_epoch=membership_epoch,
    )
    return msgspec.structs.replace(share, digest=share_digest(share))
