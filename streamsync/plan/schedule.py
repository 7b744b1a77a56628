"""In which buckets and in which order one source's boxes travel. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from streamsync.layout.region import Box, View

SMALL_BYTES: Final = 4096
"""Pieces below this are digested together: one by one, each would cost more than its bytes."""


class Draft(NamedTuple):
    """A box on its way from one source to the sink, before it has a bucket.

    `group` and `tensor` are positions in forward order; the views are those of `source_box` and
    `sink_box`, which both contain `box`.
    """

    group: int
    tensor: int
    box: Box
    itemsize: int
    source_box: Box
    source_view: View
    sink_box: Box
    sink_view: View

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.box.numel * self.itemsize


class Load(NamedTuple):
    """One bucket's drafts in the order they are packed, and the offset of each in bytes."""

    group: int
    nbytes: int
    drafts: list[Draft]
    offsets: list[int]


def schedule(drafts: Iterable[Draft], bucket_bytes: int) -> list[Load]:
    """Packs the drafts of one source into buckets, in forward order.

    A bucket holds drafts of one group and at most `bucket_bytes` (or one element, if that is
    larger). A draft that is larger is cut along its outermost dims; no other one is.
    """
    loads: list[Load] = []
    packed: list[Draft] = []
    room = 0
    ordered = sorted(drafts, key=lambda d: (d.group, d.tensor, d.box.start))
    for draft in _cut(ordered, bucket_bytes):
        nbytes = draft.nbytes
        if packed and (nbytes > room or draft.group != packed[0].group):
            loads.append(_load(packed))
            packed = []
        if not packed:
            room = bucket_bytes
        packed.append(draft)
        room -= nbytes
    if packed:
        loads.append(_load(packed))
    return loads


def alignment(box: Box, itemsize: int) -> int:
    """8, 4, 2 or 1: the largest unit, in bytes, that divides the length of a row of `box` and where
    it starts in the tensor's row. It divides the box's bytes, too."""
    if not box.shape:
        return math.gcd(8, itemsize)
    return math.gcd(8, box.shape[-1] * itemsize, box.start[-1] * itemsize)


def _cut(drafts: Sequence[Draft], bucket_bytes: int) -> Iterator[Draft]:
    for draft in drafts:
        if draft.nbytes <= bucket_bytes:
            yield draft
        else:
            max_numel = max(1, bucket_bytes // draft.itemsize)
            for box in draft.box.cut(max_numel):
                yield draft._replace(box=box)


def _load(drafts: list[Draft]) -> Load:
    """Lays drafts out one after the other: the well aligned ones first, so that they start aligned,
    and of equals the small ones last, so that a digest finds them in one run."""
    if len(drafts) > 1:
        drafts = sorted(
            drafts, key=lambda d: (-alignment(d.box, d.itemsize), d.nbytes < SMALL_BYTES)
        )
    offsets: list[int] = []
    at = 0
    for draft in drafts:
        offsets.append(at)
        at += draft.nbytes
    return Load(drafts[0].group, at, drafts, offsets)
