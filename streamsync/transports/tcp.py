"""`tcp`: plain sockets between any two hosts; the kernel copies straight into and out of leases.

A frame is its 64 header bytes and its payload, nothing around them; the header's length field tells
a frame of an unexpected size. The stream is not encrypted; see `admission` for who gets in.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time
from typing import TYPE_CHECKING, ClassVar

import msgspec

from streamsync.errors import ConfigError, IntegrityError, PeerLost, TransportError
from streamsync.runtime.header import payload_bytes
from streamsync.runtime.pool import HEADER_BYTES, Lease, Pool
from streamsync.transports.admission import TOKEN_SECONDS, Door
from streamsync.transports.base import Offer, ReceiveLink, SendLink, Transport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

_WELCOME = b"\x01"  # what a source says to a sink that it let in
_BACKLOG = 128
_SEND_BUFFER_BYTES = 4 << 20
# The receive buffer is left to the kernel: setting it ends its tuning, which goes higher.


class _Link:
    """One connection, on which one operation runs at a time."""

    def __init__(self, transport: TcpTransport, connection: socket.socket) -> None:
        self._transport = transport
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._broken = ""
        self._idle = asyncio.Event()
        self._idle.set()
        transport._links.add(self)

    @contextlib.asynccontextmanager
    async def _operation(self, progress: list[int], nbytes: int) -> AsyncIterator[None]:
        """Maps the socket's errors; whatever ends the operation early breaks the link for good,
        since the stream stands in the middle of a frame."""
        if self._broken:
            raise PeerLost(self._broken)
        assert self._idle.is_set(), "one operation at a time"
        self._idle.clear()
        try:
            yield
        except OSError as error:
            self._broken = self._broken or f"the connection broke: {error.strerror or error}"
            raise PeerLost(
                f"{self._broken}, {progress[0]} of {nbytes} bytes of the frame through"
            ) from error
        except BaseException:
            self._broken = self._broken or "an earlier frame was left half way"
            raise
        finally:
            self._idle.set()

    async def abort(self) -> None:
        """Closes the connection once a running operation has let go of its lease."""
        if self not in self._transport._links:
            return
        self._transport._links.remove(self)
        self._broken = self._broken or "this end aborted the link"
        with contextlib.suppress(OSError):  # wakes a running operation
            self._socket.shutdown(socket.SHUT_RDWR)
        await self._idle.wait()
        self._socket.close()


class TcpSendLink(_Link, SendLink):
    """The source's end; see `SendLink`. A lease is free as soon as `send` returns."""

    async def send(self, lease: Lease) -> None:
        """Returns when the kernel has the whole frame."""
        frame = lease.frame
        await asyncio.sleep(0)  # a kernel that takes all at once would never let the loop run
        async with self._operation([0], len(frame)):
            await self._loop.sock_sendall(self._socket, frame)
        self.wire_bytes += lease.nbytes

    async def flush(self) -> None:
        """Frames are the kernel's when `send` returns; looks whether the sink is still there."""
        async with self._operation([0], 0):
            try:
                gone = self._socket.recv(1, socket.MSG_PEEK) == b""
            except BlockingIOError:
                return
            if gone:
                raise ConnectionResetError(errno.ECONNRESET, "the sink closed it")


class TcpReceiveLink(_Link, ReceiveLink):
    """The sink's end; see `ReceiveLink`."""

    async def receive(self, lease: Lease | None, nbytes: int) -> Lease:
        """See `ReceiveLink.receive`."""
        assert lease is not None, "tcp receives into the sink's own leases"
        frame = lease.frame[: HEADER_BYTES + nbytes]
        assert len(frame) == HEADER_BYTES + nbytes, "the lease is smaller than the frame"
        await asyncio.sleep(0)  # see send
        started = time.monotonic()
        progress, checked = [0], False
        async with self._operation(progress, len(frame)):
            while progress[0] < len(frame):
                count = await self._loop.sock_recv_into(self._socket, frame[progress[0] :])
                if progress[0] == 0:
                    self.waiting_seconds += time.monotonic() - started
                if count == 0:
                    raise ConnectionResetError(errno.ECONNRESET, "the source closed it")
                progress[0] += count
                if not checked and progress[0] >= HEADER_BYTES:
                    checked = True
                    if payload_bytes(frame) != nbytes:
                        raise IntegrityError(
                            f"a frame of {payload_bytes(frame)} bytes came where {nbytes} were "
                            "planned"
                        )
        self.wire_bytes += nbytes
        return lease


