"""The barest way to move a block with each transport: what the roof is built on.

A move has one object a side. `before(k)` comes before the side's work on block `k`, `after(k)`
after it; block `k` is in `frames[k]`, a slice of one of the buffers.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from streamsync.bench.roof import BUFFERS

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from streamsync.config import TransportName

ROOFS: dict[TransportName, str] = {
    "memory": "buffers that both sides map, a byte over a unix socket for each full or free one",
    "shm": "buffers that both sides map, a byte over a unix socket for each full or free one",
    "tcp": "sock_sendall and sock_recv_into of uvloop on one connection",
    "ucx": "one tagged send and receive of ucxx a block, on one endpoint",
}
"""What moves a block in the roof."""


class Move(Protocol):
    """One side of a move."""

    async def before(self, k: int) -> None:
        """A source's buffer is free, a sink's is full, when this returns."""

    async def after(self, k: int) -> None:
        """A source's buffer has left, a sink's may be filled again, when this returns."""

    async def close(self) -> None:
        """Gives back what `Ends` does not own."""


class MappedMove:
    """`memory`, `shm`: a byte comes before each block (free or full) and one goes after it."""

    def __init__(self, end: socket.socket, *, is_source: bool) -> None:
        self._end = end
        if not is_source:
            end.send(b"\0" * BUFFERS)  # all are free at first

    async def before(self, k: int) -> None:
        """See `Move`."""
        await asyncio.get_running_loop().sock_recv(self._end, 1)

    async def after(self, k: int) -> None:
        """See `Move`."""
        await asyncio.get_running_loop().sock_sendall(self._end, b"\0")

    async def close(self) -> None:
        """See `Move`."""


class TcpMove:
    """`tcp`: the source sends after its work, the sink receives before its own."""

    def __init__(
        self, end: socket.socket, frames: Sequence[memoryview], *, is_source: bool
    ) -> None:
        self._end = end
        self._frames = frames
        self._is_source = is_source

    async def before(self, k: int) -> None:
        """See `Move`."""
        loop, frame, at = asyncio.get_running_loop(), self._frames[k], 0
        while not self._is_source and at < len(frame):
            count = await loop.sock_recv_into(self._end, frame[at:])
            if not count:
                raise ConnectionResetError("the other side of the roof is gone")
            at += count

    async def after(self, k: int) -> None:
        """See `Move`."""
        if self._is_source:
            await asyncio.get_running_loop().sock_sendall(self._end, self._frames[k])

    async def close(self) -> None:
        """See `Move`."""


class UcxMove:
    """`ucx`: as `tcp`, with one tagged message a block. Uses the process's UCXX worker."""

    _FIRST_TAG = 0x726F6F66 << 32

    def __init__(self, endpoint: Any, frames: Sequence[memoryview], *, is_source: bool) -> None:
        self._endpoint = endpoint
        self._frames = frames
        self._is_source = is_source

    @classmethod
    async def open(
        cls, end: socket.socket, frames: Sequence[memoryview], *, is_source: bool
    ) -> UcxMove:
        """Exchanges worker addresses over `end`; UCXX is running already."""
        import ucxx

        loop = asyncio.get_running_loop()
        await loop.sock_sendall(end, bytes(ucxx.get_worker_address().tobytes()))
        address = ucxx.get_ucx_address_from_buffer(await loop.sock_recv(end, 1 << 16))
        endpoint = await ucxx.create_endpoint_from_worker_address(address, True)
        return cls(endpoint, frames, is_source=is_source)

    async def before(self, k: int) -> None:
        """See `Move`."""
        if not self._is_source:
            await self._endpoint.recv(self._frames[k], tag=self._FIRST_TAG + k, force_tag=True)

    async def after(self, k: int) -> None:
        """See `Move`."""
        if self._is_source:
            await self._endpoint.send(self._frames[k], tag=self._FIRST_TAG + k, force_tag=True)

    async def close(self) -> None:
        """See `Move`."""
        await asyncio.to_thread(self._endpoint.abort)
        self._endpoint = None  # UCXX counts who refers to it
