"""Makes the plan of one sink rank out of its layout, what the sources hold, and rules. Pure."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from streamsync.errors import PlanError
from streamsync.layout.group import group_of
from streamsync.plan.blocks import divide_blocks
from streamsync.plan.check import check_holders, check_layout
from streamsync.plan.conversion import roles
from streamsync.plan.cover import Coverage
from streamsync.plan.demand import Demand
from streamsync.plan.match import match
from streamsync.plan.plan import Plan, Share, share_digest
from streamsync.plan.refusal import Findings
from streamsync.plan.schedule import Draft, schedule
from streamsync.types import DTYPE_ITEMSIZES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from streamsync.layout.region import Layout
    from streamsync.plan.balance import Slot
    from streamsync.plan.demand import Dealt
    from streamsync.plan.holders import Holders
    from streamsync.plan.plan import Rules, SharedTensor

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def make_plan(
    *,
    sink: str,
    sink_layout: Layout,
    holders: Holders,
    rules: Rules,
    bucket_bytes: int,
    slot: Slot = (0, 1),
    membership_epoch: int = 0,
) -> Plan:
    """The proven plan of the rank `sink`: who sends it which box, in which bucket.

    Every byte that the sink's entries ask for is sent once, in the sink's dtype, by one source that
    holds it. `slot` is this sink's replica among all replicas, over which the sources' work is
    levelled. Groups without a piece (all left as they are, or only aliases) are not listed. Equal
    arguments give equal plans in every process. Raises `PlanError` that names everything that does
    not fit, when anything does not.
    """
    if bucket_bytes < 1:
        raise PlanError(f"bucket_bytes must be at least 1, got {bucket_bytes}", rank=sink)
    findings = Findings(sink)
    is_sound = check_layout(sink, sink_layout, findings)
    if not check_holders(holders, findings) or not is_sound:
        findings.refuse(len(sink_layout.tensors))
    known = roles(sink_layout.tensors, rules.quantise)
    matching = match(sink_layout, holders, rules, known, findings)
    matches, wide = divide_blocks(matching.matches, known)
    coverage = Coverage(holders, findings)
    cells = [coverage.cells(match) for match in matches]
    findings.refuse(len(sink_layout.tensors) - len(matching.aliases))

    tensors = tuple(match.tensor for match in matches)
    itemsizes = [DTYPE_ITEMSIZES[tensor.wire_dtype] for tensor in tensors]
    nbytes = {
        tensor.name: itemsize * sum(cell.numel for cell in own)
        for tensor, itemsize, own in zip(tensors, itemsizes, cells, strict=True)
    }
    demand = Demand(cells, itemsizes, bucket_bytes)
    dealt: dict[int, list[Dealt]] = {}
    for ranks, quotas in demand.divide(slot).items():
        for quota, items in zip(quotas, demand.deal(ranks, quotas), strict=True):
            if items:
                dealt.setdefault(quota.rank, []).extend(items)
    groups: dict[str, int] = {}
    fed = {
        number: _Fed(
            tensor, itemsizes[number], group, (groups.setdefault(group, len(groups)), number)
        )
        for number, tensor in enumerate(tensors)
        if cells[number]
        for group in [group_of(tensor.name)]
    }
    shares = [
        _share(holders.ranks[rank], sink, dealt[rank], fed, bucket_bytes, membership_epoch)
        for rank in sorted(dealt, key=holders.ranks.__getitem__)
    ]
    digests = {rank: holder.digest for holder in holders.classes for rank in holder.ranks}
    opaque = tuple(name for name in sink_layout.opaque if name in nbytes)
    return Plan(
        sink=sink,
        shares=tuple(shares),
        groups=tuple(groups),
        needed_bytes=sum(nbytes.values()),
        opaque_bytes=sum(nbytes[name] for name in opaque),
        tensors=tensors,
        opaque=opaque,
        left=matching.left,
        aliases=matching.aliases,
        unused=matching.unused,
        shadowed=matching.shadowed,
        wide=wide,
        slot=slot,
        layout_digests={sink: layout_digest(sink_layout)}
        | {holders.ranks[rank]: digests[rank] for rank in sorted(dealt)},
        membership_epoch=membership_epoch,
    )


def layout_digest(layout: Layout) -> str:
    """128 bits of everything in a layout, in hex; equal in every process for equal layouts."""
    return hashlib.blake2b(_encode(layout), digest_size=16).hexdigest()


class _Fed(NamedTuple):
    """A tensor that bytes travel for. `place` orders tensors by their groups, and these by their
    first tensors."""

    tensor: SharedTensor
    itemsize: int
    group: str
    place: tuple[int, int]


def _share(
    source: str,
    sink: str,
    dealt: Iterable[Dealt],
    fed: Mapping[int, _Fed],
    bucket_bytes: int,
    membership_epoch: int,
) -> Share:
    """What `source` sends, in forward order."""
    tensors: dict[int, int] = {}
    groups: dict[str, int] = {}
    drafts = [
        Draft(
            groups.setdefault(fed[number].group, len(groups)),
            tensors.setdefault(number, len(tensors)),
            fed[number].itemsize,
            parts,
        )
        for number, parts in sorted(dealt, key=lambda item: fed[item[0]].place)
    ]
    share = Share(
        source=source,
        sink=sink,
        tensors=tuple(fed[number].tensor for number in tensors),
        groups=tuple(groups),
        buckets=schedule(drafts, bucket_bytes),
        digest=0,
        membership_epoch=membership_epoch,
    )
    return msgspec.structs.replace(share, digest=share_digest(share))
