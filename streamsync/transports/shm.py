"""`shm`: one host; frames stay where the source put them and only their descriptors travel.

The sink connects to an abstract unix socket of the source (a random name, no file), shows its token
and gets the memfd of the source's pool once per link. Then

    source to sink   <frame number u64, offset u64, payload bytes u64>   one per frame
    sink to source   <frame number u64>                                  a frame is given back

little-endian, in order. A frame number of all ones says that the sender of it aborts; a sink keeps
the socket open after that for as long as it still holds frames, so that the end of the stream
means what it means when the process dies: nobody reads the source's memory any more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
from typing import TYPE_CHECKING, ClassVar

from streamsync.errors import PeerLost, TransportError
from streamsync.runtime.pool import HEADER_BYTES, Lease, Pool
from streamsync.runtime.region import Region
from streamsync.transports.admission import TOKEN_SECONDS, Door
from streamsync.transports.base import Offer, ReceiveLink, SendLink, Transport
from streamsync.transports.mapped import DRAIN_SECONDS, HeldLeases, MappedReceiveLink
from streamsync.transports.records import RecordSocket

if TYPE_CHECKING:
    from concurrent.futures import Executor

_log = logging.getLogger("streamsync.transports")

_DESCRIPTOR = struct.Struct("<QQQ")
_RETURN = struct.Struct("<Q")
_ABORT = (1 << 64) - 1
_WELCOME = b"\x01"
_BACKLOG = 128


class ShmSendLink(SendLink):
    """The source's end; see `SendLink`."""

    def __init__(self, transport: ShmTransport, connection: socket.socket, region: Region) -> None:
        self._transport = transport
        self._region = region
        self._held = HeldLeases()
        self._lost = ""
        self._withheld = 0
        self._records = RecordSocket(connection, _RETURN, self._returned, self._ended)
        transport._links.add(self)

    async def send(self, lease: Lease) -> None:
        """Posts the descriptor; never waits, since the pool bounds what can be outstanding."""
        assert lease.region is self._region, "the lease is not of the pool that was offered"
        self._check()
        number = self._held.keep(lease)
        self._records.post(_DESCRIPTOR.pack(number, lease.offset, lease.nbytes))
        self._check()
        self.wire_bytes += lease.nbytes

    async def flush(self) -> None:
        """Returns when the kernel has every descriptor."""
        await self._records.drain()
        self._check()

    async def abort(self) -> None:
        """See `SendLink.abort`. Leases that the sink keeps past `drain_seconds` are withheld, and
        come back when it lets go of them or dies."""
        if self not in self._transport._links:
            return
        self._transport._links.remove(self)
        self._transport._draining.add(self)
        self._lost = self._lost or "this end aborted the link"
        self._records.post(_DESCRIPTOR.pack(_ABORT, 0, 0))
        try:
            await self._held.drain(self._transport.drain_seconds)
        finally:
            self._withheld = len(self._held)
            self._transport.num_withheld += self._withheld
            self._settle(0)

    def _check(self) -> None:
        if self._lost:
            raise PeerLost(f"{self._lost}; {len(self._held)} frames are still with the sink")

    def _returned(self, number: int) -> None:
        if number == _ABORT:
            self._lost = self._lost or "the sink aborted the link"
        elif self._held.give_back(number):
            self._settle(min(1, self._withheld))
        elif not self._lost:
            # What it really holds is unknown now, so the rest of the memory waits for its end.
            self._lost = f"the sink gave back frame {number}, which it does not hold"
            _log.error("link closed: %s", self._lost)
            self._records.post(_DESCRIPTOR.pack(_ABORT, 0, 0))

    def _ended(self, text: str) -> None:
        self._lost = self._lost or f"the sink is gone: {text}"
        self._held.give_back_all()
        self._settle(self._withheld)

    def _settle(self, count: int) -> None:
        self._withheld -= count
        self._transport.num_withheld -= count
        if not self._held and self in self._transport._draining:
            self._leave()

    def _leave(self) -> None:
        self._transport._draining.discard(self)
        self._records.close()


