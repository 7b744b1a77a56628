"""What is particular to memory: two loops in two threads of one process."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import uvloop

from streamsync.errors import PeerLost, TransportError
from streamsync.runtime.pool import Pool
from streamsync.transports.base import Offer
from streamsync.transports.memory import MemoryTransport
from tests.transport_rig import DRAIN_SECONDS, expected, filled, fingerprint, rig, until

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

SIZES = (0, 1, 64, 65, 300_000) * 8


def _in_threads(
    source: Callable[[Future[Offer]], Coroutine[object, object, None]],
    sink: Callable[[Future[Offer]], Coroutine[object, object, None]],
) -> None:
    from concurrent.futures import Future

    offer: Future[Offer] = Future()

    def run(side: Callable[[Future[Offer]], Coroutine[object, object, None]]) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(side(offer))

    with ThreadPoolExecutor(2, thread_name_prefix="streamsync-test") as threads:
        for future in [threads.submit(run, side) for side in (source, sink)]:
            future.result(30)


@pytest.mark.parametrize("in_place", [False, True])
def test_two_loops_hand_frames_over(in_place: bool) -> None:
    threads_of_releases = set()

    async def source(offered: Future[Offer]) -> None:
        pool = Pool(1 << 20, "test-source")
        account = pool.open_account("peer", 300_000, 1 << 20)
        transport = MemoryTransport(drain_seconds=5)
        await transport.start()
        offer = transport.offer(pool)
        accepting = asyncio.ensure_future(transport.accept(offer, b""))
        offered.set_result(offer)
        link = await accepting
        original = account.pool._give_back

        def give_back(offset: int, size: int) -> None:
            threads_of_releases.add(threading.get_ident())
            original(offset, size)

        account.pool._give_back = give_back  # type: ignore[method-assign]
        for seed, nbytes in enumerate(SIZES):
            lease = await filled(account, nbytes, seed)
            await link.send(lease)
            lease.release()
        await link.flush()
        await until(lambda: not pool.num_outstanding)
        await transport.close()
        assert threads_of_releases == {threading.get_ident()}
        account.close()
        pool.close()

    async def sink(offered: Future[Offer]) -> None:
        pool = Pool(1 << 20, "test-sink")
        account = pool.open_account("peer", 300_000)
        transport = MemoryTransport()
        link = await transport.connect(await asyncio.wrap_future(offered))
        for seed, nbytes in enumerate(SIZES):
            own = None if in_place else await account.acquire(nbytes)
            lease = await link.receive(own, nbytes)
            assert fingerprint(lease) == expected(nbytes, seed)
            lease.release()
        await transport.close()
        account.close()
        pool.close()

    _in_threads(source, sink)


def test_a_sink_whose_loop_ended_is_lost() -> None:
    ended = threading.Event()

    async def source(offered: Future[Offer]) -> None:
        pool = Pool(1 << 20, "test-source")
        account = pool.open_account("peer", 1000, 1 << 20)
        transport = MemoryTransport()
        offer = transport.offer(pool)
        offered.set_result(offer)
        link = await transport.accept(offer, b"")
        await asyncio.to_thread(ended.wait, 20)
        lost = False
        while not lost:
            lease = await account.acquire(1000)
            try:
                await link.send(lease)
            except PeerLost:
                lost = True
            lease.release()
            await asyncio.sleep(0.001)
        assert pool.num_outstanding == 0
        await transport.close()
        account.close()
        pool.close()

    async def sink(offered: Future[Offer]) -> None:
        await MemoryTransport().connect(await asyncio.wrap_future(offered))
        asyncio.get_running_loop().call_later(0, ended.set)

    _in_threads(source, sink)


async def test_a_lease_that_the_sink_keeps_is_withheld_until_it_lets_go() -> None:
    async with rig("memory") as ends:
        send_link, receive_link, _ = await ends.link()
        lease = await filled(ends.source_account, 1000, 1)
        await send_link.send(lease)
        lease.release()
        there = await receive_link.receive(None, 1000)
        async with asyncio.timeout(DRAIN_SECONDS + 10):
            await send_link.abort()
        assert ends.source.num_withheld == 1
        assert fingerprint(there) == expected(1000, 1)
        there.release()
        await ends.settled()
        assert ends.source.num_withheld == 0


async def test_an_offer_of_another_process_is_refused() -> None:
    transport = MemoryTransport()
    with pytest.raises(TransportError, match="one process"):
        await transport.connect(Offer(b"somewhere else", bytes(32)))


async def test_a_cancelled_connect_leaves_no_half_link() -> None:
    async with rig("memory") as ends:
        offer = ends.source.offer(ends.source_pool)
        accepting = asyncio.ensure_future(ends.source.accept(offer, b""))
        connecting = asyncio.ensure_future(ends.sink.connect(offer))
        await asyncio.sleep(0)
        connecting.cancel()
        link = await accepting
        async with asyncio.timeout(20):
            while True:
                try:
                    await link.flush()
                except PeerLost:
                    break
                await asyncio.sleep(0.001)
