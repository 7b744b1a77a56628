"""Whether a layout or a share that came from a peer is sound, before anything trusts it. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING

from streamsync.errors import PlanError
from streamsync.plan.plan import share_digest

if TYPE_CHECKING:
    from streamsync.layout.region import Entry, Layout
    from streamsync.plan.plan import Piece, Share
    from streamsync.plan.refusal import Findings


def check_layout(rank: str, layout: Layout, findings: Findings) -> bool:
    """Whether `layout` is consistent in itself: a peer may have sent anything. Finding: layout."""
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
        dims = len(spec.shape)
        if not len(box.start) == len(box.shape) == len(entry.view.strides) == dims:
            refuse(spec.name, f"box, view and tensor differ in the number of dims ({dims})")
        elif any(
            a < 0 or n < 0 or a + n > size
            for a, n, size in zip(box.start, box.shape, spec.shape, strict=True)
        ):
            refuse(spec.name, f"box {box} lies outside of shape {list(spec.shape)}")
    return good


def _offset(entry: Entry) -> int:
    return entry.view.offset


def check_share(share: Share, layout: Layout) -> None:
    """Raises `PlanError` unless `share` moves nothing but boxes of `layout`, packed without gaps.

    A source calls it on the share that a sink made for it: every view must be the view of its box
    within one of the source's own entries, so that nothing else is ever read or sent.
    """

    def refusal(what: str, tensor: str | None = None, bucket: int | None = None) -> PlanError:
        return PlanError(
            f"the share that {share.sink} made for {share.source} does not fit it: {what}; "
            "the layout has changed or the peer is broken: plan again",
            rank=share.source,
            peer=share.sink,
            tensor=tensor,
            bucket=bucket,
        )

    if share.digest != share_digest(share):
        raise refusal("its digest is not that of its content")
    entries: defaultdict[tuple[int, tuple[int, ...]], list[Entry]] = defaultdict(list)
    for entry in layout.entries:
        entries[entry.view.storage, entry.view.strides].append(entry)
    for places in entries.values():
        places.sort(key=_offset)

    def is_ours(piece: Piece) -> bool:
        tensor = share.tensors[piece.tensor]
        places = entries.get((piece.view.storage, piece.view.strides), [])
        # Backwards from where the piece begins: in one flat buffer the first is nearly always it.
        for i in range(bisect_right(places, piece.view.offset, key=_offset) - 1, -1, -1):
            entry = places[i]
            spec = layout.tensors[entry.tensor]
            if (
                (spec.shape, spec.dtype) == (tensor.shape, tensor.source_dtype)
                and entry.box.contains(piece.box)
                and entry.view.within(entry.box, piece.box) == piece.view
            ):
                return True
        return False

    for index, bucket in enumerate(share.buckets):
        if bucket.index != index or not 0 <= bucket.group < len(share.groups):
            raise refusal("its buckets are not numbered in order", bucket=index)
        at = 0
        for piece in bucket.pieces:
            if not 0 <= piece.tensor < len(share.tensors):
                raise refusal(f"it has no tensor number {piece.tensor}", bucket=index)
            wire = share.tensors[piece.tensor].wire
            dims = {len(wire.shape), len(piece.box.start), len(piece.box.shape)}
            if dims != {len(piece.view.strides)} or min(piece.box.shape, default=1) < 1:
                raise refusal("a box and its view differ in dims, or it is empty", wire.name, index)
            if not is_ours(piece):
                raise refusal(
                    f"no entry of the layout holds box {piece.box} there", wire.name, index
                )
            if piece.offset != at:
                raise refusal(f"a piece begins at byte {piece.offset}, not {at}", wire.name, index)
            at += piece.box.numel * wire.itemsize
        if not 0 < at == bucket.nbytes:
            raise refusal(f"{bucket.nbytes} bytes said, {at} bytes packed", bucket=index)
