"""The records of a plan: pieces, buckets, shares. Made by `planner`, read by stages. Pure."""

from __future__ import annotations

import hashlib

import msgspec

from streamsync.layout.region import Box, TensorSpec
from streamsync.plan.conversion import Conversion, QuantRule, Wide

_encode = msgspec.msgpack.Encoder().encode


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One box on its way from one source to one sink.

    `tensor` indexes `Share.tensors`; `offset` is where the piece starts in its bucket, in bytes;
    in the bucket it lies row-major in the wire dtype. Where it lies at either end is that end's own
    business: see `resolve`.
    """

    tensor: int
    box: Box
    offset: int


class Bucket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The unit that travels: pieces of one group, packed without gaps, in one lease.

    `index` counts from 0 within the share, in sending order; `group` indexes `Share.groups`.
    """

    index: int
    group: int
    nbytes: int
    pieces: tuple[Piece, ...]


class SharedTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor of a share: the sink's canonical name (the digest's key) and the name that the
    source holds it by, global shape on the wire, the dtype at the source, the wire dtype, and how
    it is made where it is not the source's tensor itself (at most cast)."""

    name: str
    source_name: str
    shape: tuple[int, ...]
    source_dtype: str
    wire_dtype: str
    conversion: Conversion | None = None

    @property
    def wire(self) -> TensorSpec:
        """The tensor as it travels."""
        return TensorSpec(self.name, self.shape, self.wire_dtype)


class Share(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one source rank sends to one sink rank in every sync; both hold the same one.

    `digest` (64 bits of tensors, groups and buckets, without ranks) travels in every bucket's
    header; replicas that take the same from a source have it in common, and so share their buckets.
    """

    source: str
    sink: str
    tensors: tuple[SharedTensor, ...]
    groups: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    digest: int
    membership_epoch: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def max_bucket_bytes(self) -> int:
        """Bytes of the largest bucket; 0 for an empty share."""
        return max((bucket.nbytes for bucket in self.buckets), default=0)


def share_digest(share: Share) -> int:
    """64 bits of what both ends must agree on, and of what replicas of equal layout have in common:
    tensors, groups and buckets, but no ranks."""
    content = (share.tensors, share.groups, share.buckets)
    return int.from_bytes(hashlib.blake2b(_encode(content), digest_size=8).digest(), "little")


class Waiver(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sink tensor (a name or an fnmatch pattern) that a sync may leave as it is, and why."""

    pattern: str
    reason: str


class CastRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Allows tensors whose names match `pattern` (fnmatch) to change dtype on the way."""

    source: str
    sink: str
    pattern: str = "*"


class Rename(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names at the source that begin with `source` begin with `sink` at the sink."""

    source: str
    sink: str


class Rules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a sink allows beyond a one-to-one match of names, shapes and dtypes.

    `unused` are fnmatch patterns of source tensors that nobody needs here; `ties` maps sink names
    to the source name whose values they take (`{"lm_head.weight": "model.embed_tokens.weight"}`).
    `subset` declares that syncs move a part of the model (an adapter, a tower): fnmatch patterns of
    sink tensors; each of these is covered or refused as always, all others are left as they are.
    `quantise` says which tensors become fp8, and how.
    """

    casts: tuple[CastRule, ...] = ()
    renames: tuple[Rename, ...] = ()
    waivers: tuple[Waiver, ...] = ()
    unused: tuple[str, ...] = ()
    ties: dict[str, str] = {}
    subset: tuple[str, ...] = ()
    quantise: tuple[QuantRule, ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The proof and the work list of one sink rank.

    `shares` holds one share per source that sends anything, ordered by the sources' names. `groups`
    lists every group in forward order. `left` names tensors left as they are, with the waiver's
    reason; `aliases` names sink tensors that share the memory of another one (sent once);
    `shadowed` those of them that a source holds apart from what feeds that memory: its values for
    them go unused. `opaque` names the tensors that travel whole for the sink's own loader; their
    `opaque_bytes` are counted in `needed_bytes`, too. `wide` lists what the sink quantises itself,
    because no source can. `slot` is (index, count): the sink's replica among all. `layout_digests`
    are those of the sink's layout, and of what each of its sources holds.
    """

    sink: str
    shares: tuple[Share, ...]
    groups: tuple[str, ...]
    needed_bytes: int
    tensors: tuple[SharedTensor, ...]
    opaque: tuple[str, ...] = ()
    opaque_bytes: int = 0
    left: dict[str, str] = {}
    aliases: dict[str, str] = {}
    shadowed: dict[str, str] = {}
    wide: tuple[Wide, ...] = ()
    unused: tuple[str, ...] = ()
    slot: tuple[int, int] = (0, 1)
    layout_digests: dict[str, str] = {}
    membership_epoch: int = 0
