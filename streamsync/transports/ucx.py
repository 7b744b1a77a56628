"""`ucx`: UCX through UCXX: RDMA where the library has it, else TCP, CMA or shared memory.

A frame is one tagged message from lease to lease. Endpoints are made from worker addresses, which
travel over the authenticated control session; UCX's own listener (no authentication, all
interfaces) is never opened. A link owns 2^32 tags under a random base that its offer's token holds:

    base + 0          sink to source   hello: the token
    base + 1          source to sink   welcome: the token
    base + 2, + 3     each way         farewell (2 from the source): how many frames are through
    base + 4 + k      source to sink   frame k

UCX can't be stopped from writing a buffer once a message for it began, so a link holds its leases
itself until their requests are done; what stays busy after an abort is kept for ever and counted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import struct
import time
from typing import TYPE_CHECKING, Any, ClassVar

import xxhash

from streamsync.errors import IntegrityError, PeerLost, TransportError
from streamsync.runtime.header import payload_bytes
from streamsync.runtime.pool import HEADER_BYTES, Lease, Pool
from streamsync.transports.base import Offer, ReceiveLink, SendLink, Transport
from streamsync.transports.ucx_library import describe, errors, load_ucxx, worker

if TYPE_CHECKING:
    from collections.abc import Coroutine

_log = logging.getLogger("streamsync.transports")

WINDOW = 4
"""Frames under way on one link: two hide the rendezvous, the rest the event loop's own delays."""
DRAIN_SECONDS = 2.0
_FAREWELL_SECONDS = 0.2
_COUNT = struct.Struct("<Q")
_TOKEN_BYTES = 8
_SEAL_BYTES = 8
_HELLO, _WELCOME, _SOURCE_FAREWELL, _SINK_FAREWELL, _FIRST_FRAME = range(5)
_NANOSECONDS = 10**9


class _Link:
    """One endpoint and the requests on it. On the loop's thread."""

    def __init__(
        self, transport: UcxTransport, endpoint: Any, base: int, *, is_source: bool
    ) -> None:
        self._transport = transport
        self._endpoint = endpoint
        self._base = base
        self._own_farewell = _SOURCE_FAREWELL if is_source else _SINK_FAREWELL
        self._lost = ""
        self._requests: set[asyncio.Task[None]] = set()
        self._leased: set[asyncio.Task[None]] = set()
        self._num_frames = 0
        self._num_through = 0
        self._peer_through: int | None = None
        self._farewell = bytearray(_COUNT.size)
        self._peers_farewell = _SINK_FAREWELL if is_source else _SOURCE_FAREWELL
        self._gone: asyncio.Task[None] | None = None
        transport._links.add(self)

    def _open(self) -> None:
        """From here on both ends know each other, and the peer's end is heard of."""
        self._gone = self._start(self._hear(self._peers_farewell))

    async def _any(self, *requests: asyncio.Task[None]) -> None:
        """Returns when one of them is done or the peer is gone. Cancelling it cancels neither."""
        assert self._gone is not None, "open"
        await asyncio.wait({*requests, self._gone}, return_when=asyncio.FIRST_COMPLETED)

    def _start(
        self, request: Coroutine[Any, Any, None], lease: Lease | None = None
    ) -> asyncio.Task[None]:
        """Runs a request as a task of its own: cancelling who waits for it must not drop it."""
        task = asyncio.get_running_loop().create_task(request)
        self._requests.add(task)
        task.add_done_callback(self._forget)
        if lease is not None:
            lease.retain()
            self._leased.add(task)

            def done(task: asyncio.Task[None]) -> None:
                self._leased.discard(task)
                lease.release()

            task.add_done_callback(done)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._requests.discard(task)
        if not task.cancelled():
            task.exception()  # who waits for the task has it; if nobody does, the link is aborted

    async def _send(self, tag: int, data: object, doing: str) -> None:
        with errors(doing):
            await self._endpoint.send(data, tag=self._tag(tag), force_tag=True)

    async def _receive(self, tag: int, buffer: memoryview | bytearray, doing: str) -> None:
        with errors(doing):
            await self._endpoint.recv(buffer, tag=self._tag(tag), force_tag=True)

    def _tag(self, number: int) -> int:
        return (self._base + number) & ((1 << 64) - 1)

    async def _hear(self, tag: int) -> None:
        """Ends when the peer said farewell or died."""
        try:
            await self._receive(tag, self._farewell, "while it was idle")
        except TransportError as error:
            self._lost = self._lost or str(error)
        else:
            (self._peer_through,) = _COUNT.unpack(self._farewell)
            self._lost = self._lost or "the peer aborted the link"

    async def abort(self) -> None:
        """Says farewell, cancels what is under way and waits until UCX let go of its leases."""
        if self not in self._transport._links:
            return
        self._transport._links.remove(self)
        said = None
        if self._gone is not None and not self._lost:
            count = _COUNT.pack(self._num_through)
            said = self._start(self._send(self._own_farewell, count, "at its farewell"))
        self._lost = self._lost or "this end aborted the link"
        self._peer_through = None
        try:
            if said is not None:  # a stopped peer never takes it
                await asyncio.wait([said], timeout=_FAREWELL_SECONDS)
            await asyncio.to_thread(self._endpoint.abort, period=_NANOSECONDS)
            if self._requests:
                await asyncio.wait(set(self._requests), timeout=self._transport.drain_seconds)
        finally:
            self._withhold()

    def _withhold(self) -> None:
        for task in self._leased:
            self._transport.num_withheld += 1
            task.add_done_callback(self._regain)
        if self._leased:
            _log.error("UCX still holds %d leases of an aborted link", len(self._leased))
        for task in self._requests - self._leased:
            task.cancel()

    def _regain(self, _: asyncio.Task[None]) -> None:
        self._transport.num_withheld -= 1


