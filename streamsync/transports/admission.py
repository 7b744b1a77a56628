"""The door of a listening socket: a connection gets in only by a one-use token.

A token is 32 random bytes that reached the sink over the authenticated control session; it is the
first thing a connection says. Everything runs in callbacks of the loop, so no task is left behind.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from typing import TYPE_CHECKING

from streamsync.errors import TransportError

if TYPE_CHECKING:
    import socket

_log = logging.getLogger("streamsync.transports")

TOKEN_BYTES = 32
TOKEN_SECONDS = 1.0
"""How long a connection may take to present its token. It is sent with the connect, so a loaded
host needs milliseconds."""
MAX_STRANGERS = 64
"""Connections that may be waiting for their token's check at one time; more are closed at once."""


class Door:
    """Owns `listener` (non-blocking) and admits its connections. On the loop's thread."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        token_seconds: float = TOKEN_SECONDS,
        max_strangers: int = MAX_STRANGERS,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._token_seconds = token_seconds
        self._max_strangers = max_strangers
        self._expected: dict[bytes, asyncio.Future[socket.socket]] = {}
        self._strangers: dict[socket.socket, tuple[bytearray, asyncio.TimerHandle]] = {}
        self._loop.add_reader(listener, self._arrived)

    def expect(self) -> bytes:
        """A new token, good for one connection."""
        token = secrets.token_bytes(TOKEN_BYTES)
        self._expected[token] = self._loop.create_future()
        return token

    async def admitted(self, token: bytes) -> socket.socket:
        """The connection that presented `token`, now the caller's. Cancelling withdraws the token.

        Raises `TransportError` for a token that was never expected or is used up.
        """
        future = self._expected.get(token)
        if future is None:
            raise TransportError("this offer was withdrawn or never made here")
        try:
            connection = await future
        except asyncio.CancelledError:
            self.withdraw(token)
            raise
        del self._expected[token]
        return connection

    def withdraw(self, token: bytes) -> None:
        """Forgets `token`; a connection already admitted by it is closed."""
        future = self._expected.pop(token, None)
        if future is None:
            return
        if future.done() and not future.cancelled():
            future.result().close()
        else:
            future.cancel()

    def close(self) -> None:
        """Closes the listener, withdraws all tokens and turns away who waits at the door.
        Idempotent."""
        if self._listener.fileno() < 0:
            return
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for connection in list(self._strangers):
            self._turn_away(connection, "")
        for token in list(self._expected):
            self.withdraw(token)

    def _arrived(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # gone before we looked, or out of descriptors: the loop goes on
            _log.debug("accept failed: %s", error)
            return
        connection.setblocking(False)
        if len(self._strangers) >= self._max_strangers:
            connection.close()
            _log.warning("refused a connection: %d others show no token", len(self._strangers))
            return
        timer = self._loop.call_later(
            self._token_seconds, self._turn_away, connection, "it showed no token in time"
        )
        self._strangers[connection] = (bytearray(), timer)
        self._loop.add_reader(connection, self._heard, connection)

    def _heard(self, connection: socket.socket) -> None:
        shown, _ = self._strangers[connection]
        try:
            part = connection.recv(TOKEN_BYTES - len(shown))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            part = b""
        shown += part
        if not part:
            self._turn_away(connection, "it closed before its token was whole")
        elif len(shown) == TOKEN_BYTES:
            self._judge(connection, bytes(shown))

    def _judge(self, connection: socket.socket, shown: bytes) -> None:
        # Every token is compared, each in constant time, so that timing tells nothing.
        matches = [token for token in self._expected if hmac.compare_digest(token, shown)]
        if not matches or self._expected[matches[0]].done():
            self._turn_away(connection, "its token is unknown or used")
            return
        self._forget(connection)
        self._expected[matches[0]].set_result(connection)

    def _turn_away(self, connection: socket.socket, why: str) -> None:
        self._forget(connection)
        connection.close()
        if why:
            _log.warning("refused a connection: %s", why)

    def _forget(self, connection: socket.socket) -> None:
        _, timer = self._strangers.pop(connection)
        timer.cancel()
        self._loop.remove_reader(connection)
