"""Where a stage's time goes: busy while it works, blocked while it waits."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from streamsync.observability.probe import Event, Probe
from streamsync.types import StageName, StageReport, Version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor

    from streamsync.plan.plan import Bucket

T = TypeVar("T")


class StageClock:
    """Adds up one stage's time and bytes during one sync and emits a span for each bucket.

    Several tasks of a stage (one per peer) may share a clock; their times add up.
    """

    def __init__(self, stage: StageName, version: Version, probe: Probe) -> None:
        self.stage: StageName = stage
        self._version = version
        self._probe = probe
        self._busy_seconds = 0.0
        self._blocked_seconds = 0.0
        self._bytes = 0

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """The body waits for input, output, credits or memory."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._blocked_seconds += time.monotonic() - start

    def worked(
        self, bucket: Bucket, group: str, peer: str, started_at: float, seconds: float
    ) -> None:
        """One bucket took `seconds` of work since `started_at` and left the stage."""
        self._busy_seconds += seconds
        self._bytes += bucket.nbytes
        self._probe.emit(
            Event(
                name=self.stage,
                started_at=started_at,
                seconds=seconds,
                version=self._version,
                peer=peer,
                bucket=bucket.index,
                group=group,
                bytes=bucket.nbytes,
            )
        )

    def add_blocked(self, seconds: float) -> None:
        """Counts waiting that was measured elsewhere (a link before a frame's first byte)."""
        self._blocked_seconds += seconds

    def report(self) -> StageReport:
        """The totals so far."""
        return StageReport(
            busy_seconds=self._busy_seconds,
            blocked_seconds=self._blocked_seconds,
            bytes=self._bytes,
        )


async def run_timed(executor: Executor, function: Callable[[], T]) -> tuple[T, float, float]:
    """Runs a blocking call in the executor; returns its result, start and seconds in its thread.

    When cancelled it first waits for the call, which can't be interrupted, so that memory it uses
    is free afterwards; then the cancel goes on.
    """

    def timed() -> tuple[T, float, float]:
        start = time.monotonic()
        result = function()
        return result, start, time.monotonic() - start

    future = asyncio.get_running_loop().run_in_executor(executor, timed)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait({future})
        if not future.cancelled():
            future.exception()
        raise
