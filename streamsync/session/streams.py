"""The streams of a source: what it prepares once per share and repeats in every sync."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from streamsync.digest.compiled import compile_bucket
from streamsync.errors import PlanError, StreamsyncError, TransportError
from streamsync.plan.check import check_share
from streamsync.plan.resolve import Places
from streamsync.runtime.pool import frame_bytes
from streamsync.stages.copies import prepare_copies
from streamsync.stages.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Executor

    from streamsync.layout.binding import Binding
    from streamsync.plan.plan import Share
    from streamsync.runtime.pool import Account, Pool
    from streamsync.stages.copies import BucketCopies


class Streams:
    """Sinks of equal layout find the same stream. `is_busy()` tells whether a sync runs, whose
    leases leave no room to reserve more. Loop thread only; preparation runs in the executor."""

    def __init__(
        self,
        binding: Binding,
        pool: Pool,
        executor: Executor,
        is_busy: Callable[[], bool],
        *,
        digest: bool,
    ) -> None:
        self._binding = binding
        self._places = Places(binding.layout)
        self._pool = pool
        self._executor = executor
        self._is_busy = is_busy
        self._digest = digest
        self._streams: list[Stream] = []
        self._finding = asyncio.Lock()

    async def find(self, share: Share) -> Stream:
        """The stream of these buckets, made if need be. Raises `PlanError` for a share that does
        not fit the source, `ConfigError` for a pool too small, `TransportError` to try again."""
        async with self._finding:
            for stream in self._streams:
                if stream.share.digest == share.digest and stream.share.buckets == share.buckets:
                    return stream
            return await self._make(share)

    async def _make(self, share: Share) -> Stream:
        if self._is_busy() and self._pool.num_outstanding:
            raise TransportError("a sync is running: subscribe when it is over", peer=share.sink)
        demand = sum(frame_bytes(bucket.nbytes) for bucket in share.buckets)
        account = self._pool.open_account(share.sink, share.max_bucket_bytes, demand)
        try:
            stream = await asyncio.get_running_loop().run_in_executor(
                self._executor, partial(self._prepare, share, account)
            )
        except BaseException as error:
            account.close()
            if isinstance(error, StreamsyncError) or not isinstance(error, Exception):
                raise
            raise PlanError(f"the share does not fit this source: {error}") from error
        self._streams.append(stream)
        return stream

    def _prepare(self, share: Share, account: Account) -> Stream:
        check_share(share)
        return Stream(
            share,
            self._copies(share),
            [compile_bucket(share, b) for b in share.buckets] if self._digest else None,
            account,
        )

    def _copies(self, share: Share) -> list[BucketCopies]:
        views = self._places.resolve(share, at_source=True)
        return prepare_copies(share, views, self._binding, at_source=True)

    async def rebind(self) -> None:
        """Looks the parameters up again: a trainer may have replaced their memory."""
        loop = asyncio.get_running_loop()
        if not await loop.run_in_executor(self._executor, self._binding.rebind):
            return
        for stream in self._streams:
            stream.copies[:] = await loop.run_in_executor(
                self._executor,
                partial(self._copies, stream.share),
            )

    def keep_only(self, used: Iterable[Stream]) -> None:
        """Gives up every other stream and its part of the pool."""
        kept = {id(stream) for stream in used}
        for stream in [s for s in self._streams if id(s) not in kept]:
            self._streams.remove(stream)
            stream.account.close()
