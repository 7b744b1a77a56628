"""What is particular to shm: descriptors that can't be trusted, and memory that both ends hold."""

from __future__ import annotations

import asyncio
import os
import struct
import threading
from typing import TYPE_CHECKING

import pytest

from streamsync.errors import PeerLost, TransportError
from streamsync.runtime.region import Region
from streamsync.transports.shm import ShmReceiveLink, ShmSendLink
from tests.transport_rig import Rig, expected, filled, fingerprint, rig, until

if TYPE_CHECKING:
    import socket

_DESCRIPTOR = struct.Struct("<QQQ")


async def _pair(ends: Rig) -> tuple[ShmSendLink, ShmReceiveLink]:
    send_link, receive_link, _ = await ends.link()
    assert isinstance(send_link, ShmSendLink)
    assert isinstance(receive_link, ShmReceiveLink)
    return send_link, receive_link


async def test_a_frame_in_place_is_the_sources_own_memory() -> None:
    async with rig("shm") as ends:
        send_link, receive_link = await _pair(ends)
        lease = await filled(ends.source_account, 1000, 1)
        await send_link.send(lease)
        there = await receive_link.receive(None, 1000)
        lease.array[0] ^= 0xFF
        assert there.array[0] == lease.array[0]
        assert ends.sink_pool.num_outstanding == 0
        lease.release()
        assert ends.source_pool.num_outstanding == 1
        there.release()
        await ends.settled()


@pytest.mark.parametrize(
    "record",
    [
        (0, 1, 100),  # not aligned
        (1, 0, 100),  # not the next frame
        (0, 0, 1 << 40),  # past the end
        (0, (1 << 64) - 64, 64),  # wraps around
        (0, 1 << 30, 0),  # starts past the end
    ],
)
async def test_a_descriptor_that_cannot_be_is_refused(record: tuple[int, int, int]) -> None:
    async with rig("shm") as ends:
        send_link, receive_link = await _pair(ends)
        send_link._records.post(_DESCRIPTOR.pack(*record))
        with pytest.raises(PeerLost, match="descriptor that can't be"):
            await receive_link.receive(None, record[2])


@pytest.mark.parametrize("number", [0, 5])
async def test_a_frame_given_back_twice_or_never_sent_breaks_the_link(number: int) -> None:
    """Case 30: a stale release must not free a lease that is in use by something newer."""
    async with rig("shm") as ends:
        send_link, receive_link = await _pair(ends)
        for seed in (1, 2):
            lease = await filled(ends.source_account, 1000, seed)
            await send_link.send(lease)
            lease.release()
        (await receive_link.receive(None, 1000)).release()
        await until(lambda: ends.source_pool.num_outstanding == 1)
        second = await receive_link.receive(None, 1000)
        receive_link._records.post(struct.pack("<Q", number))
        await until(lambda: send_link._lost)
        with pytest.raises(PeerLost, match=f"gave back frame {number}, which it does not hold"):
            await send_link.flush()
        assert ends.source_pool.num_outstanding == 1
        assert fingerprint(second) == expected(1000, 2)
        second.release()


async def test_a_lease_that_the_sink_keeps_is_withheld_until_it_lets_go() -> None:
    async with rig("shm") as ends:
        send_link, receive_link = await _pair(ends)
        lease = await filled(ends.source_account, 1000, 1)
        await send_link.send(lease)
        lease.release()
        there = await receive_link.receive(None, 1000)
        await receive_link.abort()
        await send_link.abort()
        assert ends.source.num_withheld == 1
        assert ends.source_pool.num_outstanding == 1
        assert fingerprint(there) == expected(1000, 1)
        there.release()
        await ends.settled()
        assert ends.source.num_withheld == 0


async def test_frames_in_place_outlive_the_source() -> None:
    """The mapping stays until the last lease is gone, whatever became of the peer."""
    async with rig("shm") as ends:
        send_link, receive_link = await _pair(ends)
        lease = await filled(ends.source_account, 1000, 1)
        await send_link.send(lease)
        there = await receive_link.receive(None, 1000)
        send_link._records.close()  # as the kernel does when the process dies
        with pytest.raises(PeerLost, match="the source is gone"):
            await receive_link.receive(None, 1000)
        await receive_link.abort()
        assert fingerprint(there) == expected(1000, 1)
        there.release()
        send_link._held.give_back_all()
        lease.release()


async def test_more_descriptors_than_the_socket_takes_at_once_keep_their_order() -> None:
    async with rig("shm", 600 << 10) as ends:
        send_link, receive_link = await _pair(ends)
        count = 5000
        lease = await filled(ends.source_account, 0, 0)
        for number in range(count):
            frame = await ends.source_account.acquire(0)
            frame.header[:8] = struct.pack("<Q", number)
            await send_link.send(frame)
            frame.release()
        lease.release()
        flushing = asyncio.ensure_future(send_link.flush())
        for number in range(count):
            there = await receive_link.receive(None, 0)
            assert struct.unpack("<Q", there.header[:8]) == (number,)
            there.release()
        await flushing


async def test_nothing_without_a_seal_is_mapped() -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 4096)
    with pytest.raises(PermissionError, match="not sealed"):
        Region.attach(fd)
    os.close(fd)


async def test_a_source_that_is_not_there_is_a_transport_error() -> None:
    async with rig("shm") as ends:
        offer = ends.source.offer(ends.source_pool)
        await ends.source.close()
        with pytest.raises(TransportError, match="can't reach"):
            await ends.sink.connect(offer)


async def test_a_welcome_without_memory_is_refused() -> None:
    async with rig("shm") as ends:
        offer = ends.source.offer(ends.source_pool)
        assert ends.source._door is not None  # type: ignore[attr-defined]
        connecting = asyncio.ensure_future(ends.sink.connect(offer))
        connection: socket.socket = await ends.source._door.admitted(offer.token)  # type: ignore[attr-defined]
        connection.send(b"\x01")
        with pytest.raises(TransportError, match="refused"):
            await connecting
        connection.close()


async def test_an_abort_waits_for_a_copy_that_cannot_be_cancelled() -> None:
    async with rig("shm") as ends:
        send_link, receive_link = await _pair(ends)
        assert receive_link._executor is not None
        held = threading.Event()
        for _ in range(2):  # as many as the executor has threads
            receive_link._executor.submit(held.wait, 30)
        lease = await filled(ends.source_account, 100_000, 1)
        await send_link.send(lease)
        lease.release()
        own = await ends.sink_account.acquire(100_000)
        receiving = asyncio.ensure_future(receive_link.receive(own, 100_000))
        await until(lambda: receive_link._copying)
        receiving.cancel()
        aborting = asyncio.ensure_future(receive_link.abort())
        await asyncio.wait([aborting], timeout=0.1)
        assert not aborting.done()
        held.set()
        await aborting
        assert fingerprint(own) == expected(100_000, 1)
        own.release()
        await ends.settled()


async def test_withheld_leases_are_counted_once_each() -> None:
    """One comes back by its release, the other by the sink's death."""
    async with rig("shm") as ends:
        send_link, receive_link = await _pair(ends)
        there = []
        for seed in (1, 2):
            lease = await filled(ends.source_account, 1000, seed)
            await send_link.send(lease)
            lease.release()
            there.append(await receive_link.receive(None, 1000))
        await send_link.abort()
        assert ends.source.num_withheld == 2
        there[0].release()
        await until(lambda: ends.source.num_withheld == 1)
        receive_link._records.close()
        await until(lambda: ends.source.num_withheld == 0)
        there[1].release()