class UcxSendLink(_Link, SendLink):
    """The source's end; see `SendLink`. After `send`, up to `WINDOW` frames are under way."""

    async def send(self, lease: Lease) -> None:
        """Posts the frame once there is room in the window."""
        while len(self._leased) >= WINDOW and not self._lost:
            await self._any(*self._leased)
        self._check()
        number = self._num_frames
        self._num_frames += 1
        self._start(self._deliver(number, lease), lease)
        self.wire_bytes += lease.nbytes

    async def _deliver(self, number: int, lease: Lease) -> None:
        try:
            await self._send(_FIRST_FRAME + number, lease.frame, f"in frame {number}")
            self._num_through += 1
        except TransportError as error:
            self._lost = self._lost or str(error)

    async def flush(self) -> None:
        """Returns when every request is done: UCX or the sink has the frames."""
        while self._leased and not self._lost:
            await self._any(*self._leased)
        self._check()

    def _check(self) -> None:
        if self._lost:
            raise PeerLost(f"{self._lost}; {len(self._leased)} frames had not left")


class UcxReceiveLink(_Link, ReceiveLink):
    """The sink's end; see `ReceiveLink`.

    UCX doesn't tell when a frame's first byte comes. So `waiting_seconds` counts what a receive
    took beyond the time that this link's fastest frame would have needed for as many bytes.
    """

    _seconds_per_byte = 1e-9  # 1 GB/s until a frame was faster

    async def receive(self, lease: Lease | None, nbytes: int) -> Lease:
        """See `ReceiveLink.receive`. One is posted at a time: the next frame's rendezvous waits
        at this end already, and two at once were slower on one host, over CMA and TCP alike."""
        assert lease is not None, "ucx receives into the sink's own leases"
        if self._lost and self._num_through >= (self._peer_through or 0):
            raise PeerLost(self._lost)
        number = self._num_frames
        self._num_frames += 1
        frame = lease.frame[: HEADER_BYTES + nbytes]
        task = self._start(self._receive(_FIRST_FRAME + number, frame, f"in frame {number}"), lease)
        started = time.monotonic()
        await self._any(task)
        if not task.done():
            # Told that the peer goes: what it sent whole is still on its way to us.
            if self._num_through >= (self._peer_through or 0):
                raise PeerLost(f"{self._lost}; frame {self._num_through} never came")
            await asyncio.wait({task})
        task.result()
        self._account(time.monotonic() - started, nbytes)
        if payload_bytes(lease.header) != nbytes:
            raise IntegrityError(
                f"a frame of {payload_bytes(lease.header)} bytes came where {nbytes} were planned"
            )
        self._num_through += 1
        self.wire_bytes += nbytes
        return lease

    def _account(self, seconds: float, nbytes: int) -> None:
        size = HEADER_BYTES + nbytes
        self._seconds_per_byte = min(self._seconds_per_byte, seconds / size)
        self.waiting_seconds += seconds - self._seconds_per_byte * size