class TcpTransport(Transport):
    """Listens on `host` (a literal or a name) and `port` (0: any free one)."""

    name: ClassVar[str] = "tcp"

    def __init__(self, host: str, port: int = 0, *, token_seconds: float = TOKEN_SECONDS) -> None:
        self._host = host.removeprefix("[").removesuffix("]")
        self._port = port
        self._token_seconds = token_seconds
        self._door: Door | None = None
        self._address = b""
        self._links: set[_Link] = set()

    async def start(self) -> None:
        """Binds the listener; raises `ConfigError` naming host and port.

        The port is bound at once, never probed first, so that nobody can take it in between.
        """
        listener = await self._listen()
        self._door = Door(listener, token_seconds=self._token_seconds)
        self._address = msgspec.msgpack.encode((self._host, listener.getsockname()[1]))

    async def _listen(self) -> socket.socket:
        where = f"{self._host}:{self._port}"
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        except OSError as error:
            raise ConfigError(f"can't listen on {where}: {error}; check `host`") from error
        if any(address[0] in ("0.0.0.0", "::") for *_, address in found):
            raise ConfigError(
                f"host={self._host} means every interface; name the one that peers should reach"
            )
        failure: OSError | None = None
        for family, kind, protocol, _, address in found:
            listener = socket.socket(family, kind, protocol)
            try:
                listener.setblocking(False)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen(_BACKLOG)
            except OSError as error:
                listener.close()
                failure = error
            else:
                return listener
        reason = failure.strerror if failure is not None else "it resolves to nothing"
        raise ConfigError(
            f"can't listen on {where}: {reason}; free it or choose another"
        ) from failure

    def address(self) -> bytes:
        """Empty: the sink connects, not the source."""
        return b""

    def offer(self, pool: Pool) -> Offer:
        """See `Transport.offer`."""
        assert self._door is not None, "start first"
        return Offer(self._address, self._door.expect())

    async def accept(self, offer: Offer, sink_address: bytes) -> SendLink:
        """See `Transport.accept`."""
        assert self._door is not None, "start first"
        connection = await self._door.admitted(offer.token)
        link = TcpSendLink(self, connection)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            await link._loop.sock_sendall(connection, _WELCOME)
        except OSError as error:
            await link.abort()
            raise PeerLost(f"the sink left while it connected: {error}") from error
        except BaseException:
            await link.abort()
            raise
        return link

    async def connect(self, offer: Offer) -> ReceiveLink:
        """See `Transport.connect`; tries every address of the source's name."""
        loop = asyncio.get_running_loop()
        try:
            host, port = msgspec.msgpack.decode(offer.address, type=tuple[str, int])
        except msgspec.DecodeError as error:
            raise TransportError(f"the offer's address is not one of tcp: {error}") from error
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            connection = await _reach(found)
        except OSError as error:
            raise TransportError(f"can't reach the source at {host}:{port}: {error}") from error
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_sendall(connection, offer.token)
            welcome = await loop.sock_recv(connection, 1)
        except OSError as error:
            connection.close()
            raise TransportError(f"the source at {host}:{port} hung up: {error}") from error
        except BaseException:
            connection.close()
            raise
        if welcome != _WELCOME:
            connection.close()
            raise TransportError(f"the source at {host}:{port} refused this offer's token")
        return TcpReceiveLink(self, connection)

    async def close(self) -> None:
        """See `Transport.close`."""
        if self._door is not None:
            self._door.close()
        async with asyncio.TaskGroup() as group:
            for link in self._links:
                group.create_task(link.abort())


async def _reach(
    found: Sequence[tuple[int, int, int, str, tuple[object, ...]]],
) -> socket.socket:
    """Connects to the first address that answers; raises the last `OSError`."""
    failure: OSError = OSError(errno.EADDRNOTAVAIL, "its name resolves to nothing")
    for family, kind, protocol, _, address in found:
        connection = socket.socket(family, kind, protocol)
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, address)
        except OSError as error:
            connection.close()
            failure = error
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise failure
