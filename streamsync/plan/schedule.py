"""In which buckets and in which order one source's boxes travel. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from streamsync.plan.plan import Bucket, Piece

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from streamsync.layout.region import Box

SMALL_BYTES: Final = 4096
"""Pieces below this are digested together: one by one, each would cost more than its bytes."""


class Part(NamedTuple):
    """A box that fits into a bucket, and its bytes on the wire."""

    box: Box
    nbytes: int


class Draft(NamedTuple):
    """Parts of one tensor on their way from one source, in order, before they have a bucket.
    `group` and `tensor` are the numbers that the share will know them by."""

    group: int
    tensor: int
    itemsize: int
    parts: Sequence[Part]


def cut(box: Box, itemsize: int, bucket_bytes: int) -> tuple[Part, ...]:
    """`box` along its outermost dims, in parts of at most `bucket_bytes` (or one element, if that
    is larger); a box that fits is not cut."""
    nbytes = box.numel * itemsize
    if nbytes <= bucket_bytes:
        return (Part(box, nbytes),)
    max_numel = max(1, bucket_bytes // itemsize)
    return tuple(Part(part, part.numel * itemsize) for part in box.cut(max_numel))


def schedule(drafts: Iterable[Draft], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Packs the drafts of one source, which come in forward order, into buckets.

    A bucket holds parts of one group and at most `bucket_bytes`, or a single larger part.
    """
    buckets: list[Bucket] = []
    packed: list[tuple[int, int, Part]] = []
    group, room = -1, 0
    for draft in drafts:
        _, tensor, itemsize, parts = draft
        if draft.group != group:
            if packed:
                buckets.append(_bucket(len(buckets), group, packed))
                packed = []
            group, room = draft.group, bucket_bytes
        for part in parts:
            if part.nbytes > room and packed:
                buckets.append(_bucket(len(buckets), group, packed))
                packed = []
                room = bucket_bytes
            packed.append((tensor, itemsize, part))
            room -= part.nbytes
    if packed:
        buckets.append(_bucket(len(buckets), group, packed))
    return tuple(buckets)


def alignment(box: Box, itemsize: int) -> int:
    """8, 4, 2 or 1: the largest unit, in bytes, that divides the length of a row of `box` and where
    it starts in the tensor's row. It divides the box's bytes, too."""
    if not box.shape:
        return math.gcd(8, itemsize)
    return math.gcd(8, box.shape[-1] * itemsize, box.start[-1] * itemsize)


def _bucket(index: int, group: int, packed: list[tuple[int, int, Part]]) -> Bucket:
    """Lays parts out one after the other: the well aligned ones first, so that they start aligned,
    and of equals the small ones last, so that a digest finds them in one run."""
    if len(packed) == 1:
        tensor, _, (box, nbytes) = packed[0]
        return Bucket(index, group, nbytes, (Piece(tensor, box, 0),))
    packed = sorted(packed, key=_place)
    pieces: list[Piece] = []
    at = 0
    for tensor, _, (box, nbytes) in packed:
        pieces.append(Piece(tensor, box, at))
        at += nbytes
    return Bucket(index, group, at, tuple(pieces))


def _place(item: tuple[int, int, Part]) -> tuple[int, bool]:
    _, itemsize, part = item
    return -alignment(part.box, itemsize), part.nbytes < SMALL_BYTES
