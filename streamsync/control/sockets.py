"""The two ends of a control session: a `Listener` that members dial, a `Dialer` that dials one.

Both run inside the owner's TaskGroup (`run`), decode every message at one place, and pair answers
with requests. Loop thread only.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket as sockets
from typing import TYPE_CHECKING, TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from streamsync.control.messages import (
    AnyMessage,
    Error,
    Message,
    Ping,
    Sources,
    decode,
    encode,
)
from streamsync.control.wire import Wire
from streamsync.errors import (
    ConfigError,
    ControlError,
    PeerLost,
    PlanError,
    StreamsyncError,
    TransportError,
    VersionError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamsync.control.curve import Curve

_log = logging.getLogger("streamsync.control")

M = TypeVar("M", bound=Message)

_LAST_WORDS_MILLISECONDS = 200
_PING_SECONDS = 2.0
_PINGS_PER_SECOND = 500
"""A hub of thousands pings less often, or it would do little else while they join."""
_BACKLOG = 4096
"""Dialers that come at once: with ZeroMQ's 100, thousands would wait for each other's repeats."""

_ERRORS: dict[str, type[StreamsyncError]] = {
    "config": ConfigError,
    "plan": PlanError,
    "control": ControlError,
    "version": VersionError,
    "transport": TransportError,
}


def error_message(error: StreamsyncError, request: int) -> Error:
    """How `error` travels as the answer to `request`."""
    for kind, cls in _ERRORS.items():
        if isinstance(error, cls):
            return Error(request=request, kind=kind, text=str(error))  # type: ignore[arg-type]
    return Error(request=request, kind="control", text=str(error))


def _sent(result: object) -> BaseException | None:
    """The error of a non-blocking send: zmq.asyncio's are done when they return."""
    assert isinstance(result, asyncio.Future)
    return result.exception()


def _assemble(frames: list[bytes]) -> AnyMessage:
    """The message that came in these frames; raises `ControlError`."""
    message = decode(frames[0]) if len(frames) <= 2 else None
    if len(frames) == 2 and isinstance(message, Sources):
        return msgspec.structs.replace(message, found=frames[1])
    if message is None or len(frames) != 1:
        raise ControlError(f"control message of {len(frames)} frames")
    return message


def resolve_endpoint(host: str, port: int) -> str:
    """The ZeroMQ endpoint of a host name, IPv4 or IPv6 literal; raises `ConfigError`."""
    try:
        family, _, _, _, address = sockets.getaddrinfo(host, port, type=sockets.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"host {host!r} can't be resolved: {error}") from error
    literal = f"[{address[0]}]" if family == sockets.AF_INET6 else str(address[0])
    return f"tcp://{literal}:{port or '*'}"


def _family(endpoint: str) -> int:
    return sockets.AF_INET6 if "[" in endpoint else sockets.AF_INET


