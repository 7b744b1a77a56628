"""The copies of one bucket between live tensors and its packed bytes, prepared once per plan.

`gather` packs a source's views (casting to the wire dtype, quantising or merging on the way);
`scatter` unpacks into a sink's views; `loaded_digest` reads what a sink now holds: in place where a
piece is one run of memory, else packed once more. All run in an executor's thread and release the
GIL in their inner loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from streamsync.layout.binding import Binding, torch_dtype
from streamsync.stages.compute import is_computed, prepare_works

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from streamsync.digest.compiled import BucketDigest, Bytes, PieceDigest
    from streamsync.layout.region import View
    from streamsync.plan.plan import Bucket, Piece, Share
    from streamsync.plan.resolve import Views

_MASK = (1 << 64) - 1


@dataclass(slots=True)
class _Run:
    """Neighbouring pieces of one wire dtype: one slice of the packed bytes, split by `numels`."""

    dtype: torch.dtype
    start: int
    stop: int
    numels: list[int]
    live: list[torch.Tensor]
    shapes: list[tuple[int, ...] | None]
    """None where the live view is one run of memory and is kept flat, so that no view is made per
    sync; else the shape that the packed slice must take."""
    catenated: bool
    """Whether all of `live` is flat, in host memory and of the wire dtype, so that one `torch.cat`
    packs it."""

    def packed(self, payload: torch.Tensor) -> list[torch.Tensor]:
        flat = payload[self.start : self.stop].view(self.dtype)
        parts = list(torch.split(flat, self.numels))
        for index, shape in enumerate(self.shapes):
            if shape is not None:
                parts[index] = parts[index].view(shape)
        return parts


class _Live(NamedTuple):
    """One piece: where its packed bytes begin, its dtype there, and its live memory (flat if that
    is one run, else of the piece's shape)."""

    offset: int
    wire: torch.dtype
    live: torch.Tensor
    is_flat: bool


def _runs(pieces: Iterable[_Live]) -> list[_Run]:
    runs: list[_Run] = []
    end = -1
    for piece in pieces:
        live = piece.live
        if not runs or runs[-1].dtype != piece.wire or piece.offset != end:
            runs.append(_Run(piece.wire, piece.offset, piece.offset, [], [], [], catenated=True))
        run = runs[-1]
        run.numels.append(live.numel())
        run.live.append(live)
        run.shapes.append(None if piece.is_flat else tuple(live.shape))
        run.catenated &= piece.is_flat and live.dtype == piece.wire and live.device.type == "cpu"
        run.stop = end = piece.offset + live.numel() * piece.wire.itemsize
    return runs


class BucketCopies:
    """One bucket of one side; `views` has one view per piece. Holds views, not memory: the binding
    keeps the storages alive."""

    def __init__(
        self,
        share: Share,
        bucket: Bucket,
        views: Sequence[View],
        binding: Binding,
        *,
        at_source: bool,
    ) -> None:
        self._pieces: list[_Live] = []
        computed: list[tuple[Piece, View]] = []
        for piece, view in zip(bucket.pieces, views, strict=True):
            tensor = share.tensors[piece.tensor]
            if at_source and is_computed(tensor, binding):
                computed.append((piece, view))
                continue
            wire = torch_dtype(tensor.wire_dtype)
            local = torch_dtype(tensor.source_dtype) if at_source else wire
            live = binding.view(view, piece.box.shape, local)
            flat = view.is_contiguous(piece.box.shape)
            self._pieces.append(_Live(piece.offset, wire, live.view(-1) if flat else live, flat))
        self._runs = _runs(self._pieces)
        self._works = prepare_works(share, computed, binding)
        self._read: _LoadedReads | None = None

    def gather(self, payload: torch.Tensor) -> None:
        """Packs the live views into `payload` (uint8 `[bucket.nbytes]`), casting and computing."""
        _gather(self._runs, payload)
        for work in self._works:
            work.run(payload)

    def scatter(self, payload: torch.Tensor) -> None:
        """Unpacks `payload` into the live views."""
        with torch.no_grad():
            for run in self._runs:
                _copy(run.live, run.packed(payload))

    def loaded_digest(self, program: BucketDigest, scratch: torch.Tensor) -> int:
        """Digest of what the live views of a sink hold now; `program` is the bucket's.

        Uses `scratch` (uint8 `[bucket.nbytes]`). One call at a time.
        """
        if self._read is None or self._read.program is not program:
            self._read = _LoadedReads.of(self._pieces, program)
        return self._read.run(scratch)


@dataclass(slots=True)
class _LoadedReads:
    """How a sink's bucket is digested: `in_place` pieces where they live, the others packed."""

    program: BucketDigest
    in_place: list[tuple[PieceDigest, Bytes]]
    packed: list[tuple[PieceDigest, int]]
    runs: list[_Run]

    @classmethod
    def of(cls, pieces: Sequence[_Live], program: BucketDigest) -> _LoadedReads:
        reads = cls(program, [], [], [])
        apart = list(program.small)
        for i, digest in program.large:
            live = pieces[i].live
            if pieces[i].is_flat and live.device.type == "cpu" and live.data_ptr() % 8 == 0:
                reads.in_place.append((digest, live.view(torch.uint8).numpy()))
            else:
                reads.packed.append((digest, pieces[i].offset))
                apart.append(i)
        reads.runs = _runs(pieces[i] for i in sorted(apart))
        return reads

    def run(self, scratch: torch.Tensor) -> int:
        _gather(self.runs, scratch)
        payload: Bytes = scratch.numpy()
        total = self.program.run_small(payload)
        total += sum(digest.run(payload[at : at + digest.nbytes]) for digest, at in self.packed)
        total += sum(digest.run(live) for digest, live in self.in_place)
        return total & _MASK


def _gather(runs: Iterable[_Run], payload: torch.Tensor) -> None:
    with torch.no_grad():
        for run in runs:
            if run.catenated and len(run.live) > 1:
                torch.cat(run.live, out=payload[run.start : run.stop].view(run.dtype))
            else:
                _copy(run.packed(payload), run.live)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    else:
        torch._foreach_copy_(targets, sources)


def prepare_copies(
    share: Share, views: Views, binding: Binding, *, at_source: bool
) -> list[BucketCopies]:
    """The copies of every bucket of `share`, in order; `views` are this end's (see `resolve`)."""
    return [
        BucketCopies(share, bucket, lie, binding, at_source=at_source)
        for bucket, lie in zip(share.buckets, views, strict=True)
    ]
