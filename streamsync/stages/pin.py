"""pin: makes the bucket in its host lease final: its digest and its header.

On the CPU the bytes are in the lease already, so this stage reads them once for the digest. (On a
GPU it copies the staging bucket to the pinned lease; the digest was computed on the device.)
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from streamsync.runtime.channel import BrokenChannel, EndOfStream
from streamsync.runtime.header import BucketHeader
from streamsync.stages.clock import run_timed
from streamsync.stages.stream import Filled

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor

    from streamsync.digest.compiled import BucketDigest
    from streamsync.runtime.channel import ReceiveHalf, SendHalf
    from streamsync.runtime.pool import Lease
    from streamsync.stages.clock import StageClock
    from streamsync.stages.stream import Stream
    from streamsync.types import Version


async def pin(
    stream: Stream,
    version: Version,
    source: ReceiveHalf[Filled],
    outs: Sequence[SendHalf[Filled]],
    clock: StageClock,
    executor: Executor,
) -> None:
    """Finishes every bucket of `source` and gives it to each of `outs` (one a peer), which then
    hold one reference each. A peer whose half is closed gets no more. Cancelling leaks no lease."""
    share = stream.share
    try:
        while True:
            with clock.blocked():
                try:
                    filled = await source.receive()
                except EndOfStream:
                    return
            bucket, lease = filled.bucket, filled.lease
            program = None if stream.digests is None else stream.digests[bucket.index]

            def finish(
                program: BucketDigest | None = program,
                lease: Lease = lease,
                bucket_index: int = bucket.index,
                group: int = bucket.group,
            ) -> int | None:
                digest = None if program is None else program.run(lease.array)
                BucketHeader(
                    version, share.digest, bucket_index, group, lease.nbytes, digest
                ).write(lease.header)
                return digest

            try:
                digest, start, seconds = await run_timed(executor, partial(finish))
                clock.worked(bucket, share.groups[bucket.group], share.sink, start, seconds)
                done = Filled(bucket, lease, digest)
                for out in outs:
                    lease.retain()
                    try:
                        with clock.blocked():
                            await out.send(done, bucket.nbytes)
                    except BrokenChannel:  # that peer dropped out; the others go on
                        lease.release()
                    except BaseException:
                        lease.release()
                        raise
            finally:
                lease.release()
    finally:
        for out in outs:
            out.close()
        for left in source.close():
            left.lease.release()
