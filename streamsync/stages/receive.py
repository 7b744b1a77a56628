"""receive: grants credits for the buckets that there are leases for, and takes them off the link.

Buckets come in the plan's order, so their sizes are known and their leases can be taken ahead:
the bytes land where they stay until they are loaded.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from streamsync.errors import IntegrityError, TransferTimeout
from streamsync.runtime.header import BucketHeader
from streamsync.stages.stream import Received

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamsync.plan.plan import Bucket, Share
    from streamsync.runtime.channel import SendHalf
    from streamsync.runtime.pool import Account, Lease
    from streamsync.stages.clock import StageClock
    from streamsync.transports.base import ReceiveLink
    from streamsync.types import Version

_COALESCED = 8
"""Credits are told in at most about this many messages a sync when leases abound."""


class Receiver:
    """One feed (one source's share) of one sync.

    `account` is None on an in-place link: the bytes stay in the source's leases, whose number the
    source bounds. `grant(bytes)` tells the source its cumulative credit; `starved()` is called when
    the next bucket must wait for a lease.
    """

    def __init__(
        self,
        feed: int,
        share: Share,
        link: ReceiveLink,
        account: Account | None,
        version: Version,
        *,
        progress_seconds: float,
        grant: Callable[[int], None],
        starved: Callable[[], None],
    ) -> None:
        self._feed = feed
        self._share = share
        self._link = link
        self._account = account
        self._version = version
        self._progress_seconds = progress_seconds
        self._grant = grant
        self._starved = starved
        self._leases: asyncio.Queue[Lease | None] = asyncio.Queue()
        self.digest = 0
        """Sum of the digests that the headers carried, to compare with the source's `End`."""
        self.granted_bytes = 0

    async def run(self, out: SendHalf[Received], clock: StageClock) -> None:
        """Receives all buckets. On an error or cancel, leases not handed on stay out until the
        caller has aborted the link and called `release_left`."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take_leases())
            tasks.create_task(self._take_frames(out, clock))

    async def _take_leases(self) -> None:
        told = 0
        step = max(1, self._share.nbytes // _COALESCED)
        for bucket in self._share.buckets:
            lease = None
            if self._account is not None:
                lease = self._account.try_acquire(bucket.nbytes)
                if lease is None:
                    if self.granted_bytes > told:
                        told = self.granted_bytes
                        self._grant(told)
                    self._starved()
                    lease = await self._account.acquire(bucket.nbytes)
            self._leases.put_nowait(lease)
            self.granted_bytes += bucket.nbytes
            if self.granted_bytes - told >= step and self._account is not None:
                told = self.granted_bytes
                self._grant(told)
        if self.granted_bytes > told:
            self._grant(self.granted_bytes)

    async def _take_frames(self, out: SendHalf[Received], clock: StageClock) -> None:
        share = self._share
        for bucket in share.buckets:
            with clock.blocked():
                lease = await self._leases.get()
            waited = self._link.waiting_seconds
            start = time.monotonic()
            self._pending = lease
            try:
                async with asyncio.timeout(self._progress_seconds):
                    landed = await self._link.receive(lease, bucket.nbytes)
            except TimeoutError:
                raise TransferTimeout(
                    f"nothing came for {self._progress_seconds:g} s: the source is stopped",
                    peer=share.source,
                    bucket=bucket.index,
                    stage="receive",
                ) from None
            waited = self._link.waiting_seconds - waited
            try:
                digest = self._check(bucket, landed)
                clock.add_blocked(waited)
                seconds = time.monotonic() - start - waited
                clock.worked(
                    bucket, share.groups[bucket.group], share.source, start + waited, seconds
                )
                self.digest = (self.digest + (digest or 0)) & ((1 << 64) - 1)
                self._pending = None
                with clock.blocked():
                    await out.send(Received(self._feed, bucket, landed, digest), bucket.nbytes)
            except BaseException:
                self._pending = None
                landed.release()
                raise

    _pending: Lease | None = None

    def _check(self, bucket: Bucket, lease: Lease) -> int | None:
        header = BucketHeader.read(lease.header)
        expected = (self._version, self._share.digest, bucket.index, bucket.group, bucket.nbytes)
        found = (header.version, header.share_digest, header.index, header.group, header.nbytes)
        if found != expected:
            raise IntegrityError(
                f"a frame that does not belong here: version {found[0]}, share {found[1]:x}, "
                f"bucket {found[2]}, group {found[3]}, {found[4]} bytes; expected version "
                f"{expected[0]}, share {expected[1]:x}, bucket {expected[2]}, group {expected[3]}, "
                f"{expected[4]} bytes",
                peer=self._share.source,
                bucket=bucket.index,
                stage="receive",
            )
        return header.digest

    def release_left(self) -> None:
        """Releases leases that were taken but not handed on; call after the link was aborted."""
        if self._pending is not None:
            self._pending.release()
            self._pending = None
        while not self._leases.empty():
            lease = self._leases.get_nowait()
            if lease is not None:
                lease.release()
