"""The roof: the barest program that does a sync's job, run by the very threads that do the sync.

One copy out of the source's tensors, the transport's barest move (see `moves`), one copy into the
sink's, one read of the bytes per side when digests are on; BUFFERS blocks at once, overlapping.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from streamsync.bench.moves import Move

BUFFERS = 4


class Block(NamedTuple):
    """Flat live tensors that lie one after the other in a buffer, in `dtype`, `nbytes` in all."""

    live: list[torch.Tensor]
    numels: list[int]
    dtype: torch.dtype
    nbytes: int


def copy(block: Block, buffer: torch.Tensor, *, out: bool, digest: bool) -> None:
    """Copies the block `out` of its tensors or into them, and reads the bytes once."""
    parts = torch.split(buffer[: block.nbytes].view(block.dtype), block.numels)
    torch._foreach_copy_(*((parts, block.live) if out else (block.live, parts)))
    if digest:
        np.add.reduce(buffer[: block.nbytes // 8 * 8].numpy().view(np.uint64))


async def flow(num: int, work: Callable[[int], object], move: Move, executor: Executor) -> None:
    """For each of `num` blocks: `move.before` it, `work` in a thread, `move.after` it."""
    free, begun = asyncio.Semaphore(BUFFERS), asyncio.Queue[asyncio.Future[object]]()

    async def begin() -> None:
        for k in range(num):
            await free.acquire()
            await move.before(k)
            begun.put_nowait(asyncio.get_running_loop().run_in_executor(executor, work, k))

    async def end() -> None:
        for k in range(num):
            await (await begun.get())
            await move.after(k)
            free.release()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(begin())
        tasks.create_task(end())
