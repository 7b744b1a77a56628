"""convert: takes a lease and packs one bucket's views into it, in the wire dtype.

On the CPU gather and cast write straight into the leased host buffer, one pass over memory;
waiting for that lease is the backpressure. (On a GPU convert fills a staging bucket and `pin` moves
it to the lease.) The last gather is the snapshot: after it the parameters may change.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from streamsync.stages.clock import run_timed
from streamsync.stages.stream import Filled

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from streamsync.runtime.channel import SendHalf
    from streamsync.stages.clock import StageClock
    from streamsync.stages.stream import Stream


async def convert(
    stream: Stream, out: SendHalf[Filled], clock: StageClock, executor: Executor
) -> None:
    """Packs every bucket of `stream` in order and ends the output. Cancelling leaks no lease."""
    share = stream.share
    with out:
        for bucket, copies in zip(share.buckets, stream.copies, strict=True):
            with clock.blocked():
                lease = await stream.account.acquire(bucket.nbytes)
            try:
                _, start, seconds = await run_timed(executor, partial(copies.gather, lease.payload))
                clock.worked(bucket, share.groups[bucket.group], share.sink, start, seconds)
                with clock.blocked():
                    await out.send(Filled(bucket, lease), bucket.nbytes)
            except BaseException:
                lease.release()
                raise
