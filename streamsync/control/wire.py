"""Frames of a ZeroMQ socket in an event loop, for sockets that hear thousands of peers.

`zmq.asyncio` makes futures and looks its flags up as enums for every message, at several times the
cost of the message itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
_TURN = 64
"""Messages after which other tasks of the loop run."""


class Wire:
    """Reads and writes a blocking socket without ever blocking. Loop thread only."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._descriptor = int(socket.get(zmq.FD))
        self._handle: Callable[[list[bytes]], None] | None = None
        self._turn: asyncio.Handle | None = None

    def send(self, frames: Sequence[bytes], *, copy: bool = True) -> None:
        """Queues a message; raises `zmq.ZMQError`. With `copy` false a large last frame is kept
        instead of copied."""
        *head, last = frames
        for frame in head:
            self._socket.send(frame, _NOBLOCK_MORE)
        self._socket.send(last, _NOBLOCK, copy=copy)
        self._read_soon()  # sending may swallow the descriptor's word that there is something

    def start(self, handle: Callable[[list[bytes]], None]) -> None:
        """Calls `handle` with every message from now on; it must not raise."""
        self._handle = handle
        # It tells of changes, not of what is there.
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)
        self._read_soon()

    def stop(self) -> None:
        """Calls `handle` no more; before the socket is closed."""
        if self._handle is not None:
            self._handle = None
            asyncio.get_running_loop().remove_reader(self._descriptor)

    async def run(self, handle: Callable[[list[bytes]], None]) -> None:
        """Calls `handle` with every message until cancelled; raises what it raises."""
        failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def guarded(frames: list[bytes]) -> None:
            try:
                handle(frames)
            except Exception as error:
                if not failure.done():
                    failure.set_exception(error)

        self.start(guarded)
        try:
            await failure
        finally:
            self.stop()

    def _read_soon(self) -> None:
        if self._handle is not None and self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._read)

    def _read(self) -> None:
        self._turn = None
        for _ in range(_TURN):
            if self._handle is None:
                return
            try:
                frame = self._socket.recv(_NOBLOCK, copy=False)
            except zmq.Again:
                return
            frames = [frame.bytes]
            while frame.more:
                frame = self._socket.recv(_NOBLOCK, copy=False)
                frames.append(frame.bytes)
            self._handle(frames)
        self._read_soon()
