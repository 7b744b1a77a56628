"""A uvloop in a thread of its own, and the executor for its blocking calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import uvloop

from streamsync.errors import StreamsyncError, root_error

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")

_INTERRUPT_SECONDS = 10.0
"""An interrupted caller waits at most so long for its call to be given up."""


class LoopThread:
    """Runs `main` on its own event loop beside the host program's threads.

    `main(ready)` is the whole life of the owner: it calls `ready()` once it can serve and returns
    after `stop` was requested through whatever the owner uses. `call` runs a coroutine there from
    any other thread. Signal handlers stay the host program's. A daemon thread, so that a host
    program that forgets to close still exits.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self.name = name
        self.executor = concurrent.futures.ThreadPoolExecutor(
            num_threads,
            thread_name_prefix=f"streamsync-{name}-copy",
            initializer=_use_one_thread,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()

    def start(self, main: Callable[[Callable[[], None]], Coroutine[Any, Any, None]]) -> None:
        """Starts the thread; returns when `main` called `ready`, or raises what it raised."""

        def run() -> None:
            try:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    self._loop = runner.get_loop()
                    runner.run(main(self._set_ready))
            except BaseException as error:
                error = root_error(error)
                if not self._ready.done():
                    self._ready.set_exception(error)
                self._ended.set_exception(error)
            else:
                if not self._ready.done():
                    self._ready.set_result(None)
                self._ended.set_result(None)
            finally:
                self.executor.shutdown(wait=True)

        self._thread = threading.Thread(target=run, name=f"streamsync-{self.name}", daemon=True)
        self._thread.start()
        self._ready.result()

    def _set_ready(self) -> None:
        if not self._ready.done():
            self._ready.set_result(None)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Runs a coroutine on the loop; the future is the caller's to wait for or cancel."""
        if self._loop is None or self._ended.done():
            coroutine.close()
            raise StreamsyncError(f"{self.name} is not running: {self._why_ended()}")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and waits for it, from any thread but the loop's.

        An interrupt (Ctrl-C) cancels it and passes on once it is over, so that nothing of it goes
        on behind the caller's back. Raises what it raises, or why the loop ended meanwhile.
        """
        over: concurrent.futures.Future[None] = concurrent.futures.Future()
        try:
            future = self.submit(_reported(coroutine, over))
        except StreamsyncError:
            coroutine.close()
            raise
        both: tuple[concurrent.futures.Future[Any], ...] = (future, self._ended)
        try:
            concurrent.futures.wait(both, return_when="FIRST_COMPLETED")
        except BaseException:
            future.cancel()
            concurrent.futures.wait((over, self._ended), _INTERRUPT_SECONDS, "FIRST_COMPLETED")
            raise
        if not future.done():
            future.cancel()
            raise StreamsyncError(f"{self.name} ended: {self._why_ended()}")
        return future.result()

    async def await_call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """`call` for a caller in an event loop of its own: cancelling it cancels the coroutine and
        passes on once that is over."""
        over: concurrent.futures.Future[None] = concurrent.futures.Future()
        try:
            future = self.submit(_reported(coroutine, over))
        except StreamsyncError:
            coroutine.close()
            raise
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            await asyncio.wait({asyncio.wrap_future(over)}, timeout=_INTERRUPT_SECONDS)
            raise

    def post(self, function: Callable[[], None]) -> None:
        """Calls `function` on the loop soon; dropped when the loop has ended."""
        if self._loop is not None and not self._ended.done():
            self._loop.call_soon_threadsafe(function)

    def _why_ended(self) -> str:
        if not self._ended.done():
            return "not started"
        error = self._ended.exception()
        return "closed" if error is None else str(error)

    def join(self) -> None:
        """Waits for the thread after its owner was told to stop; raises what ended `main`."""
        if self._thread is not None:
            self._thread.join()
            self._ended.result()


_setting_threads = threading.Lock()


def _use_one_thread() -> None:
    """Makes torch work in the calling thread alone, whatever others have set for theirs.

    Else each of the executor's threads would spread every copy over a team of its own, whose spare
    threads spin on the cores that the trainer or the engine computes on.
    """
    with _setting_threads:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        # That also set what threads start with that use torch later: a thread of no other use sets
        # it back.
        restore = threading.Thread(target=torch.set_num_threads, args=(before,))
        restore.start()
        restore.join()


def check_cancelled() -> None:
    """Raises `CancelledError` if the running task was cancelled, for loops that catch errors.

    A TaskGroup that is failing when the cancel comes swallows it (CPython before 3.13), and a loop
    that tries again after errors would never end.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _reported(coroutine: Coroutine[Any, Any, T], over: concurrent.futures.Future[None]) -> T:
    try:
        return await coroutine
    finally:
        over.set_result(None)
