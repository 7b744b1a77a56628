"""Whether a layout or a share that came from a peer is sound, before anything trusts it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamsync.errors import LayoutError, PlanError
from streamsync.plan.plan import share_digest
from streamsync.plan.refusal import Findings, head

if TYPE_CHECKING:
    from streamsync.layout.region import Box, Layout, View
    from streamsync.plan.holders import Holders
    from streamsync.plan.plan import Share


def check_layout(rank: str, layout: Layout, findings: Findings) -> bool:
    """Whether the layout of `rank` is consistent in itself. Finding: layout."""
    names = {spec.name for spec in layout.tensors}
    good = True

    def refuse(tensor: str, text: str) -> None:
        nonlocal good
        good = False
        findings.add("layout", tensor, f"{tensor} of {rank}: {text}")

    if len(names) != len(layout.tensors):
        seen: set[str] = set()
        for spec in layout.tensors:
            if spec.name in seen:
                refuse(spec.name, "listed twice")
            seen.add(spec.name)
    for alias, name in layout.ties.items():
        if alias not in names or name not in names or name in layout.ties:
            refuse(alias, f"tied to {name}, but both must be listed and {name} not tied itself")
    for entry in layout.entries:
        if not 0 <= entry.tensor < len(layout.tensors):
            refuse(f"number {entry.tensor}", f"only {len(layout.tensors)} tensors are listed")
            continue
        spec, box = layout.tensors[entry.tensor], entry.box
        shape = spec.shape
        if not len(box.start) == len(box.shape) == len(entry.view.strides) == len(shape):
            refuse(spec.name, f"box, view and tensor differ in the number of dims ({len(shape)})")
            continue
        for a, n, size in zip(box.start, box.shape, shape, strict=True):
            if a < 0 or n < 0 or a + n > size:
                refuse(spec.name, f"box {box} lies outside of shape {list(shape)}")
                break
    return good


def check_source(rank: str, layout: Layout) -> None:
    """Raises `LayoutError` unless a source may publish `layout`: it is consistent, and no box of a
    tensor lies in two places, which could hold two different values."""
    findings = Findings(rank)
    if not check_layout(rank, layout, findings):
        raise LayoutError("; ".join(head(findings.texts("layout"))), rank=rank)
    places: dict[tuple[int, Box], View] = {}
    for entry in layout.entries:
        known = places.setdefault((entry.tensor, entry.box), entry.view)
        if known != entry.view and entry.box.numel:
            raise LayoutError(
                f"{entry.box} of it is held in two places, and nothing says whose values count; "
                "publish each box once",
                tensor=layout.tensors[entry.tensor].name,
                rank=rank,
            )


def check_holders(holders: Holders, findings: Findings) -> bool:
    """Whether what the hub answered is consistent in itself. Finding: layout."""
    found: list[tuple[str, str]] = []
    for holder in holders.classes:
        ranks = holder.ranks
        if not ranks or min(ranks) < 0 or max(ranks) >= len(holders.ranks):
            found.append(("", f"ranks {ranks} of {len(holders.ranks)}"))
    for record in (*(r for holder in holders.classes for r in holder.records), *holders.catalogue):
        if record.pattern.count("{}") != len(record.numbers):
            found.append((record.pattern, f"{len(record.numbers)} sets of numbers"))
        for box in record.boxes:
            if not _is_within(box, record.shape):
                text = f"box {box.start} {box.shape} is no part of shape {list(record.shape)}"
                found.append((record.pattern, text))
    for tensor, text in found:
        findings.add("layout", tensor, f"{tensor} of the sources: {text}")
    return not found


def _is_within(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box.start) == len(box.shape) == len(shape) and all(
        a >= 0 and n >= 0 and a + n <= size
        for a, n, size in zip(box.start, box.shape, shape, strict=True)
    )


def check_share(share: Share) -> None:
    """Raises `PlanError` unless `share` is consistent in itself: packed without gaps, numbered in
    order, its digest that of its content. Whether it fits a layout, `resolve` finds out."""

    def refusal(what: str, tensor: str | None = None, bucket: int | None = None) -> PlanError:
        return PlanError(
            f"the share that {share.sink} made for {share.source} is malformed: {what}; the peer "
            "is broken or runs another version: plan again",
            rank=share.source,
            peer=share.sink,
            tensor=tensor,
            bucket=bucket,
        )

    if share.digest != share_digest(share):
        raise refusal("its digest is not that of its content")
    wires = [tensor.wire for tensor in share.tensors]
    itemsizes = [wire.itemsize for wire in wires]
    for index, bucket in enumerate(share.buckets):
        if bucket.index != index or not 0 <= bucket.group < len(share.groups):
            raise refusal("its buckets are not numbered in order", bucket=index)
        at = 0
        for piece in bucket.pieces:
            if not 0 <= piece.tensor < len(wires):
                raise refusal(f"it has no tensor number {piece.tensor}", bucket=index)
            wire, box = wires[piece.tensor], piece.box
            if not len(wire.shape) == len(box.start) == len(box.shape):
                raise refusal("a box and its tensor differ in dims", wire.name, index)
            numel = 1
            for a, n, size in zip(box.start, box.shape, wire.shape, strict=True):
                if a < 0 or n < 1 or a + n > size:
                    raise refusal(f"box {box} is empty or lies outside of it", wire.name, index)
                numel *= n
            if piece.offset != at:
                raise refusal(f"a piece begins at byte {piece.offset}, not {at}", wire.name, index)
            at += numel * itemsizes[piece.tensor]
        if not 0 < at == bucket.nbytes:
            raise refusal(f"{bucket.nbytes} bytes said, {at} bytes packed", bucket=index)
