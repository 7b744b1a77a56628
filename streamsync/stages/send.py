"""send: gives each bucket to one peer's link as far as that peer's credits reach."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streamsync.errors import TransferTimeout
from streamsync.runtime.channel import EndOfStream

if TYPE_CHECKING:
    from streamsync.runtime.channel import ReceiveHalf
    from streamsync.stages.clock import StageClock
    from streamsync.stages.stream import Filled, Stream
    from streamsync.transports.base import SendLink

_MASK = (1 << 64) - 1


@dataclass(slots=True)
class Credits:
    """The payload bytes that a sink allows in this sync, in all. Grants only grow; late or repeated
    ones change nothing."""

    granted_bytes: int = 0
    _grown: asyncio.Event = field(default_factory=asyncio.Event)

    def grant(self, granted_bytes: int) -> None:
        """The sink's latest word."""
        if granted_bytes > self.granted_bytes:
            self.granted_bytes = granted_bytes
            self._grown.set()

    async def reach(self, needed_bytes: int) -> None:
        """Returns when `needed_bytes` in all are granted."""
        while self.granted_bytes < needed_bytes:
            self._grown.clear()
            await self._grown.wait()


@dataclass(slots=True, frozen=True)
class Sent:
    """All buckets have left: payload bytes, and the 64-bit sum of their digests."""

    wire_bytes: int
    digest: int


async def send(
    stream: Stream,
    source: ReceiveHalf[Filled],
    link: SendLink,
    peer: str,
    credits: Credits,
    clock: StageClock,
    *,
    progress_seconds: float,
) -> Sent:
    """Sends every bucket of `source` and waits until the link has them.

    Raises the link's `PeerLost`, or `TransferTimeout` when the link takes nothing for
    `progress_seconds`. On any error or cancel the leases go back; a frame may then be cut short, so
    the caller must abort the link if anything was sent.
    """
    share = stream.share
    before = link.wire_bytes
    needed = 0
    digest = 0
    try:
        while True:
            with clock.blocked():
                try:
                    filled = await source.receive()
                except EndOfStream:
                    break
            bucket = filled.bucket
            try:
                needed += bucket.nbytes
                with clock.blocked():
                    await credits.reach(needed)
                start = time.monotonic()
                try:
                    async with asyncio.timeout(progress_seconds):
                        await link.send(filled.lease)
                except TimeoutError:
                    raise TransferTimeout(
                        f"the peer took nothing for {progress_seconds:g} s: it is stopped or stuck",
                        peer=peer,
                        bucket=bucket.index,
                        stage="send",
                    ) from None
                clock.worked(
                    bucket, share.groups[bucket.group], peer, start, time.monotonic() - start
                )
                digest = (digest + (filled.digest or 0)) & _MASK
            finally:
                filled.lease.release()
        async with asyncio.timeout(progress_seconds):
            await link.flush()
    except TimeoutError:
        raise TransferTimeout(
            f"the last buckets did not leave within {progress_seconds:g} s", peer=peer, stage="send"
        ) from None
    finally:
        for left in source.close():
            left.lease.release()
    return Sent(link.wire_bytes - before, digest)
