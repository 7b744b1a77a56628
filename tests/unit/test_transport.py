"""What holds for every transport alike: order, bytes, lengths, loss, cancelling, admission."""

from __future__ import annotations

import asyncio
import gc
import os
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from streamsync.errors import IntegrityError, PeerLost, TransportError
from streamsync.transports.base import Offer
from streamsync.transports.ucx import UcxTransport
from streamsync.transports.ucx_library import is_installed
from tests.transport_rig import MIB, Rig, expected, filled, fingerprint, rig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from streamsync.transports.base import ReceiveLink, SendLink

SIZES = (0, 1, 63, 64, 65, 4 * MIB + 1)


# One loop for all: UCX starts and stops with its last user, and stopping takes a second.
pytestmark = pytest.mark.asyncio(loop_scope="module")

needs_ucxx = pytest.mark.skipif(not is_installed(), reason="needs ucxx")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept() -> AsyncIterator[None]:
    if not is_installed():
        yield
        return
    transport = UcxTransport()
    await transport.start()
    yield
    await transport.close()


@pytest.fixture(params=["memory", "tcp", "shm", pytest.param("ucx", marks=needs_ucxx)])
def name(request: pytest.FixtureRequest, kept: None) -> str:
    return str(request.param)


@pytest_asyncio.fixture(loop_scope="module")
async def ends(name: str) -> AsyncIterator[Rig]:
    async with rig(name) as both:
        yield both


async def send_all(ends: Rig, link: SendLink, sizes: tuple[int, ...], seed: int) -> None:
    for index, nbytes in enumerate(sizes):
        lease = await filled(ends.source_account, nbytes, seed + index)
        await link.send(lease)
        lease.release()
    await link.flush()


async def receive_all(
    ends: Rig, link: ReceiveLink, sizes: tuple[int, ...], *, in_place: bool
) -> list[str]:
    found = []
    for nbytes in sizes:
        own = None if in_place else await ends.sink_account.acquire(nbytes)
        lease = await link.receive(own, nbytes)
        assert own is None or lease is own
        found.append(fingerprint(lease))
        lease.release()
    return found


@pytest.mark.parametrize("in_place", [False, True])
async def test_frames_arrive_in_order_and_bit_equal_over_three_rounds(
    ends: Rig, in_place: bool
) -> None:
    """Case 20: bytes are bytes, whatever dtype they stand for."""
    send_link, receive_link, _ = await ends.link()
    if in_place and not receive_link.in_place:
        return
    for seed in (100, 200, 300):
        async with asyncio.TaskGroup() as group:
            group.create_task(send_all(ends, send_link, SIZES, seed))
            receiving = group.create_task(receive_all(ends, receive_link, SIZES, in_place=in_place))
        assert receiving.result() == [expected(n, seed + i) for i, n in enumerate(SIZES)]
    assert send_link.wire_bytes == receive_link.wire_bytes == 3 * sum(SIZES)
    assert receive_link.waiting_seconds >= 0
    await ends.settled()


async def test_the_source_is_never_written(ends: Rig) -> None:
    send_link, receive_link, _ = await ends.link()
    lease = await filled(ends.source_account, 1000, 7)
    await send_link.send(lease)
    own = await receive_link.receive(await ends.sink_account.acquire(1000), 1000)
    own.frame[:] = bytes(len(own.frame))
    assert fingerprint(lease) == expected(1000, 7)
    own.release()
    lease.release()


async def test_a_lease_may_be_reused_once_the_link_let_go_of_it(ends: Rig) -> None:
    """A pool of four frames carries forty, which needs every lease to come back."""
    send_link, receive_link, _ = await ends.link()
    sizes = (4 * MIB + 1,) * 40
    async with asyncio.TaskGroup() as group:
        group.create_task(send_all(ends, send_link, sizes, 1))
        receiving = group.create_task(receive_all(ends, receive_link, sizes[:40], in_place=False))
    assert receiving.result() == [expected(n, 1 + i) for i, n in enumerate(sizes)]


@pytest.mark.parametrize(("sent", "planned"), [(1000, 999), (999, 1000), (0, 64), (64, 0)])
async def test_a_frame_of_another_length_is_refused(ends: Rig, sent: int, planned: int) -> None:
    send_link, receive_link, _ = await ends.link()
    lease = await filled(ends.source_account, sent, 1)
    await send_link.send(lease)
    lease.release()
    if type(send_link).__name__ == "TcpSendLink" and sent < planned:
        # Enough bytes behind it that the short frame is not mistaken for a late one.
        more = await filled(ends.source_account, planned, 2)
        await send_link.send(more)
        more.release()
    own = await ends.sink_account.acquire(1000)
    with pytest.raises(IntegrityError, match=r"bytes came where|longer frame came"):
        await receive_link.receive(own, planned)
    await receive_link.abort()
    own.release()
    await send_link.abort()


async def test_a_source_that_aborts_is_lost_to_its_sink(ends: Rig) -> None:
    send_link, receive_link, _ = await ends.link()
    own = await ends.sink_account.acquire(100)
    async with asyncio.TaskGroup() as group:
        receiving = group.create_task(_refusal(receive_link.receive(own, 100)))
        await asyncio.sleep(0.01)
        await send_link.abort()
    assert isinstance(receiving.result(), PeerLost)
    await receive_link.abort()
    own.release()
    with pytest.raises(PeerLost):
        await receive_link.receive(None if receive_link.in_place else own, 100)


async def test_a_sink_that_aborts_is_lost_to_its_source(ends: Rig) -> None:
    send_link, receive_link, _ = await ends.link()
    await receive_link.abort()

    async def send_until_lost() -> None:
        for seed in range(100):
            lease = await filled(ends.source_account, MIB, seed)
            try:
                await _send_and_flush(send_link, lease)
            finally:
                lease.release()
            await asyncio.sleep(0.01)

    with pytest.raises(PeerLost):
        await send_until_lost()
    await send_link.abort()
    await send_link.abort()
    await ends.settled()


