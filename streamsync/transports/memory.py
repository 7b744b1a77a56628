"""`memory`: source and sink in one process; a frame is handed over as the lease itself.

Both may live on different event loops in different threads. A pool and its leases are only touched
on the loop they belong to, so every crossing goes through `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from typing import TYPE_CHECKING, ClassVar

from streamsync.errors import PeerLost, TransportError
from streamsync.runtime.pool import Lease, Pool
from streamsync.transports.base import Offer, ReceiveLink, SendLink, Transport
from streamsync.transports.mapped import DRAIN_SECONDS, HeldLeases, MappedReceiveLink

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

_nonce = secrets.token_hex(8)


def process_identity() -> str:
    """The same text for two ends that `memory` can join, and for no others."""
    return f"{_nonce}-{os.getpid()}"


def _cross(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> bool:
    """Runs `call` on another loop's thread; False when that loop is closed."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        return False
    return True


class _Pending:
    """An offer that waits for its sink. Made, resolved and withdrawn on the source's loop."""

    def __init__(self, transport: MemoryTransport) -> None:
        self.transport = transport
        self.loop = asyncio.get_running_loop()
        self.link: asyncio.Future[MemorySendLink] = self.loop.create_future()


_offers: dict[bytes, _Pending] = {}
"""Offers of all transports of this process by token; only atomic dict operations touch it."""


class MemorySendLink(SendLink):
    """The source's end; see `SendLink`."""

    def __init__(self, transport: MemoryTransport, sink: MemoryReceiveLink) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._sink = sink
        self._held = HeldLeases()
        self._lost = ""
        self._withheld = 0

    async def send(self, lease: Lease) -> None:
        """Hands `lease` over; never waits, since the pool bounds what can be outstanding."""
        self._check()
        number = self._held.keep(lease)
        region, offset, nbytes = lease.region, lease.offset, lease.nbytes
        source, sink = self, self._sink

        def arrive() -> None:
            frame = Lease(region, offset, nbytes, lambda _: source._returned_from_sink(number))
            sink._arrive(frame)

        if not _cross(sink._loop, arrive):
            self._sink_gone("the sink's loop is closed")
            self._held.give_back_all()
            self._check()
        self.wire_bytes += nbytes

    async def flush(self) -> None:
        """Frames leave within `send`; only checks the peer."""
        self._check()

    async def abort(self) -> None:
        """See `SendLink.abort`; leases that the sink keeps are withheld until it lets go."""
        if self not in self._transport._links:
            return
        self._transport._links.remove(self)
        self._lost = self._lost or "this end aborted the link"
        if not _cross(self._sink._loop, lambda: self._sink._lose("the source aborted the link")):
            self._held.give_back_all()
        try:
            await self._held.drain(self._transport.drain_seconds)
        finally:
            self._withheld = len(self._held)
            self._transport.num_withheld += self._withheld

    def _check(self) -> None:
        if self._lost:
            raise PeerLost(f"{self._lost}; {len(self._held)} frames are still with the sink")

    def _sink_gone(self, text: str) -> None:
        self._lost = self._lost or text

    def _returned_from_sink(self, number: int) -> None:
        # A closed source loop needs its memory no more.
        _cross(self._loop, lambda: self._returned(number))

    def _returned(self, number: int) -> None:
        if self._held.give_back(number) and self._withheld:
            self._withheld -= 1
            self._transport.num_withheld -= 1


class MemoryReceiveLink(MappedReceiveLink):
    """The sink's end; see `MappedReceiveLink`."""

    def __init__(self, transport: MemoryTransport, executor: Executor | None) -> None:
        super().__init__(executor)
        self._transport = transport
        self._source: MemorySendLink | None = None

    async def abort(self) -> None:
        """See `ReceiveLink.abort`."""
        self._transport._links.discard(self)
        await super().abort()
        source = self._source
        if source is not None:
            _cross(source._loop, lambda: source._sink_gone("the sink aborted the link"))


class MemoryTransport(Transport):
    """See the module. `executor` runs the copies of sinks that don't read in place."""

    name: ClassVar[str] = "memory"

    def __init__(
        self, executor: Executor | None = None, *, drain_seconds: float = DRAIN_SECONDS
    ) -> None:
        self.drain_seconds = drain_seconds
        self._executor = executor
        self._tokens: set[bytes] = set()
        self._links: set[MemorySendLink | MemoryReceiveLink] = set()

    async def start(self) -> None:
        """Nothing to open."""

    def address(self) -> bytes:
        """Empty: the offer's token says it all."""
        return b""

    def offer(self, pool: Pool) -> Offer:
        """See `Transport.offer`; any pool of this process will do."""
        token = secrets.token_bytes(32)
        _offers[token] = _Pending(self)
        self._tokens.add(token)
        return Offer(process_identity().encode(), token)

    async def accept(self, offer: Offer, sink_address: bytes) -> SendLink:
        """See `Transport.accept`."""
        pending = _offers.get(offer.token)
        if pending is None or pending.transport is not self:
            raise TransportError("this offer was withdrawn or never made here")
        try:
            return await pending.link
        finally:
            self._withdraw(offer.token)

    async def connect(self, offer: Offer) -> ReceiveLink:
        """See `Transport.connect`."""
        if offer.address != process_identity().encode():
            raise TransportError("the memory transport only joins ends of one process")
        pending = _offers.get(offer.token)
        if pending is None:
            raise TransportError("the source does not know this token")
        link = MemoryReceiveLink(self, self._executor)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[MemorySendLink | None] = loop.create_future()

        def settle(source: MemorySendLink | None) -> None:
            if not answer.done():
                answer.set_result(source)
            elif source is not None:  # connect was cancelled meanwhile
                _cross(source._loop, lambda: source._sink_gone("the sink did not stay"))

        def join() -> None:
            # Being here, on the source's loop, makes the token's use exclusive.
            if pending.link.done() or offer.token not in pending.transport._tokens:
                _cross(loop, lambda: settle(None))
                return
            pending.transport._tokens.discard(offer.token)
            source = MemorySendLink(pending.transport, link)
            pending.transport._links.add(source)
            pending.link.set_result(source)
            _cross(loop, lambda: settle(source))

        if not _cross(pending.loop, join):
            raise TransportError("the source's loop is closed")
        source = await answer
        if source is None:
            raise TransportError("the source's token was used or withdrawn")
        link._source = source
        self._links.add(link)
        return link

    async def close(self) -> None:
        """See `Transport.close`."""
        for token in list(self._tokens):
            self._withdraw(token)
        async with asyncio.TaskGroup() as group:
            for link in self._links:
                group.create_task(link.abort())

    def _withdraw(self, token: bytes) -> None:
        self._tokens.discard(token)
        pending = _offers.pop(token, None)
        if pending is not None:
            pending.link.cancel()
