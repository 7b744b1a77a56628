"""One side of the roof and of the bare transport, in the process and threads of the sync's side."""

from __future__ import annotations

import mmap
import os
import socket
from typing import TYPE_CHECKING, NamedTuple

import torch

from streamsync.bench.bare import copy_memory, receive_bytes, send_bytes
from streamsync.bench.moves import MappedMove, Move, TcpMove, UcxMove
from streamsync.bench.roof import BUFFERS, Block, copy, flow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Self

    from streamsync.config import TransportName
    from streamsync.runtime.loop import LoopThread


class Ends(NamedTuple):
    """What joins the two sides: a socket for messages, one of each kind for the roof, and the
    descriptor of the memory that the buffers may share. Passed on when the sink starts."""

    line: socket.socket
    unix: socket.socket
    tcp: socket.socket
    memory: int

    @classmethod
    def make(cls, buffer_bytes: int) -> tuple[Self, Self]:
        """The source's and the sink's."""
        memory = os.memfd_create("streamsync-roof", os.MFD_CLOEXEC)
        os.ftruncate(memory, BUFFERS * buffer_bytes)
        with socket.create_server(("127.0.0.1", 0)) as server:
            dialed = socket.create_connection(server.getsockname())
            accepted, _ = server.accept()
        for end in (dialed, accepted):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        (line, sinks_line), (unix, sinks_unix) = socket.socketpair(), socket.socketpair()
        return cls(line, unix, accepted, memory), cls(
            sinks_line, sinks_unix, dialed, os.dup(memory)
        )

    @classmethod
    def of(cls, descriptors: Iterable[int]) -> Self:
        """Those that `descriptors` passed to a new process."""
        line, unix, tcp, memory = descriptors
        return cls(socket.socket(fileno=line), socket.socket(fileno=unix),
                   socket.socket(fileno=tcp), memory)  # fmt: skip

    def descriptors(self) -> tuple[int, ...]:
        """All of them, for `of`."""
        return (self.line.fileno(), self.unix.fileno(), self.tcp.fileno(), self.memory)

    def close(self) -> None:
        """Closes all."""
        for end in (self.line, self.unix, self.tcp):
            end.close()
        os.close(self.memory)


class Side:
    """Ready to run passes, until `close`. `roof` and `bare` block and end when this side did."""

    def __init__(
        self,
        blocks: list[Block],
        ends: Ends,
        thread: LoopThread,
        transport: TransportName,
        *,
        is_source: bool,
        digest: bool,
    ) -> None:
        self._blocks = blocks
        self._ends = ends
        self._thread = thread
        self._transport = transport
        self._is_source = is_source
        self._digest = digest
        size = max(block.nbytes for block in blocks)
        size = -(-size // 8) * 8
        if transport in ("memory", "shm"):
            shared = mmap.mmap(ends.memory, BUFFERS * size)
            memory = torch.frombuffer(shared, dtype=torch.uint8)
        else:
            memory = torch.zeros(BUFFERS * size, dtype=torch.uint8)
        self._buffers = list(torch.split(memory, size))
        self._frames = [
            self._buffers[k % BUFFERS][: block.nbytes].numpy().data
            for k, block in enumerate(blocks)
        ]
        self._move = self._thread.call(self._open())

    async def _open(self) -> Move:
        ends, is_source = self._ends, self._is_source
        for end in (ends.unix, ends.tcp):
            end.setblocking(False)
        match self._transport:
            case "tcp":
                return TcpMove(ends.tcp, self._frames, is_source=is_source)
            case "ucx":
                return await UcxMove.open(ends.unix, self._frames, is_source=is_source)
            case _:
                return MappedMove(ends.unix, is_source=is_source)

    def roof(self) -> None:
        """One pass of the roof."""
        self._flow(self._copy)

    def bare(self) -> None:
        """One pass of the transport alone."""
        nbytes = sum(block.nbytes for block in self._blocks)
        if self._transport == "tcp":
            block = self._buffers[0].numpy().data
            self._ends.tcp.setblocking(True)
            (send_bytes if self._is_source else receive_bytes)(self._ends.tcp, nbytes, block)
            self._ends.tcp.setblocking(False)
        elif self._transport == "ucx":
            self._flow(lambda _: None)
        elif self._is_source:
            copy_memory(nbytes)

    def close(self) -> None:
        """Call it before the process's side of the sync closes."""
        self._thread.call(self._move.close())

    def _copy(self, k: int) -> None:
        copy(self._blocks[k], self._buffers[k % BUFFERS], out=self._is_source, digest=self._digest)

    def _flow(self, work: Callable[[int], None]) -> None:
        self._thread.call(flow(len(self._blocks), work, self._move, self._thread.executor))


def make_blocks(
    tensors: Iterable[torch.Tensor], bucket_bytes: int, dtype: torch.dtype
) -> list[Block]:
    """Cuts and packs `tensors` into blocks of at most `bucket_bytes` in `dtype`."""
    blocks: list[Block] = []
    most = max(1, bucket_bytes // dtype.itemsize)
    room = 0
    for tensor in tensors:
        for part in torch.split(tensor.detach().view(-1), most):
            if part.numel() > room:
                blocks.append(Block([], [], dtype, 0))
                room = most
            block = blocks[-1]
            block.live.append(part)
            block.numels.append(part.numel())
            blocks[-1] = block._replace(nbytes=block.nbytes + part.numel() * dtype.itemsize)
            room -= part.numel()
    return blocks
