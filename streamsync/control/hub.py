"""The hub: members register, sinks find sources. Off the critical path of every sync."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from streamsync.control.curve import Curve
from streamsync.control.messages import (
    PROTOCOL,
    Alive,
    AliveReply,
    AnyMessage,
    AskReplica,
    AskSources,
    Changed,
    Goodbye,
    Join,
    Leave,
    ReplicaInfo,
    SourceInfo,
    Sources,
    Welcome,
)
from streamsync.control.protocol.membership import Member, Membership
from streamsync.control.sockets import Listener
from streamsync.errors import ControlError
from streamsync.runtime.loop import LoopThread

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_log = logging.getLogger("streamsync.hub")


class Hub:
    """A hub in a thread of its own; a context manager.

    `host` and `port` say where to listen (port 0: any free one); `address` is what members are
    given. `secret` admits members. A member that is silent for `lost_seconds` is forgotten; running
    syncs do not notice, and it registers again by itself. Raises `ConfigError` (a port in use).
    """

    def __init__(
        self, *, secret: str, host: str = "127.0.0.1", port: int = 0, lost_seconds: float = 30.0
    ) -> None:
        self._secret = secret
        self._host = host
        self._port = port
        self._lost_seconds = lost_seconds
        self._thread = LoopThread("hub", 1)
        self._membership = Membership()
        self._joins: dict[str, Join] = {}
        self._peers: dict[str, bytes] = {}
        self._heard_at: dict[str, float] = {}
        self._listener: Listener | None = None
        self._stop: asyncio.Event | None = None
        self.address = ""

    def start(self) -> Hub:
        """Begins to listen; returns itself."""
        self._thread.start(self._main)
        return self

    def close(self) -> None:
        """Stops listening. Members keep their sessions and running syncs."""
        if self._stop is not None:
            self._thread.post(self._stop.set)
            self._thread.join()
            self._stop = None

    def __enter__(self) -> Hub:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def _main(self, ready: Callable[[], None]) -> None:
        stop = asyncio.Event()
        curve = Curve(self._secret)
        try:
            curve.start()
            self._listener = Listener(
                curve, self._host, self._port, self._on_message, self._on_lost
            )
            try:
                self.address = self._listener.endpoint
                async with asyncio.TaskGroup() as tasks:
                    running = [
                        tasks.create_task(self._listener.run()),
                        tasks.create_task(self._forget_silent()),
                    ]
                    self._stop = stop
                    ready()
                    _log.info("hub listens on %s", self.address)
                    await stop.wait()
                    for peer in tuple(self._peers.values()):
                        self._listener.send(peer, Goodbye(text="the hub closes"))
                    for task in running:
                        task.cancel()
            finally:
                self._listener.close()
        finally:
            curve.close()

    def _on_lost(self, peer: bytes, text: str) -> None:
        for name, known in list(self._peers.items()):
            if known == peer:
                self._forget(name, text)

    def _on_message(self, peer: bytes, message: AnyMessage) -> None:
        assert self._listener is not None
        match message:
            case Join():
                self._join(peer, message)
            case Alive():
                join = self._joins.get(message.name)
                known = join is not None and join.incarnation == message.incarnation
                if known:
                    self._heard_at[message.name] = time.monotonic()
                    self._peers[message.name] = peer
                self._listener.send(
                    peer,
                    AliveReply(
                        request=message.request,
                        known=known,
                        membership_epoch=self._membership.membership_epoch,
                        epoch=self._epoch_of(message.name) if known else 0,
                    ),
                )
            case Leave():
                join = self._joins.get(message.name)
                if join is not None and join.incarnation == message.incarnation:
                    self._forget(message.name, "it left")
            case AskSources():
                self._listener.send(peer, self._sources(message))
            case AskReplica():
                ranks = self._membership.of(message.replica, "sink")
                endpoint = ranks[0].endpoint if ranks and ranks[0].rank == 0 else ""
                self._listener.send(
                    peer, ReplicaInfo(request=message.request, coordinator=endpoint)
                )
            case _:
                raise ControlError(f"a hub takes no {type(message).__name__}")

    def _join(self, peer: bytes, message: Join) -> None:
        assert self._listener is not None
        if message.protocol != PROTOCOL:
            raise ControlError(
                f"{message.name} speaks protocol {message.protocol}, the hub {PROTOCOL}: install "
                "the same streamsync version everywhere"
            )
        result = self._membership.join(
            Member(
                message.name,
                message.role,
                message.unit,
                message.rank,
                message.num_ranks,
                message.endpoint,
                message.incarnation,
                message.epoch,
            ),
            int(time.time()),
        )
        if isinstance(result, str):
            raise ControlError(f"{message.name} can't join: {result}")
        self._joins[message.name] = message
        self._peers[message.name] = peer
        self._heard_at[message.name] = time.monotonic()
        _log.info("%s joined%s", message.name, " again" if result.replaced else "")
        self._listener.send(
            peer,
            Welcome(
                request=message.request,
                membership_epoch=self._membership.membership_epoch,
            ),
        )
        self._tell_change()

    def _tell_change(self) -> None:
        assert self._listener is not None
        changed = Changed(membership_epoch=self._membership.membership_epoch)
        for peer in list(self._peers.values()):
            self._listener.send(peer, changed)

    def _epoch_of(self, name: str) -> int:
        member = self._membership.members.get(name)
        if member is None or not self._membership.is_complete(member.unit, "source"):
            return 0
        return self._membership.epochs.get(member.unit, 0)

    def _sources(self, message: AskSources) -> Sources:
        epoch = self._membership.membership_epoch
        units = self._membership.source_units()
        if len(units) != 1 or not self._membership.is_complete(units[0], "source"):
            if not units:
                why = "no source has joined"
            elif len(units) > 1:
                why = f"several source groups joined: {', '.join(units)}"
            else:
                ranks = self._membership.of(units[0], "source")
                missing = sorted(set(range(ranks[0].num_ranks)) - {m.rank for m in ranks})
                why = f"source group {units[0]} lacks ranks {missing}"
            return Sources(request=message.request, membership_epoch=epoch, waiting_for=why)
        infos = []
        for member in self._membership.of(units[0], "source"):
            join = self._joins[member.name]
            assert join.layout is not None
            infos.append(
                SourceInfo(
                    name=member.name,
                    endpoint=member.endpoint,
                    incarnation=member.incarnation,
                    place=join.place,
                    layout=join.layout,
                )
            )
        return Sources(
            request=message.request,
            membership_epoch=epoch,
            sources=tuple(infos),
            epoch=self._membership.epochs[units[0]],
        )

    def _forget(self, name: str, text: str) -> None:
        join = self._joins.pop(name, None)
        self._peers.pop(name, None)
        self._heard_at.pop(name, None)
        if join is not None and self._membership.leave(name, join.incarnation):
            _log.info("%s is no member any more: %s", name, text)
            self._tell_change()

    async def _forget_silent(self) -> None:
        while True:
            await asyncio.sleep(self._lost_seconds / 4)
            now = time.monotonic()
            for name, heard_at in list(self._heard_at.items()):
                if now - heard_at > self._lost_seconds:
                    self._forget(name, f"silent for {self._lost_seconds:g} s")
