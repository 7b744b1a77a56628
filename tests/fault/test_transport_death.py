"""Case 32: the other process is killed or stopped, at either end, while frames are under way."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
from typing import TYPE_CHECKING

import pytest
import uvloop

from streamsync.errors import PeerLost
from streamsync.runtime.pool import Pool
from streamsync.transports.base import Offer
from streamsync.transports.ucx_library import is_installed
from tests.transport_rig import MIB, content, expected, filled, fingerprint, make, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

    from streamsync.runtime.pool import Account
    from streamsync.transports.base import ReceiveLink, SendLink, Transport

NBYTES = 4 * MIB
DEADLINE = 30.0
"""For errors that a transport notices by itself; generous for a loaded machine."""

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.transport_rig", "streamsync.transports.shm"])

pytestmark = pytest.mark.timeout(120)
transports = pytest.mark.parametrize(
    "name",
    [
        "tcp",
        "shm",
        pytest.param("ucx", marks=pytest.mark.skipif(not is_installed(), reason="needs ucxx")),
    ],
)


def _child(name: str, role: str, talk: Connection) -> None:
    """The peer: an endless source, or a sink that takes as many frames as it is told to."""

    async def run() -> None:
        pool = Pool(8 * (NBYTES + 128), "test-child")
        account = pool.open_account("peer", NBYTES, pool.capacity_bytes)
        transport = make(name, None)
        await transport.start()
        if role == "source":
            offer = transport.offer(pool)
            talk.send((offer.address, offer.token))
            link = await transport.accept(offer, talk.recv())
            seed = 0
            while True:
                lease = await filled(account, NBYTES, seed)
                await link.send(lease)
                lease.release()
                seed += 1
        talk.send(transport.address())
        receive_link = await transport.connect(Offer(*talk.recv()))
        while True:
            for _ in range(talk.recv()):
                lease = await receive_link.receive(await account.acquire(NBYTES), NBYTES)
                lease.release()
            talk.send("taken")

    with contextlib.suppress(EOFError, PeerLost):
        uvloop.run(run())


class Child:
    def __init__(self, name: str, role: str) -> None:
        self.talk, theirs = _processes.Pipe()
        self.process: ForkServerProcess = _processes.Process(
            target=_child, args=(name, role, theirs), daemon=True
        )
        self.process.start()
        theirs.close()

    async def hear(self) -> object:
        async with asyncio.timeout(DEADLINE):
            return await asyncio.to_thread(self.talk.recv)

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.talk.close()


@contextlib.asynccontextmanager
async def _ends(name: str, role: str) -> AsyncIterator[tuple[Child, Transport, Account]]:
    """A child with the other `role`, and what this end has."""
    child = await asyncio.to_thread(Child, name, "sink" if role == "source" else "source")
    pool = Pool(8 * (NBYTES + 128), "test")
    account = pool.open_account("peer", NBYTES, pool.capacity_bytes)
    transport = make(name, None)
    await transport.start()
    try:
        yield child, transport, account
    finally:
        await asyncio.to_thread(child.end)
        await transport.close()
        await until(lambda: not pool.num_outstanding)
        assert transport.num_withheld == 0
        account.close()
        pool.close()


async def _accept(child: Child, transport: Transport, account: Account) -> SendLink:
    address = await child.hear()
    assert isinstance(address, bytes)
    offer = transport.offer(account.pool)
    child.talk.send((offer.address, offer.token))
    async with asyncio.timeout(DEADLINE):
        return await transport.accept(offer, address)


async def _connect(child: Child, transport: Transport) -> ReceiveLink:
    address, token = await child.hear()  # type: ignore[misc]
    child.talk.send(transport.address())
    async with asyncio.timeout(DEADLINE):
        return await transport.connect(Offer(address, token))


async def _send(link: SendLink, account: Account, count: int) -> None:
    for seed in range(count):
        lease = await filled(account, NBYTES, seed)
        try:
            await link.send(lease)
        finally:
            lease.release()
    await link.flush()


async def _receive(link: ReceiveLink, account: Account, seed: int) -> None:
    lease = await account.acquire(NBYTES)
    try:
        await link.receive(lease, NBYTES)
    except BaseException:
        await link.abort()
        lease.release()
        raise
    assert fingerprint(lease) == expected(NBYTES, seed)
    lease.release()


@transports
async def test_a_killed_sink_is_lost_and_every_lease_comes_back(name: str) -> None:
    async with _ends(name, "source") as (child, transport, account):
        link = await _accept(child, transport, account)
        child.talk.send(3)
        async with asyncio.TaskGroup() as group:
            group.create_task(_send(link, account, 3))
            assert await child.hear() == "taken"
        child.talk.send(1000)
        sending = asyncio.ensure_future(_send(link, account, 1000))
        await asyncio.sleep(0.05)
        child.signal(signal.SIGKILL)
        with pytest.raises(PeerLost):
            async with asyncio.timeout(DEADLINE):
                await sending
        async with asyncio.timeout(DEADLINE):
            await link.abort()
        await until(lambda: not account.pool.num_outstanding)
        assert transport.num_withheld == 0


@transports
async def test_a_killed_source_is_lost_and_the_lease_is_ours_again(name: str) -> None:
    async with _ends(name, "sink") as (child, transport, account):
        link = await _connect(child, transport)
        for seed in range(3):
            await _receive(link, account, seed)
        child.signal(signal.SIGKILL)

        async def receive_until_lost() -> None:
            for seed in range(3, 1000):
                await _receive(link, account, seed)

        with pytest.raises(PeerLost):
            async with asyncio.timeout(DEADLINE):
                await receive_until_lost()
        await until(lambda: not account.pool.num_outstanding)
        assert transport.num_withheld == 0


@transports
async def test_a_stopped_source_costs_its_sink_the_deadline_and_no_lease(name: str) -> None:
    async with _ends(name, "sink") as (child, transport, account):
        link = await _connect(child, transport)
        await _receive(link, account, 0)
        child.signal(signal.SIGSTOP)

        async def receive_on() -> None:
            for seed in range(1, 1000):
                await _receive(link, account, seed)

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await receive_on()
        lease = await account.acquire(NBYTES)  # the one given up is free, and nobody writes it
        lease.frame[:] = content(NBYTES, 7).data
        child.signal(signal.SIGCONT)
        await asyncio.sleep(0.1)
        assert fingerprint(lease) == expected(NBYTES, 7)
        lease.release()


@transports
async def test_a_stopped_sink_costs_its_source_the_deadline(name: str) -> None:
    """What the sink may still read is withheld, and comes back when it dies."""
    async with _ends(name, "source") as (child, transport, account):
        link = await _accept(child, transport, account)
        child.talk.send(1)
        async with asyncio.TaskGroup() as group:
            group.create_task(_send(link, account, 1))
            assert await child.hear() == "taken"
        child.signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await _send(link, account, 1000)
        async with asyncio.timeout(DEADLINE):
            await link.abort()
        assert account.pool.num_outstanding == transport.num_withheld
        if name == "tcp":
            assert transport.num_withheld == 0
        child.signal(signal.SIGKILL)
        await until(lambda: not account.pool.num_outstanding)
        assert transport.num_withheld == 0