async def test_frames_sent_before_an_abort_do_not_leak(ends: Rig) -> None:
    send_link, receive_link, _ = await ends.link()
    for seed in range(3):
        lease = await filled(ends.source_account, 100, seed)
        await send_link.send(lease)
        lease.release()
    async with asyncio.TaskGroup() as group:
        group.create_task(receive_link.abort())
        group.create_task(send_link.abort())
    await ends.settled()
    assert ends.source.num_withheld == 0


async def test_cancelled_in_the_middle_then_aborted_leaves_both_pools_usable(ends: Rig) -> None:
    for round_ in range(3):
        send_link, receive_link, _ = await ends.link()
        own = await ends.sink_account.acquire(4 * MIB)
        receiving = asyncio.ensure_future(receive_link.receive(own, 4 * MIB))
        lease = await filled(ends.source_account, 4 * MIB, round_)
        sending = asyncio.ensure_future(_send_and_flush(send_link, lease))
        await asyncio.sleep(0.0005 * round_)
        for task in (sending, receiving):
            task.cancel()
        await asyncio.wait([sending, receiving])
        for task in (sending, receiving):
            assert task.cancelled() or task.exception() is None
        async with asyncio.TaskGroup() as group:
            group.create_task(send_link.abort())
            group.create_task(receive_link.abort())
        # From here on the memory is ours: nobody writes what we write.
        own.frame[:] = bytes(len(own.frame))
        await asyncio.sleep(0.01)
        assert not any(bytes(own.frame))
        lease.release()
        own.release()
        await ends.settled()
    send_link, receive_link, _ = await ends.link()
    async with asyncio.TaskGroup() as group:
        group.create_task(send_all(ends, send_link, SIZES, 5))
        receiving_all = group.create_task(receive_all(ends, receive_link, SIZES, in_place=False))
    assert receiving_all.result() == [expected(n, 5 + i) for i, n in enumerate(SIZES)]


async def test_aborting_wakes_a_receive_that_is_still_running(ends: Rig) -> None:
    _, receive_link, _ = await ends.link()
    own = await ends.sink_account.acquire(100)
    async with asyncio.TaskGroup() as group:
        receiving = group.create_task(_refusal(receive_link.receive(own, 100)))
        await asyncio.sleep(0.01)
        await receive_link.abort()
    assert isinstance(receiving.result(), PeerLost)
    own.release()


async def test_waiting_counts_until_the_first_byte(ends: Rig) -> None:
    send_link, receive_link, _ = await ends.link()
    own = await ends.sink_account.acquire(10)
    async with asyncio.TaskGroup() as group:
        group.create_task(receive_link.receive(own, 10))
        await asyncio.sleep(0.05)
        lease = await filled(ends.source_account, 10, 0)
        await send_link.send(lease)
        lease.release()
    assert receive_link.waiting_seconds > 0.04
    own.release()


async def test_a_wrong_token_is_refused(ends: Rig, name: str) -> None:
    offer = ends.source.offer(ends.source_pool)
    accepting = asyncio.ensure_future(ends.source.accept(offer, ends.sink.address()))
    forged = Offer(offer.address, bytes(len(offer.token)))
    if name == "ucx":  # no connection to refuse: the source never answers a tag it does not know
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await ends.sink.connect(forged)
    else:
        with pytest.raises(TransportError):
            await ends.sink.connect(forged)
    assert not accepting.done()
    link = await ends.sink.connect(offer)
    await (await accepting).abort()
    await link.abort()


async def test_a_token_works_once(ends: Rig, name: str) -> None:
    send_link, receive_link, offer = await ends.link()
    if name == "ucx":
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await ends.sink.connect(offer)
    else:
        with pytest.raises(TransportError):
            await ends.sink.connect(offer)
    with pytest.raises(TransportError):
        await ends.source.accept(offer, ends.sink.address())
    async with asyncio.TaskGroup() as group:  # the link that it admitted goes on
        group.create_task(send_all(ends, send_link, SIZES, 5))
        group.create_task(receive_all(ends, receive_link, SIZES, in_place=False))


async def test_a_cancelled_accept_withdraws_its_offer(ends: Rig, name: str) -> None:
    offer = ends.source.offer(ends.source_pool)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await ends.source.accept(offer, ends.sink.address())
    with pytest.raises(TimeoutError if name == "ucx" else TransportError):
        async with asyncio.timeout(0.3 if name == "ucx" else 20):
            await ends.sink.connect(offer)


async def test_many_links_leave_no_descriptor_behind(ends: Rig) -> None:
    """Case 26: file descriptors stay flat."""
    counts = []
    for round_ in range(8):
        send_link, receive_link, _ = await ends.link()
        async with asyncio.TaskGroup() as group:
            group.create_task(send_all(ends, send_link, (100, 65), round_))
            group.create_task(receive_all(ends, receive_link, (100, 65), in_place=False))
        await receive_link.abort()
        await send_link.abort()
        await asyncio.sleep(0.01)
        del send_link, receive_link
        if round_ in (2, 7):
            gc.collect()
            counts.append(len(await asyncio.to_thread(os.listdir, "/proc/self/fd")))
    assert counts[1] <= counts[0]


async def _refusal(awaitable: object) -> Exception | None:
    try:
        await awaitable  # type: ignore[misc]
    except Exception as error:
        return error
    return None


async def _send_and_flush(link: SendLink, lease: object) -> None:
    await link.send(lease)  # type: ignore[arg-type]
    await link.flush()