class Listener:
    """A bound socket. `handle(peer, message)` is called for each message in order and must not
    block; a `StreamsyncError` that it raises is sent back as `Error`. `peer` is the dialer's id.

    ZeroMQ lets one dialer in each time that it has looked at all connections; with `num_doors` it
    is as many, which a hub of thousands needs.
    """

    def __init__(
        self,
        curve: Curve,
        host: str,
        port: int,
        handle: Callable[[bytes, AnyMessage], None],
        lost: Callable[[bytes, str], None],
        *,
        num_doors: int = 1,
    ) -> None:
        endpoint = resolve_endpoint(host, port)
        self._socket: zmq.Socket[bytes] = zmq.Socket.shadow(curve.server(zmq.ROUTER, endpoint))
        self._socket.router_mandatory = True
        self._socket.router_handover = True
        self._wire = Wire(self._socket)
        self._handle = handle
        self._lost = lost
        self._known: set[bytes] = set()
        try:
            with sockets.create_server(
                (host, port), family=_family(endpoint), backlog=_BACKLOG
            ) as s:
                s.setblocking(False)
                for _ in range(num_doors):
                    self._socket.setsockopt(zmq.USE_FD, os.dup(s.fileno()))
                    self._socket.bind(endpoint)
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"can't listen on {host}:{port}: {error}") from error
        self.endpoint = bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")

    def send(self, peer: bytes, message: Message, found: bytes = b"") -> None:
        """Queues a message (queues have no limit, so this never waits). A peer that is gone is
        reported to `lost`. `found` goes along with `Sources`, uncopied."""
        frames = [peer, encode(message), found] if found else [peer, encode(message)]
        try:
            self._wire.send(frames, copy=not found)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise ControlError(f"control message not sent: {error}") from error
            self._known.discard(peer)
            self._lost(peer, "its control session is gone")

    async def run(self) -> None:
        """Receives until cancelled, and looks after silent peers."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._wire.run(self._receive))
            tasks.create_task(self._ping())

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(max(_PING_SECONDS, len(self._known) / _PINGS_PER_SECOND))
            for peer in tuple(self._known):
                self.send(peer, Ping())

    def _receive(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            _log.warning("refused a control message of %d frames", len(frames))
            return
        peer, data = frames
        message: AnyMessage | None = None
        self._known.add(peer)
        try:
            message = decode(data)
            self._handle(peer, message)
        except StreamsyncError as error:
            _log.warning("refused a control message: %s", error)
            if message is None or not isinstance(message, Error):
                self.send(peer, error_message(error, message.request if message else 0))

    def close(self) -> None:
        """Closes the socket; what was sent still leaves, if the peers take it at once."""
        self._socket.close(linger=_LAST_WORDS_MILLISECONDS)


class Dialer:
    """A connection to one listener.

    `handle(message)` gets what is not an answer; `lost(text)` is called once when the connection
    ends (the dialer then stays dead: dial again). Both must not block.
    """

    def __init__(
        self,
        curve: Curve,
        endpoint: str,
        peer: str,
        handle: Callable[[AnyMessage], None],
        lost: Callable[[str], None],
    ) -> None:
        self.endpoint = endpoint
        self.peer = peer
        self._handle = handle
        self._lost = lost
        self._answers: dict[int, asyncio.Future[AnyMessage]] = {}
        self._requests = itertools.count(1)
        self._connected = False
        self._reached = False
        self._refused = False
        self._patient = True
        self._dead: str | None = None
        self._socket = curve.client(zmq.DEALER, endpoint)
        self._socket.identity = os.urandom(16)
        self._monitor: zmq.asyncio.Socket = self._socket.get_monitor_socket(
            zmq.EVENT_CONNECTED
            | zmq.EVENT_CONNECT_RETRIED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        self._handshake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._handshake.cancel()
            self.close()
            raise ConfigError(f"not an endpoint: {endpoint!r} ({error})", peer=peer) from error

    async def connect(self, deadline: float, *, patient: bool = True) -> None:
        """Waits for the handshake; raises `ControlError` that tells an unreachable peer from a
        refused secret. Not `patient`: nobody listening there is final at once."""
        self._patient = patient
        if self._refused and not patient:
            self.fail(self._nobody())
        try:
            async with asyncio.timeout(deadline):
                await asyncio.shield(self._handshake)
        except TimeoutError:
            if self._reached:
                raise ControlError(self._refusal(), peer=self.peer) from None
            raise ControlError(
                f"{self.endpoint} is unreachable after {deadline:g} s: is it running, and is the "
                "address right?",
                peer=self.peer,
            ) from None

    def _nobody(self) -> str:
        return f"nobody listens at {self.endpoint} any more"

    def _refusal(self) -> str:
        return (
            f"{self.endpoint} refuses the handshake: its job secret differs from ours, or it is "
            "not a streamsync member"
        )

    async def run(self) -> None:
        """Receives and watches the connection until cancelled or lost."""
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch())
            receive = tasks.create_task(self._receive())
            await asyncio.wait({watch, receive}, return_when=asyncio.FIRST_COMPLETED)
            watch.cancel()
            receive.cancel()

    async def _watch(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
                if not self._handshake.done():
                    self._handshake.set_result(None)
            elif event == zmq.EVENT_CONNECTED:
                self._reached = True
            elif event == zmq.EVENT_CONNECT_RETRIED and not self._reached:
                self._refused = True
                if not self._patient:
                    self.fail(self._nobody())
                    return
            elif event == zmq.EVENT_DISCONNECTED and self._connected:
                self.fail("its control connection closed")
                return
            elif event in (
                zmq.EVENT_HANDSHAKE_FAILED_AUTH,
                zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
            ) or (event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and not self._connected):
                self.fail(self._refusal())
                return

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                message = _assemble(frames)
                answer = self._answers.pop(message.request, None) if message.request else None
                if isinstance(message, Ping):
                    continue
                if answer is None:
                    self._handle(message)
                elif not answer.done():
                    answer.set_result(message)
            except StreamsyncError as error:
                _log.warning("refused a message of %s: %s", self.peer, error)

    def fail(self, text: str) -> None:
        """Declares the peer lost; every waiting request fails."""
        if self._dead is not None:
            return
        self._dead = text
        error = PeerLost(text, peer=self.peer)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
        self._answers.clear()
        if not self._handshake.done():
            self._handshake.set_exception(ControlError(text, peer=self.peer))
        self._lost(text)

    def send(self, message: Message) -> None:
        """Queues a message; silently dropped when the peer is lost already."""
        if self._dead is not None:
            return
        error = _sent(self._socket.send(encode(message), flags=zmq.NOBLOCK))
        if error is not None:
            raise ControlError(f"control message not sent: {error}", peer=self.peer) from error

    async def request(self, message: Message, answer: type[M], deadline: float) -> M:
        """Sends and waits for the answer; raises the peer's error, `PeerLost` or `ControlError`."""
        if self._dead is not None:
            raise PeerLost(self._dead, peer=self.peer)
        number = next(self._requests)
        future: asyncio.Future[AnyMessage] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        try:
            self.send(msgspec.structs.replace(message, request=number))
            async with asyncio.timeout(deadline):
                reply = await future
        except TimeoutError:
            raise ControlError(
                f"no answer to {type(message).__name__} within {deadline:g} s", peer=self.peer
            ) from None
        finally:
            self._answers.pop(number, None)
        if isinstance(reply, Error):
            raise _ERRORS[reply.kind](
                f"{self.peer} refused {type(message).__name__}", peer_text=reply.text
            )
        if not isinstance(reply, answer):
            raise ControlError(f"answered {type(reply).__name__}", peer=self.peer)
        return reply

    def close(self) -> None:
        """Closes the sockets; what was sent still leaves, if the peer takes it at once."""
        if self._handshake.done() and not self._handshake.cancelled():
            self._handshake.exception()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger=_LAST_WORDS_MILLISECONDS)