class ShmReceiveLink(MappedReceiveLink):
    """The sink's end; see `MappedReceiveLink`. Checks every descriptor before it trusts it."""

    def __init__(
        self,
        transport: ShmTransport,
        connection: socket.socket,
        region: Region,
        executor: Executor | None,
    ) -> None:
        super().__init__(executor)
        self._transport = transport
        self._region = region
        self._next = 0
        self._num_out = 0
        self._returns = bytearray()
        self._records = RecordSocket(connection, _DESCRIPTOR, self._described, self._ended)
        transport._links.add(self)

    async def abort(self) -> None:
        """See `ReceiveLink.abort`. The socket stays until the last frame in place is released."""
        first = not self._aborted
        await super().abort()
        if first:
            self._transport._links.discard(self)
            self._transport._draining.add(self)
            self._records.post(_RETURN.pack(_ABORT))
            self._close_if_empty()

    def _described(self, number: int, offset: int, nbytes: int) -> None:
        if self._lost:
            return
        if number == _ABORT:
            self._lose("the source aborted the link")
            return
        end = offset + HEADER_BYTES + nbytes
        if number != self._next or offset % HEADER_BYTES or end > self._region.nbytes:
            self._lose(
                f"the source sent a descriptor that can't be: frame {number} at {offset} with "
                f"{nbytes} bytes in {self._region.nbytes}"
            )
            return
        self._next += 1
        self._num_out += 1
        self._arrive(Lease(self._region, offset, nbytes, lambda _: self._give_back(number)))

    def _give_back(self, number: int) -> None:
        self._num_out -= 1
        if not self._returns:
            self._loop.call_soon(self._post_returns)
        self._returns += _RETURN.pack(number)

    def _post_returns(self) -> None:
        self._records.post(bytes(self._returns))
        self._returns.clear()
        self._close_if_empty()

    def _close_if_empty(self) -> None:
        if self._aborted and not self._num_out and not self._returns:
            self._leave()

    def _leave(self) -> None:
        self._transport._draining.discard(self)
        self._records.close()

    def _ended(self, text: str) -> None:
        self._lose(f"the source is gone: {text}")


class ShmTransport(Transport):
    """See the module. `executor` runs the copies of sinks that don't read in place."""

    name: ClassVar[str] = "shm"

    def __init__(
        self,
        executor: Executor | None = None,
        *,
        drain_seconds: float = DRAIN_SECONDS,
        token_seconds: float = TOKEN_SECONDS,
    ) -> None:
        self.drain_seconds = drain_seconds
        self._token_seconds = token_seconds
        self._executor = executor
        self._address = b""
        self._door: Door | None = None
        self._pools: dict[bytes, Pool] = {}
        self._links: set[ShmSendLink | ShmReceiveLink] = set()
        self._draining: set[ShmSendLink | ShmReceiveLink] = set()

    async def start(self) -> None:
        """Listens under a fresh abstract name."""
        self._address = b"\0streamsync-" + secrets.token_hex(16).encode()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        listener.bind(self._address)
        listener.listen(_BACKLOG)
        self._door = Door(listener, token_seconds=self._token_seconds)

    def address(self) -> bytes:
        """Empty: the sink connects, not the source."""
        return b""

    def offer(self, pool: Pool) -> Offer:
        """See `Transport.offer`. The sink will be able to write the memory of `pool`: it is a
        process that this job trusts."""
        assert self._door is not None, "start first"
        token = self._door.expect()
        self._pools[token] = pool
        return Offer(self._address, token)

    async def accept(self, offer: Offer, sink_address: bytes) -> SendLink:
        """See `Transport.accept`."""
        assert self._door is not None, "start first"
        try:
            connection = await self._door.admitted(offer.token)
        finally:
            pool = self._pools.pop(offer.token, None)
        assert pool is not None, "an admitted token has its pool"
        try:
            socket.send_fds(connection, [_WELCOME], [pool.region.fd])
        except OSError as error:
            connection.close()
            raise PeerLost(f"the sink left while it connected: {error}") from error
        return ShmSendLink(self, connection, pool.region)

    async def connect(self, offer: Offer) -> ReceiveLink:
        """See `Transport.connect`."""
        loop = asyncio.get_running_loop()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, offer.address)
            await loop.sock_sendall(connection, offer.token)
            await _readable(connection)
            message, fds, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            connection.close()
            raise TransportError(f"can't reach the source's shared memory: {error}") from error
        except BaseException:
            connection.close()
            raise
        if message != _WELCOME or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            connection.close()
            raise TransportError("the source refused this offer's token")
        try:
            region = Region.attach(fds[0])
        except OSError as error:
            os.close(fds[0])
            connection.close()
            raise TransportError(f"can't map the source's shared memory: {error}") from error
        region.close()  # the mapping needs its descriptor no more
        return ShmReceiveLink(self, connection, region, self._executor)

    async def close(self) -> None:
        """See `Transport.close`."""
        if self._door is not None:
            self._door.close()
        self._pools.clear()
        async with asyncio.TaskGroup() as group:
            for link in self._links:
                group.create_task(link.abort())
        for link in list(self._draining):
            link._leave()


async def _readable(connection: socket.socket) -> None:
    """Waits until a read would not block."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(connection, wake)
    try:
        await ready
    finally:
        loop.remove_reader(connection)
