"""What passes between stages: a stream's buckets at a source, a feed's buckets at a sink."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamsync.digest.compiled import BucketDigest
    from streamsync.plan.plan import Bucket, Share
    from streamsync.runtime.pool import Account, Lease
    from streamsync.stages.copies import BucketCopies


@dataclass(slots=True, frozen=True)
class Stream:
    """What a source repeats in every sync for the sinks that share these buckets: one convert and
    one pin, then one send a peer. `account` is their common right to the source's pool."""

    share: Share
    copies: list[BucketCopies]
    digests: list[BucketDigest] | None
    account: Account


@dataclass(slots=True, frozen=True)
class Filled:
    """A bucket whose payload (and, after `pin`, header) stands in `lease`, of which the holder owns
    one reference. `digest` is None before `pin` and when digests are off."""

    bucket: Bucket
    lease: Lease
    digest: int | None = None


@dataclass(slots=True, frozen=True)
class Received:
    """A bucket that arrived at a sink from feed number `feed`; the holder owns its lease.
    `digest` is the source's, None when digests are off."""

    feed: int
    bucket: Bucket
    lease: Lease
    digest: int | None
