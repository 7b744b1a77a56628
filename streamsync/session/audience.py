"""The sink ranks that subscribed to a source: how they are admitted, and how they go."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from streamsync.control import messages as m
from streamsync.control.place import watch_process
from streamsync.control.sockets import error_message
from streamsync.errors import ConfigError, ControlError, PlanError, StreamsyncError, TransportError
from streamsync.session.source_peer import SourcePeer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from streamsync.config import Config
    from streamsync.runtime.pool import Pool
    from streamsync.session.links import OpenTransports
    from streamsync.session.streams import Streams
    from streamsync.stages.stream import Stream
    from streamsync.transports.base import Transport
    from streamsync.types import Version

_log = logging.getLogger("streamsync.source")

_QUEUED_WORDS_SECONDS = 0.2


class Audience:
    """`peers` are the subscribed sink ranks by name.

    `joined(peer)` is called when a peer's link stands and returns the version that it missed, if
    one runs; `lost(peer, text)` when it is gone. `send` queues a control message, `spawn` starts a
    task of the owner's. Loop thread only.
    """

    def __init__(
        self,
        name: str,
        place: m.Place,
        config: Config,
        pool: Pool,
        streams: Streams,
        transports: OpenTransports,
        send: Callable[[bytes, m.Message], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        *,
        joined: Callable[[SourcePeer], Version | None],
        lost: Callable[[SourcePeer, str], None],
    ) -> None:
        self._name = name
        self._place = place
        self._config = config
        self._pool = pool
        self._streams = streams
        self._transports = transports
        self._send = send
        self._spawn = spawn
        self._joined = joined
        self._lost = lost
        self.peers: dict[str, SourcePeer] = {}
        self._by_control_id: dict[bytes, SourcePeer] = {}
        self._refusals: dict[str, m.PlanRefused] = {}
        self._admitted_streams: list[Stream] = []
        self._expected_back: set[str] = set()
        self._closed_ids: set[bytes] = set()
        self._changed = asyncio.Event()

    # --- who is there -----------------------------------------------------------------------

    def find(self, control_id: bytes) -> SourcePeer | None:
        """The peer behind a control session."""
        return self._by_control_id.get(control_id)

    def whole_replica(self, peer: SourcePeer) -> None:
        """It says that every rank of its replica has all its sessions."""
        peer.has_whole_replica = True
        self._refusals.pop(peer.replica, None)
        self._changed.set()

    def refused(self, message: m.PlanRefused) -> None:
        """The hub says that a sink found no plan with this source's group."""
        _log.error("%s refused the plan: %s", message.sink, message.text)
        self._refusals[message.replica] = message
        self._changed.set()

    async def wait_for_replicas(self, num_replicas: int, deadline: float) -> None:
        """See `Publisher.wait_for_replicas`."""
        try:
            async with asyncio.timeout(deadline):
                while self._num_replicas() < num_replicas:
                    if self._refusals:
                        refusal = next(iter(self._refusals.values()))
                        raise PlanError(
                            "a sink can't be served", peer=refusal.sink, peer_text=refusal.text
                        )
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise ControlError(
                f"{self._num_replicas()} of {num_replicas} replicas subscribed within "
                f"{deadline:g} s: are the engines up, with this hub and secret?",
                rank=self._name,
            ) from None

    def _num_replicas(self) -> int:
        return len({p.replica for p in self.peers.values() if p.has_whole_replica})

    async def all_back(self) -> None:
        """Sinks whose links were given up with a failed version subscribe again by themselves; a
        version begun before would pass them by instead of healing them."""
        try:
            async with asyncio.timeout(self._config.deadlines.connect):
                while self._expected_back:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            names = ", ".join(sorted(self._expected_back))
            _log.warning("%s did not subscribe again; publishing without", names)
            self._expected_back.clear()

    # --- how they go ------------------------------------------------------------------------

    def control_lost(self, control_id: bytes, text: str) -> None:
        """A message could not be delivered: that session is closed."""
        peer = self.find(control_id)
        if peer is not None and control_id not in self._closed_ids:
            self._closed_ids.add(control_id)
            self._spawn(self._drop_after_last_words(peer, text))

    async def _drop_after_last_words(self, peer: SourcePeer, text: str) -> None:
        """Sending finds a closed session before its last words were read: they come first."""
        try:
            async with asyncio.timeout(_QUEUED_WORDS_SECONDS):
                await peer.ended.wait()
        except TimeoutError:
            await self.send_back(peer, text)  # not known to be dead: it or we were only silent
        finally:
            self._closed_ids.discard(peer.control_id)

    def lose(self, peer: SourcePeer, text: str, *, returns: bool = False) -> None:
        """`drop` in a task of its own; `returns`: `all_back` waits for it."""
        if self.peers.get(peer.sink) is peer:
            if returns:
                self._expected_back.add(peer.sink)
            self._spawn(self.drop(peer, text))

    async def drop(self, peer: SourcePeer, text: str) -> None:
        """Ends the session with `peer`; it may subscribe again."""
        if self.peers.get(peer.sink) is not peer:
            return
        del self.peers[peer.sink]
        self._by_control_id.pop(peer.control_id, None)
        peer.ended.set()
        _log.info("%s is gone: %s", peer.sink, text)
        self._lost(peer, text)  # no await before: it may subscribe again meanwhile
        await peer.link.abort()
        self._close_unused_streams()
        self._changed.set()

    async def send_back(self, peer: SourcePeer, text: str) -> None:
        """Ends the session of a peer that lives as far as we know (frames of a failed version are
        on its link, or it was silent): it will subscribe again, and `all_back` waits for it."""
        if self.peers.get(peer.sink) is peer:
            self._expected_back.add(peer.sink)
            peer.tell(m.Goodbye(text=text))
            await self.drop(peer, text)

    async def close(self) -> None:
        """Ends every session."""
        for peer in list(self.peers.values()):
            await self.drop(peer, "closing")
        self._streams.keep_only(())

    def _close_unused_streams(self) -> None:
        self._streams.keep_only(
            [*(peer.stream for peer in self.peers.values()), *self._admitted_streams]
        )

    # --- how they come ----------------------------------------------------------------------

    async def admit(self, control_id: bytes, message: m.Subscribe) -> None:
        """Answers a subscription: with a link, or with the reason why not."""
        try:
            async with asyncio.timeout(self._config.deadlines.connect):
                self._check(message)
                await self._subscribe(control_id, message)
        except TimeoutError:
            error = TransportError("the data link did not come up in time", peer=message.sink)
            self._send(control_id, error_message(error, 0))
        except StreamsyncError as error:
            _log.warning("refused %s: %s", message.sink, error)
            if isinstance(error, ConfigError | PlanError):  # it will not try again
                self._expected_back.discard(message.sink)
                self._changed.set()
            self._send(control_id, error_message(error, message.request))

    def _check(self, message: m.Subscribe) -> None:
        if message.protocol != m.PROTOCOL:
            raise ControlError(
                f"{message.sink} speaks protocol {message.protocol}, this source {m.PROTOCOL}: "
                "install the same streamsync version everywhere"
            )
        if message.expected_incarnation != self._place.process_id:
            raise ControlError(f"{self._name} was restarted since the plan was made: plan again")
        if message.digest != self._config.digest:
            raise ConfigError(
                f"digests are {'on' if self._config.digest else 'off'} here and "
                f"{'on' if message.digest else 'off'} at {message.sink}: set both alike"
            )
        if self._config.transport not in ("auto", message.transport):
            raise ConfigError(
                f"this source is set to transport={self._config.transport}, {message.sink} asks "
                f"for {message.transport}: set both alike, or one of them to auto"
            )

    async def _subscribe(self, control_id: bytes, message: m.Subscribe) -> None:
        old = self.peers.get(message.sink)
        if old is not None:
            self._expected_back.add(old.sink)
            await self.drop(old, "it subscribed again")
        transport = await self._transports.get(message.transport)
        stream = await self._streams.find(message.share)
        self._admitted_streams.append(stream)
        try:
            await self._link(control_id, message, transport, stream)
        finally:
            self._admitted_streams.remove(stream)
            self._close_unused_streams()

    async def _link(
        self, control_id: bytes, message: m.Subscribe, transport: Transport, stream: Stream
    ) -> None:
        offer = transport.offer(self._pool)
        answer = m.Subscribed(
            request=message.request,
            offer=offer,
            lease_bytes=self._pool.limit_bytes(stream.account),
        )
        self._send(control_id, answer)
        link = await transport.accept(offer, message.transport_address)
        peer = SourcePeer(
            message.sink,
            message.replica,
            control_id,
            stream,
            link,
            message.transport,
            partial(self._send, control_id),
        )
        self.peers[peer.sink] = self._by_control_id[control_id] = peer
        self._expected_back.discard(peer.sink)
        if message.place.host_id == self._place.host_id:
            self._spawn(self._watch(peer, message.place.pid))
        peer.tell(m.Linked(missed=self._joined(peer)))
        self._changed.set()
        _log.info(
            "%s subscribed: %d bytes a sync in %d buckets over %s",
            peer.sink,
            stream.share.nbytes,
            len(stream.share.buckets),
            message.transport,
        )

    async def _watch(self, peer: SourcePeer, pid: int) -> None:
        if pid == self._place.pid:
            return
        with watch_process(pid, partial(self.lose, peer, f"its process {pid} ended")):
            await peer.ended.wait()