class UcxTransport(Transport):
    """See the module. All transports of a process share one worker and one loop."""

    name: ClassVar[str] = "ucx"

    def __init__(self, *, drain_seconds: float = DRAIN_SECONDS) -> None:
        self.drain_seconds = drain_seconds
        self._address = b""
        self._offers: set[bytes] = set()
        self._links: set[_Link] = set()

    async def start(self) -> None:
        """Starts UCX; raises `MissingExtraError`, or `ConfigError` for a second loop."""
        await asyncio.to_thread(load_ucxx)  # the import takes a second
        worker.enter()
        self._address = _seal(bytes(load_ucxx().get_worker_address().tobytes()))
        _log.info("%s", await asyncio.to_thread(describe))

    def address(self) -> bytes:
        """This process's UCX worker address."""
        return self._address

    def offer(self, pool: Pool) -> Offer:
        """See `Transport.offer`."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._offers.add(token)
        return Offer(self._address, token)

    async def accept(self, offer: Offer, sink_address: bytes) -> SendLink:
        """See `Transport.accept`."""
        if offer.token not in self._offers:
            raise TransportError("this offer was withdrawn or never made here")
        self._offers.remove(offer.token)
        endpoint = await self._reach(sink_address)
        link = UcxSendLink(self, endpoint, _base(offer.token), is_source=True)
        await self._greet(link, link._receive(_HELLO, bytearray(_TOKEN_BYTES), "at its hello"))
        await self._greet(link, link._send(_WELCOME, offer.token, "at its welcome"))
        link._open()
        return link

    async def connect(self, offer: Offer) -> ReceiveLink:
        """See `Transport.connect`. A source that does not know the token gives no answer."""
        if len(offer.token) != _TOKEN_BYTES:
            raise TransportError("the offer is not one of ucx")
        endpoint = await self._reach(offer.address)
        link = UcxReceiveLink(self, endpoint, _base(offer.token), is_source=False)
        await self._greet(link, link._send(_HELLO, offer.token, "at its hello"))
        await self._greet(link, link._receive(_WELCOME, bytearray(_TOKEN_BYTES), "at its welcome"))
        link._open()
        return link

    async def _reach(self, address: bytes) -> Any:
        ucxx = load_ucxx()
        address = _unseal(address)
        with errors("before it was reached"):
            return await ucxx.create_endpoint_from_worker_address(
                ucxx.get_ucx_address_from_buffer(address), True
            )

    @staticmethod
    async def _greet(link: _Link, request: Coroutine[Any, Any, None]) -> None:
        task = link._start(request)
        try:
            await asyncio.wait({task})
            task.result()
        except BaseException:
            await link.abort()
            raise

    async def close(self) -> None:
        """See `Transport.close`."""
        self._offers.clear()
        async with asyncio.TaskGroup() as group:
            for link in self._links:
                group.create_task(link.abort())
        if self._address:
            self._address = b""
            await worker.leave()


def _seal(address: bytes) -> bytes:
    """A worker address behind its checksum: UCX ends the process when it is given anything else.
    That the address is a friend's is the control session's affair."""
    return xxhash.xxh64_digest(address) + address


def _unseal(sealed: bytes) -> bytes:
    if xxhash.xxh64_digest(sealed[_SEAL_BYTES:]) != sealed[:_SEAL_BYTES]:
        raise TransportError("the peer's address is not one of ucx")
    return sealed[_SEAL_BYTES:]


def _base(token: bytes) -> int:
    return int.from_bytes(token, "little")
