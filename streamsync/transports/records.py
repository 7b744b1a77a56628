"""Small records of one fixed size each way over a stream socket, by callbacks of the loop."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    import struct
    from collections.abc import Callable

_READ_BYTES = 64 << 10


class RecordSocket:
    """Owns `connection` (non-blocking). Keeps the order both ways and never blocks or waits.

    `on_record` gets the fields of each record that arrives, `on_end` once why no more will come;
    both run on the loop's thread, none after `close`. Records posted after the peer went are
    dropped: `on_end` has told or will tell.
    """

    def __init__(
        self,
        connection: socket.socket,
        incoming: struct.Struct,
        on_record: Callable[..., None],
        on_end: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = connection
        self._incoming = incoming
        self._on_record = on_record
        self._on_end = on_end
        self._received = bytearray()
        self._unsent = bytearray()
        self._sent = asyncio.Event()
        self._sent.set()
        self._ended = False
        self._closed = False
        self._loop.add_reader(connection, self._read)

    def post(self, records: bytes) -> None:
        """Sends as much as the kernel takes now, the rest as it takes more."""
        if self._ended or self._closed:
            return
        waiting = bool(self._unsent)
        self._unsent += records
        if not waiting:
            self._write()

    async def drain(self) -> None:
        """Returns when the kernel has everything posted so far, or the peer is gone."""
        await self._sent.wait()

    def close(self) -> None:
        """Closes the socket, after one more try to send what is unsent. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        if self._unsent:
            with contextlib.suppress(OSError):
                self._socket.send(self._unsent)
        self._sent.set()
        self._socket.close()

    def _write(self) -> None:
        try:
            count = self._socket.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            count = 0
        except OSError as error:
            self._end(str(error))
            return
        del self._unsent[:count]
        if self._unsent:
            self._sent.clear()
            self._loop.add_writer(self._socket, self._write)
        else:
            self._loop.remove_writer(self._socket)
            self._sent.set()

    def _read(self) -> None:
        try:
            part = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(str(error))
            return
        if not part:
            self._end("it closed the connection")
            return
        self._received += part
        self._tell()

    def _end(self, why: str) -> None:
        """After a failed write the peer's last records may still be there to read."""
        if self._ended:
            return
        self._ended = True
        self._loop.remove_writer(self._socket)
        self._unsent.clear()
        self._sent.set()
        self._loop.remove_reader(self._socket)
        with contextlib.suppress(OSError):
            while part := self._socket.recv(_READ_BYTES):
                self._received += part
        self._tell()
        self._on_end(why)

    def _tell(self) -> None:
        whole = len(self._received) - len(self._received) % self._incoming.size
        records = bytes(self._received[:whole])
        del self._received[:whole]
        for fields in self._incoming.iter_unpack(records):
            if self._closed:
                return
            self._on_record(*fields)
