"""Makes the plan of one sink rank out of layouts and rules. Pure."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from streamsync.errors import PlanError
from streamsync.layout.group import group_of
from streamsync.plan.balance import balance
from streamsync.plan.check import check_layout
from streamsync.plan.cover import cover
from streamsync.plan.match import match
from streamsync.plan.plan import Bucket, Piece, Plan, Rules, Share, SharedTensor, share_digest
from streamsync.plan.refusal import Findings
from streamsync.plan.schedule import Draft, schedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from streamsync.layout.region import Box, Layout, View
    from streamsync.plan.schedule import Load

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def make_plan(
    *,
    sink: str,
    sink_layout: Layout,
    sources: Mapping[str, Layout],
    rules: Rules,
    bucket_bytes: int,
    membership_epoch: int = 0,
) -> Plan:
    """The proven plan of the rank `sink`: who sends it which box, in which bucket.

    `sources` maps source rank names to their layouts; the order of the mapping does not matter.
    Every byte that the sink's entries ask for is sent once, in the sink's dtype, by one source that
    holds it. Groups without a piece (all left as they are, or only aliases) are not listed. Raises
    `PlanError` that names everything that does not fit, when anything does not.
    """
    if bucket_bytes < 1:
        raise PlanError(f"bucket_bytes must be at least 1, got {bucket_bytes}", rank=sink)
    findings = Findings(sink)
    good = check_layout(sink, sink_layout, findings)
    for rank in sorted(sources):
        good &= check_layout(rank, sources[rank], findings)
    if not good:
        findings.refuse(len(sink_layout.tensors))
    matching = match(sink_layout, sources, rules, findings)
    cells = cover(matching.matches, findings)
    findings.refuse(len(sink_layout.tensors) - len(matching.aliases))

    tensors = tuple(
        SharedTensor(m.sink.name, m.sink.shape, m.source.dtype, m.sink.dtype)
        for m in matching.matches
    )
    itemsizes = [m.sink.itemsize for m in matching.matches]
    groups: dict[str, int] = {}
    group_numbers = [0] * len(tensors)
    for cell in cells:
        name = group_of(tensors[cell.match].name)
        group_numbers[cell.match] = groups.setdefault(name, len(groups))
    chosen = balance(
        [cell.box.numel * itemsizes[cell.match] for cell in cells],
        [[holding.rank for holding in cell.holdings] for cell in cells],
    )
    by_source: defaultdict[str, list[Draft]] = defaultdict(list)
    for cell, choice in zip(cells, chosen, strict=True):
        holding = cell.holdings[choice]
        by_source[holding.rank].append(
            Draft(
                group_numbers[cell.match],
                cell.match,
                cell.box,
                itemsizes[cell.match],
                holding.box,
                holding.view,
                cell.entry.box,
                cell.entry.view,
            )
        )
    pairs = [
        _shares(rank, sink, tensors, tuple(groups), loads, membership_epoch)
        for rank in sorted(by_source)
        for loads in [schedule(by_source[rank], bucket_bytes)]
    ]
    return Plan(
        sink=sink,
        source_shares=tuple(ours for ours, _ in pairs),
        sink_shares=tuple(theirs for _, theirs in pairs),
        groups=tuple(groups),
        needed_bytes=sum(cell.box.numel * itemsizes[cell.match] for cell in cells),
        tensors=tensors,
        left=matching.left,
        aliases=matching.aliases,
        unused=matching.unused,
        shadowed=matching.shadowed,
        layout_digests={
            rank: layout_digest(layout)
            for rank, layout in [(sink, sink_layout), *sorted(sources.items())]
        },
        membership_epoch=membership_epoch,
    )


def layout_digest(layout: Layout) -> str:
    """128 bits of everything in a layout, in hex; equal in every process for equal layouts."""
    return hashlib.blake2b(_encode(layout), digest_size=16).hexdigest()


def _shares(
    source: str,
    sink: str,
    tensors: Sequence[SharedTensor],
    groups: Sequence[str],
    loads: Sequence[Load],
    membership_epoch: int,
) -> tuple[Share, Share]:
    """One source's part of the plan, as the source and as the sink see it."""
    tensor_numbers: dict[int, int] = {}
    group_numbers: dict[int, int] = {}
    sides: tuple[list[Bucket], list[Bucket]] = ([], [])
    for index, load in enumerate(loads):
        group = group_numbers.setdefault(load.group, len(group_numbers))
        ours: list[Piece] = []
        theirs: list[Piece] = []
        for draft, offset in zip(load.drafts, load.offsets, strict=True):
            tensor = tensor_numbers.setdefault(draft.tensor, len(tensor_numbers))
            box = draft.box
            view = _within(draft.source_view, draft.source_box, box)
            ours.append(Piece(tensor, box, offset, view))
            view = _within(draft.sink_view, draft.sink_box, box)
            theirs.append(Piece(tensor, box, offset, view))
        sides[0].append(Bucket(index, group, load.nbytes, tuple(ours)))
        sides[1].append(Bucket(index, group, load.nbytes, tuple(theirs)))
    share = Share(
        source=source,
        sink=sink,
        tensors=tuple(tensors[t] for t in tensor_numbers),
        groups=tuple(groups[g] for g in group_numbers),
        buckets=tuple(sides[0]),
        digest=0,
        membership_epoch=membership_epoch,
    )
    digest = share_digest(share)
    return (
        msgspec.structs.replace(share, digest=digest),
        msgspec.structs.replace(share, digest=digest, buckets=tuple(sides[1])),
    )


def _within(view: View, outer: Box, inner: Box) -> View:
    return view if outer == inner else view.within(outer, inner)
