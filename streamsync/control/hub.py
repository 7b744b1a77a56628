"""The hub: members register, sinks find sources. Off the critical path of every sync."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import msgspec

from streamsync.control import messages as m
from streamsync.control.curve import Curve
from streamsync.control.registry import Registry
from streamsync.control.sockets import Listener
from streamsync.errors import ControlError
from streamsync.runtime.loop import LoopThread

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_log = logging.getLogger("streamsync.hub")

_NUM_DOORS = 16
_COALESCE_SECONDS = 0.05
_WORDS_BEFORE_LOST = 6
"""A member that is alive says so this often in the time after which it is lost."""


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
        self._registry = Registry()
        self._peers: dict[str, bytes] = {}
        self._names: dict[bytes, str] = {}
        self._heard_at: dict[str, float] = {}
        self._listener: Listener | None = None
        self._moved: asyncio.Event
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

    @property
    def num_members(self) -> int:
        """How many members are registered."""
        return len(self._registry)

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
        self._moved = asyncio.Event()
        curve = Curve(self._secret)
        try:
            curve.start()
            self._listener = Listener(
                curve,
                self._host,
                self._port,
                self._on_message,
                self._on_lost,
                num_doors=_NUM_DOORS,
            )
            try:
                self.address = self._listener.endpoint
                async with asyncio.TaskGroup() as tasks:
                    running = [
                        tasks.create_task(self._listener.run()),
                        tasks.create_task(self._tell_changes()),
                        tasks.create_task(self._forget_silent()),
                    ]
                    self._stop = stop
                    ready()
                    _log.info("hub listens on %s", self.address)
                    await stop.wait()
                    for peer in tuple(self._peers.values()):
                        self._listener.send(peer, m.Goodbye(text="the hub closes"))
                    for task in running:
                        task.cancel()
            finally:
                self._listener.close()
        finally:
            curve.close()

    def _on_lost(self, peer: bytes, text: str) -> None:
        name = self._names.get(peer)
        if name is not None:
            self._forget(name, text)

    def _on_message(self, peer: bytes, message: m.AnyMessage) -> None:
        assert self._listener is not None
        registry = self._registry
        match message:
            case m.Join():
                was_known = registry.knows(message.name, message.incarnation)
                wants_outline = registry.join(message, int(time.time()))
                self._hear(message.name, peer)
                if not was_known:
                    _log.info("%s joined", message.name)
                self._welcome(peer, message.request, wants_outline=wants_outline)
            case m.Describe():
                registry.describe(message)
                self._welcome(peer, message.request)
            case m.Alive():
                known = registry.knows(message.name, message.incarnation)
                if known:
                    self._hear(message.name, peer)
                epoch = registry.epoch_of(message.name) if known else 0
                self._listener.send(
                    peer, m.AliveReply(request=message.request, known=known, epoch=epoch)
                )
                return
            case m.Leave():
                if registry.knows(message.name, message.incarnation):
                    self._forget(message.name, "it left")
            case m.AskSources():
                answer = registry.sources(message)
                self._listener.send(peer, msgspec.structs.replace(answer, found=b""), answer.found)
            case m.AskReplica():
                endpoint = registry.coordinator_of(message.replica)
                self._listener.send(
                    peer, m.ReplicaInfo(request=message.request, coordinator=endpoint)
                )
                return
            case m.PlanRefused():
                for name in registry.refusal(message):
                    self._tell(name, message)
            case _:
                raise ControlError(f"a hub takes no {type(message).__name__}")
        self._moved.set()

    def _welcome(self, peer: bytes, request: int, *, wants_outline: bool = False) -> None:
        assert self._listener is not None
        self._listener.send(
            peer,
            m.Welcome(
                request=request,
                wants_outline=wants_outline,
                alive_seconds=self._lost_seconds / _WORDS_BEFORE_LOST,
            ),
        )

    def _hear(self, name: str, peer: bytes) -> None:
        self._heard_at[name] = time.monotonic()
        old = self._peers.get(name)
        if old != peer:
            if old is not None:
                self._names.pop(old, None)
            self._peers[name] = peer
            self._names[peer] = name

    def _tell(self, name: str, message: m.Message) -> None:
        assert self._listener is not None
        peer = self._peers.get(name)
        if peer is not None:
            self._listener.send(peer, message)

    def _forget(self, name: str, text: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is not None:
            self._names.pop(peer, None)
        self._heard_at.pop(name, None)
        if self._registry.forget(name):
            _log.info("%s is no member any more: %s", name, text)
            self._moved.set()

    async def _tell_changes(self) -> None:
        """Many join at once: they are told of what they all make of it, not of each other."""
        while True:
            await self._moved.wait()
            await asyncio.sleep(_COALESCE_SECONDS)
            self._moved.clear()
            for name, message in list(self._registry.due()):
                self._tell(name, message)

    async def _forget_silent(self) -> None:
        while True:
            await asyncio.sleep(self._lost_seconds / 4)
            now = time.monotonic()
            for name, heard_at in list(self._heard_at.items()):
                if now - heard_at > self._lost_seconds:
                    self._forget(name, f"silent for {self._lost_seconds:g} s")
