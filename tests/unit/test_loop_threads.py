from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from streamsync.runtime.loop import LoopThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_executor_copies_in_its_own_threads_and_leaves_others_as_they_are() -> None:
    with ThreadPoolExecutor(1) as others:
        torch.set_num_threads(3)
        before = others.submit(torch.get_num_threads).result()
        thread = LoopThread("test", 2)
        meet = threading.Barrier(2)

        def ask() -> int:
            meet.wait(10)  # so that both threads are asked
            return torch.get_num_threads()

        try:
            asked = [thread.executor.submit(ask) for _ in range(2)]
            assert [future.result() for future in asked] == [1, 1]
        finally:
            thread.executor.shutdown()
        assert others.submit(torch.get_num_threads).result() == before
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 3


async def test_a_cancelled_call_from_another_loop_passes_on_when_it_is_over() -> None:
    thread = LoopThread("test", 1)
    stop, begun, over = asyncio.Event(), threading.Event(), threading.Event()

    async def main(ready: Callable[[], None]) -> None:
        ready()
        await stop.wait()

    async def slow_to_end() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)
            over.set()

    await asyncio.to_thread(thread.start, main)
    try:
        call = asyncio.ensure_future(thread.await_call(slow_to_end()))
        await asyncio.to_thread(begun.wait, 10)
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled()
        assert over.is_set(), "its end was not waited for"
    finally:
        thread.post(stop.set)
        await asyncio.to_thread(thread.join)
