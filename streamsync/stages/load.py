"""load: writes received buckets into the live parameters, group by group, and proves each.

Before GO nothing is written: buckets are held in their leases while the engine generates the old
version. After GO they are loaded in forward order as far as they are here; when the digest of its
loaded bytes matched for every bucket of a group, its landings run and its gate opens. With
`apply="version"` the digests are checked in the host leases, before arming.
"""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from streamsync.errors import EngineError, IntegrityError, StreamsyncError
from streamsync.runtime.channel import EndOfStream
from streamsync.stages.clock import run_timed
from streamsync.stages.landings import Landings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from concurrent.futures import Executor

    import torch

    from streamsync.digest.compiled import BucketDigest
    from streamsync.layout.landing import Landing
    from streamsync.plan.plan import Share
    from streamsync.runtime.channel import ReceiveHalf
    from streamsync.runtime.pool import Lease
    from streamsync.stages.clock import StageClock
    from streamsync.stages.copies import BucketCopies
    from streamsync.stages.stream import Received
    from streamsync.types import Version


@dataclass(slots=True, frozen=True)
class Feed:
    """One source's part of the sink: its share with this side's views, and what was prepared."""

    share: Share
    copies: list[BucketCopies]
    digests: list[BucketDigest] | None


class Loader:
    """The load stage of one sync. `scratch` (uint8 `[num_lanes, largest bucket]`) is where loaded
    bytes that lie apart are packed again to be digested; as many buckets load at once as it has
    rows. `land` makes one of the sink's `landings`. Raises `PlanError` for landings that get a part
    of their tensors only."""

    def __init__(
        self,
        feeds: Sequence[Feed],
        groups: Sequence[str],
        version: Version,
        open_gate: Callable[[Version, str], Awaitable[None]],
        scratch: torch.Tensor,
        clock: StageClock,
        executor: Executor,
        *,
        whole: bool,
        arrived: Callable[[int], None],
        landed: Callable[[str], None],
        landings: Sequence[Landing] = (),
        land: Callable[[Version, Landing], Awaitable[None]] | None = None,
    ) -> None:
        self._feeds = feeds
        self._version = version
        self._open_gate = open_gate
        self._scratch = scratch
        self._clock = clock
        self._executor = executor
        self._whole = whole
        self._arrived = arrived
        self._landed = landed
        self._land = land
        self._landings = Landings(landings, _names(feeds) if landings else ())
        order = {group: index for index, group in enumerate(groups)}
        self._left = dict.fromkeys(groups, 0)
        for feed in feeds:
            for bucket in feed.share.buckets:
                self._left[feed.share.groups[bucket.group]] += 1
        self._order = order
        self._num_unclaimed = sum(self._left.values())
        self._held: list[tuple[int, int, int, Received]] = []
        self._changed = asyncio.Event()
        self.go = asyncio.Event()
        """Set when the coordinator allowed the first write."""

    async def run(self, source: ReceiveHalf[Received]) -> None:
        """Takes every bucket, waits for `go`, loads. Returns when all groups landed. On an error or
        cancel all leases are released; whether something was written only `go` tells."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._collect(source))
                for scratch in self._scratch:
                    tasks.create_task(self._install(scratch))
        finally:
            for *_, received in self._held:
                received.lease.release()
            self._held.clear()
            for received in source.close():
                received.lease.release()

    async def _collect(self, source: ReceiveHalf[Received]) -> None:
        while True:
            try:
                received = await source.receive()
            except EndOfStream:
                return
            share = self._feeds[received.feed].share
            if self._whole:
                await self._verify_lease(received)
            group = self._order[share.groups[received.bucket.group]]
            heapq.heappush(self._held, (group, received.feed, received.bucket.index, received))
            self._changed.set()
            self._arrived(received.bucket.nbytes)

    async def _verify_lease(self, received: Received) -> None:
        feed = self._feeds[received.feed]
        if feed.digests is None:
            return
        program = feed.digests[received.bucket.index]
        try:
            found, _, _ = await run_timed(
                self._executor, partial(program.run, received.lease.array)
            )
            self._compare(received, found)
        except BaseException:
            received.lease.release()
            raise

    async def _install(self, scratch: torch.Tensor) -> None:
        """One lane: loads the bucket that the forward needs first, as long as there are any."""
        with self._clock.blocked():
            await self.go.wait()
        while self._num_unclaimed:
            if not self._held:
                self._changed.clear()
                with self._clock.blocked():
                    await self._changed.wait()
                continue
            *_, received = heapq.heappop(self._held)
            self._num_unclaimed -= 1
            if not self._num_unclaimed:
                self._changed.set()  # the other lanes have nothing left to wait for
            try:
                await self._load(received, scratch)
            finally:
                received.lease.release()
            share = self._feeds[received.feed].share
            group = share.groups[received.bucket.group]
            self._left[group] -= 1
            if self._left[group] == 0:
                await self._finish_group(group)

    async def _load(self, received: Received, scratch: torch.Tensor) -> None:
        feed = self._feeds[received.feed]
        bucket = received.bucket
        copies = feed.copies[bucket.index]
        program = None if feed.digests is None or self._whole else feed.digests[bucket.index]

        def work(lease: Lease = received.lease) -> int | None:
            copies.scatter(lease.payload)
            if program is None:
                return None
            return copies.loaded_digest(program, scratch[: bucket.nbytes])

        found, start, seconds = await run_timed(self._executor, work)
        self._clock.worked(
            bucket, feed.share.groups[bucket.group], feed.share.source, start, seconds
        )
        if found is not None:
            self._compare(received, found)

    def _compare(self, received: Received, found: int) -> None:
        if received.digest is None or found == received.digest:
            return
        share = self._feeds[received.feed].share
        names = sorted({share.tensors[p.tensor].name for p in received.bucket.pieces})
        shown = ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")
        raise IntegrityError(
            f"the bytes of bucket {received.bucket.index} are not those that were sent: digest "
            f"{found:016x}, the source says {received.digest:016x}; it holds {shown}",
            peer=share.source,
            bucket=received.bucket.index,
            stage="load",
            version=self._version,
        )

    async def _finish_group(self, group: str) -> None:
        for landing in self._landings.landed(group):
            assert self._land is not None
            await self._engine_call(group, self._land(self._version, landing))
            self._landings.done(landing)
        for ready in self._landings.openable():
            await self._engine_call(ready, self._open_gate(self._version, ready))
            self._landed(ready)

    async def _engine_call(self, group: str, call: Awaitable[None]) -> None:
        try:
            await call
        except StreamsyncError as error:
            raise error.at(stage="load", version=self._version) from error.__cause__
        except Exception as error:
            raise EngineError(
                f"the engine failed on group {group}: {type(error).__name__}: {error}",
                stage="load",
                version=self._version,
            ) from error


def _names(feeds: Sequence[Feed]) -> set[str]:
    """The tensors that come."""
    return {
        feed.share.tensors[piece.tensor].name
        for feed in feeds
        for bucket in feed.share.buckets
        for piece in bucket.pieces
    }
