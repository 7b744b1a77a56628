"""The copies of one bucket between live tensors and its packed bytes, prepared once per plan.

`gather` packs a source's views (casting to the wire dtype on the way); `scatter` unpacks into a
sink's views; `read_back` packs again what a sink now holds, so that the digest is that of the
loaded bytes. All run in an executor's thread and release the GIL in their inner loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from streamsync.layout.binding import Binding, torch_dtype

if TYPE_CHECKING:
    from streamsync.plan.plan import Bucket, Share


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
    """Whether all of `live` is flat and of the wire dtype, so that one `torch.cat` packs it."""

    def packed(self, payload: torch.Tensor) -> list[torch.Tensor]:
        flat = payload[self.start : self.stop].view(self.dtype)
        parts = list(torch.split(flat, self.numels))
        for index, shape in enumerate(self.shapes):
            if shape is not None:
                parts[index] = parts[index].view(shape)
        return parts


class BucketCopies:
    """One bucket of one side. Holds views, not memory: the binding keeps the storages alive."""

    def __init__(self, share: Share, bucket: Bucket, binding: Binding, *, at_source: bool) -> None:
        self._runs: list[_Run] = []
        end = -1
        for piece in bucket.pieces:
            tensor = share.tensors[piece.tensor]
            wire = torch_dtype(tensor.wire_dtype)
            local = torch_dtype(tensor.source_dtype) if at_source else wire
            numel = piece.box.numel
            live = binding.view(piece.view, piece.box.shape, local)
            flat = piece.view.is_contiguous(piece.box.shape)
            run = self._runs[-1] if self._runs else None
            if run is None or run.dtype != wire or piece.offset != end:
                run = _Run(wire, piece.offset, piece.offset, [], [], [], catenated=True)
                self._runs.append(run)
            run.numels.append(numel)
            run.live.append(live.view(-1) if flat else live)
            run.shapes.append(None if flat else piece.box.shape)
            run.catenated &= flat and local == wire
            run.stop = end = piece.offset + numel * wire.itemsize

    def gather(self, payload: torch.Tensor) -> None:
        """Packs the live views into `payload` (uint8 `[bucket.nbytes]`), casting."""
        with torch.no_grad():
            for run in self._runs:
                if run.catenated and len(run.live) > 1:
                    out = payload[run.start : run.stop].view(run.dtype)
                    torch.cat(run.live, out=out)
                else:
                    _copy(run.packed(payload), run.live)

    def scatter(self, payload: torch.Tensor) -> None:
        """Unpacks `payload` into the live views."""
        with torch.no_grad():
            for run in self._runs:
                _copy(run.live, run.packed(payload))

    read_back = gather


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    else:
        torch._foreach_copy_(targets, sources)


def prepare_copies(share: Share, binding: Binding, *, at_source: bool) -> list[BucketCopies]:
    """The copies of every bucket of `share`, in order."""
    return [BucketCopies(share, bucket, binding, at_source=at_source) for bucket in share.buckets]
