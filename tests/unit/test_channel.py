"""Channels: order, the bound in bytes, the two ends of a stream, cancelling."""

from __future__ import annotations

import asyncio

import pytest

from streamsync.runtime.channel import BrokenChannel, EndOfStream, open_channel


async def _is_waiting(task: asyncio.Task[object]) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return not task.done()


async def test_items_keep_their_order_and_the_end_comes_after_the_last() -> None:
    send, receive = open_channel("edge", 10)

    async def give() -> None:
        with send:
            for item in range(100):
                await send.send(item, item % 7)

    giving = asyncio.ensure_future(give())
    assert [await receive.receive() for _ in range(100)] == list(range(100))
    for _ in range(2):
        with pytest.raises(EndOfStream):
            await receive.receive()
    await giving


async def test_the_bound_is_in_bytes() -> None:
    send, receive = open_channel("edge", 10)
    await send.send("a", 6)
    await send.send("b", 4)
    third = asyncio.ensure_future(send.send("c", 1))
    assert await _is_waiting(third)
    assert send.statistics().occupancy_bytes == 10
    assert await receive.receive() == "a"
    await third
    fourth = asyncio.ensure_future(send.send("d", 6))
    assert await _is_waiting(fourth)
    assert [await receive.receive() for _ in range(3)] == ["b", "c", "d"]
    await fourth


async def test_an_item_above_the_bound_passes_alone() -> None:
    send, receive = open_channel("edge", 10)
    await send.send("small", 1)
    large = asyncio.ensure_future(send.send("large", 1000))
    assert await _is_waiting(large)
    assert await receive.receive() == "small"
    await large
    after = asyncio.ensure_future(send.send("after", 0))
    assert await _is_waiting(after)
    assert await receive.receive() == "large"
    await after


async def test_items_without_bytes_never_wait() -> None:
    send, receive = open_channel("edge", 0)
    for item in range(5):
        await send.send(item, 0)
    assert [await receive.receive() for _ in range(5)] == list(range(5))


async def test_a_receiver_that_goes_breaks_the_sender_and_hands_over_the_rest() -> None:
    send, receive = open_channel("edge", 10)
    await send.send("a", 5)
    await send.send("b", 5)
    waiting = asyncio.ensure_future(send.send("c", 5))
    assert await _is_waiting(waiting)
    assert receive.close() == ["a", "b"]
    with pytest.raises(BrokenChannel, match="edge"):
        await waiting
    with pytest.raises(BrokenChannel):
        await send.send("d", 0)
    assert receive.close() == []
    assert receive.statistics().occupancy_bytes == 0


async def test_a_receiver_waits_and_is_woken_by_an_item_or_the_end() -> None:
    send, receive = open_channel("edge", 10)
    first = asyncio.ensure_future(receive.receive())
    assert await _is_waiting(first)
    await send.send("a", 1)
    assert await first == "a"
    second = asyncio.ensure_future(receive.receive())
    assert await _is_waiting(second)
    send.close()
    with pytest.raises(EndOfStream):
        await second


async def test_a_cancelled_send_leaves_the_item_with_its_caller() -> None:
    send, receive = open_channel("edge", 10)
    await send.send("a", 10)
    waiting = asyncio.ensure_future(send.send("b", 10))
    assert await _is_waiting(waiting)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    send.close()
    assert await receive.receive() == "a"
    with pytest.raises(EndOfStream):
        await receive.receive()


async def test_a_cancelled_receive_loses_nothing() -> None:
    send, receive = open_channel("edge", 10)
    for item in range(20):
        waiting = asyncio.ensure_future(receive.receive())
        assert await _is_waiting(waiting)
        await send.send(item, 1)
        waiting.cancel()  # the item is there, but its receiver did not run yet
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await receive.receive() == item


async def test_statistics_tell_what_is_inside_and_what_passed() -> None:
    send, receive = open_channel("convert-pin", 100)
    for nbytes in (10, 20, 30):
        await send.send(None, nbytes)
    await receive.receive()
    found = receive.statistics()
    assert found == send.statistics()
    assert (found.name, found.capacity_bytes) == ("convert-pin", 100)
    assert (found.occupancy_bytes, found.num_items) == (50, 2)
    assert (found.sent_bytes, found.sent_items) == (60, 3)
