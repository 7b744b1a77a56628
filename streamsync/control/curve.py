"""CURVE on pyzmq sockets, with keys derived from the job's shared secret.

Every member derives the same key pair, so knowing the secret is what admits: a client without it
has not the server's public key (its handshake can't be decrypted) and, were that key to leak, its
own public key is refused by the ZAP check. Nothing but the handshake travels unencrypted.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import zmq
import zmq.asyncio
from zmq.utils import z85

from streamsync.control.wire import Wire
from streamsync.errors import ConfigError

MIN_SECRET_BYTES = 8
_MAX_SOCKETS = 1 << 15
"""A session takes three, so ZeroMQ's default, 1023, would end at 341 sessions."""

_HANDSHAKE_MILLISECONDS = 300_000
"""Whoever waits gives up by a deadline of its own. ZeroMQ would begin anew after 30 s, and where a
slow hub has thousands in its queue, each that does makes it slower still."""


_CONNECT_MILLISECONDS = 3000
"""A connection that a full queue swallowed is tried again after this; the kernel would double its
pauses, up to a minute."""


class JobKeys(NamedTuple):
    """A CURVE key pair, z85 text."""

    public: bytes
    secret: bytes


def job_keys(secret: str) -> JobKeys:
    """The job's key pair from its shared secret; raises `ConfigError` for one that is too short."""
    if len(secret.encode()) < MIN_SECRET_BYTES:
        raise ConfigError(f"the job secret must have at least {MIN_SECRET_BYTES} bytes")
    seed = hashlib.blake2b(secret.encode(), digest_size=32, person=b"streamsync-curve").digest()
    key = z85.encode(seed)
    return JobKeys(zmq.curve_public(key), key)


class Curve:
    """One ZeroMQ context whose sockets speak CURVE with the job's keys. Loop thread only.

    A peer that answers no heartbeat for `silent_seconds` is disconnected. ZeroMQ's own thread
    answers them, so a process that holds the GIL for long is not silent; a stopped one is.
    """

    def __init__(self, secret: str, silent_seconds: float = 60.0) -> None:
        self._silent_seconds = silent_seconds
        self._keys = job_keys(secret)
        self.context = zmq.asyncio.Context()
        self.context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._door: zmq.Socket[bytes] | None = None
        self._guard: Wire | None = None

    def start(self) -> None:
        """Begins to check clients' keys; call inside the running loop."""
        door: zmq.Socket[bytes] = zmq.Context.shadow(self.context).socket(zmq.REP)
        door.linger = 0
        door.bind("inproc://zeromq.zap.01")
        self._door = door
        wire = self._guard = Wire(door)
        wire.start(lambda frames: wire.send(_admission(frames, self._keys.public)))

    def server(self, kind: int, endpoint: str) -> zmq.asyncio.Socket:
        """A socket for `endpoint` that admits only members; not bound yet."""
        socket = self._socket(kind, endpoint)
        socket.curve_server = True
        return socket

    def client(self, kind: int, endpoint: str) -> zmq.asyncio.Socket:
        """A socket for `endpoint` that talks only to members; not connected yet."""
        socket = self._socket(kind, endpoint)
        socket.curve_serverkey = self._keys.public
        return socket

    def _socket(self, kind: int, endpoint: str) -> zmq.asyncio.Socket:
        socket = self.context.socket(kind)
        socket.curve_publickey, socket.curve_secretkey = self._keys
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0
        socket.ipv6 = "[" in endpoint  # else an IPv4 listener would show an address mapped to IPv6
        milliseconds = int(self._silent_seconds * 1000)
        socket.heartbeat_ivl = max(1, min(5000, milliseconds // 3))
        socket.heartbeat_timeout = milliseconds
        socket.reconnect_ivl, socket.reconnect_ivl_max = 50, 1000
        socket.handshake_ivl = _HANDSHAKE_MILLISECONDS
        socket.connect_timeout = _CONNECT_MILLISECONDS
        return socket

    def close(self) -> None:
        """Ends the context; every socket must be closed before."""
        if self._guard is not None and self._door is not None:
            self._guard.stop()
            self._door.close()
        self.context.destroy(linger=0)


def _admission(question: list[bytes], public: bytes) -> list[bytes]:
    """The answer to ZAP's question (rfc.zeromq.org/spec/27) whether a client may in: only with the
    job's public key."""
    match question:
        case [b"1.0", request, _domain, _address, _identity, b"CURVE", key] if key == z85.decode(
            public
        ):
            return [b"1.0", request, b"200", b"OK", b"member", b""]
        case [_, request, *_]:
            return [b"1.0", request, b"400", b"not a member's key", b"", b""]
    return [b"1.0", b"", b"400", b"malformed", b"", b""]
