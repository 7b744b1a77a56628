"""Two ends of one transport with a pool each, and frames of known bytes."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from streamsync.runtime.pool import Account, Lease, Pool
from streamsync.transports.memory import MemoryTransport
from streamsync.transports.shm import ShmTransport
from streamsync.transports.tcp import TcpTransport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from concurrent.futures import Executor

    from streamsync.transports.base import Offer, ReceiveLink, SendLink, Transport

MIB = 1 << 20
DRAIN_SECONDS = 0.3


def make(name: str, executor: Executor) -> Transport:
    if name == "memory":
        return MemoryTransport(executor, drain_seconds=DRAIN_SECONDS)
    if name == "shm":
        return ShmTransport(executor, drain_seconds=DRAIN_SECONDS)
    if name == "ucx":
        from streamsync.transports.ucx import UcxTransport

        return UcxTransport(drain_seconds=DRAIN_SECONDS)
    assert name == "tcp"
    return TcpTransport("127.0.0.1")


@dataclass
class Rig:
    source: Transport
    sink: Transport
    source_pool: Pool
    sink_pool: Pool
    source_account: Account
    sink_account: Account

    async def link(self) -> tuple[SendLink, ReceiveLink, Offer]:
        offer = self.source.offer(self.source_pool)
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            accepting = group.create_task(self.source.accept(offer, self.sink.address()))
            connecting = group.create_task(self.sink.connect(offer))
        return accepting.result(), connecting.result(), offer

    async def settled(self) -> None:
        """Waits until no lease is out at either end."""
        await until(
            lambda: not self.source_pool.num_outstanding and not self.sink_pool.num_outstanding
        )


async def until(condition: Callable[[], object], seconds: float = 20) -> None:
    """Returns once `condition` holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what changes has no event to wait for
            await asyncio.sleep(0.001)


@asynccontextmanager
async def rig(name: str, nbytes: int = 4 * MIB + 1) -> AsyncIterator[Rig]:
    """Both ends in this loop, room for four payloads of `nbytes`; checks that all came back."""
    executor = ThreadPoolExecutor(2, thread_name_prefix="streamsync-test")
    pools = [Pool(5 * (nbytes + 128), f"test-{end}") for end in ("source", "sink")]
    accounts = [pool.open_account("peer", nbytes, pool.capacity_bytes) for pool in pools]
    source, sink = make(name, executor), make(name, executor)
    await source.start()
    await sink.start()
    both = Rig(source, sink, *pools, *accounts)
    try:
        yield both
    finally:
        await sink.close()
        await source.close()
        await asyncio.to_thread(executor.shutdown)
    await both.settled()
    assert source.num_withheld == sink.num_withheld == 0
    for account, pool in zip(accounts, pools, strict=True):
        account.close()
        pool.close()


def content(nbytes: int, seed: int) -> np.ndarray:
    """A header with the right length and a payload of which no two seeds share much."""
    frame = np.random.default_rng(seed).integers(0, 256, 64 + nbytes, np.uint8)
    frame[40:48] = np.frombuffer(struct.pack("<Q", nbytes), np.uint8)
    return frame


async def filled(account: Account, nbytes: int, seed: int) -> Lease:
    """A lease of `account` with `content(nbytes, seed)` in it."""
    lease = await account.acquire(nbytes)
    lease.frame[:] = content(nbytes, seed).data
    return lease


def fingerprint(lease: Lease) -> str:
    """A digest of header and payload as they are now."""
    return hashlib.sha256(lease.frame).hexdigest()


def expected(nbytes: int, seed: int) -> str:
    """The fingerprint of an undamaged frame."""
    return hashlib.sha256(content(nbytes, seed)).hexdigest()
