"""The part of a DTensor that this rank holds: global boxes and the local memory of each."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from streamsync.errors import LayoutError
from streamsync.layout.region import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.tensor.placement_types import Placement

_Run = tuple[int, int]
"""Indices along one dim that follow each other: the first, and how many."""


class _Cut(NamedTuple):
    """Mesh axis `axis` cuts tensor dim `dim`: each of `factor` chunks of it, one after another."""

    axis: int
    dim: int
    factor: int


def shard_boxes(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> list[tuple[Box, Box]]:
    """What the rank at `coordinate` of a mesh holds of a global tensor of `shape`.

    Pairs of a box of the global tensor and the box of the local tensor where it lies, in row-major
    order of the local tensor; none for an empty shard, one unless a placement is strided.

    Each mesh axis cuts what the axes before it left, in chunks of the rounded-up size as
    `torch.chunk` does, so that late ranks may get less or nothing. Axes cut from the first to the
    last, unless a `_StridedShard` tells another order: FSDP2 cuts what tensor parallelism left,
    though its axis comes first. One that tells no order (views of sharded tensors make such) takes
    its part of each of `split_factor` chunks.

    Pure: needs no process group. Raises `LayoutError` for `Partial`, which is no value yet, and for
    placements other than torch's `Shard`, `Replicate` and `_StridedShard`.
    """
    cuts = [
        cut
        for axis, placement in enumerate(placements)
        if (cut := _cut(axis, placement, len(shape))) is not None
    ]
    # Of each dim of the local tensor, the global indices in order.
    runs: list[list[_Run]] = [[(0, n)] if n else [] for n in shape]
    for axis, dim, factor in _in_order(cuts, mesh_shape):
        length = sum(n for _, n in runs[dim])
        parts = _chunks(length, mesh_shape[axis], coordinate[axis], factor)
        runs[dim] = _joined(run for part in parts for run in _taken(runs[dim], part))
    return [_boxes(spans) for spans in itertools.product(*map(_placed, runs))]


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """This rank's shard: the live memory, not a copy. Starts no collective."""
    with torch.no_grad():  # with gradients on, to_local() records a view for autograd
        return tensor.to_local()


def local_parts(name: str, tensor: DTensor) -> tuple[tuple[Box, torch.Tensor], ...]:
    """The boxes of `tensor`, called `name`, that this rank holds, and the local memory of each.

    None on a rank outside the mesh and for an empty shard. Starts no collective. Raises
    `LayoutError` for placements of `shard_boxes`, and when the local shape is not what the
    placements say.
    """
    mesh, local = tensor.device_mesh, local_tensor(tensor)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    try:
        boxes = shard_boxes(tuple(tensor.shape), mesh.shape, coordinate, tensor.placements)
    except LayoutError as error:
        raise error.at(tensor=name, rank=mesh.get_rank()) from None
    said = boxes[-1][1].stop if boxes else None
    if said != (tuple(local.shape) if local.numel() else None):
        raise LayoutError(
            f"placements {tensor.placements} of global shape {tuple(tensor.shape)} give this rank "
            f"{said or 'nothing'}, but its local shape is {tuple(local.shape)}; was it sharded by "
            "something other than torch?",
            tensor=name,
            rank=mesh.get_rank(),
        )
    return tuple((box, _part(local, at)) for box, at in boxes)


def _placed(runs: Sequence[_Run]) -> list[tuple[int, int, int]]:
    """Of each run where it starts globally, where it starts locally, and how long it is."""
    at = itertools.accumulate((length for _, length in runs), initial=0)
    return [(start, local, length) for (start, length), local in zip(runs, at, strict=False)]


def _boxes(spans: Sequence[tuple[int, int, int]]) -> tuple[Box, Box]:
    starts, locals_, lengths = (tuple(span[k] for span in spans) for k in range(3))
    return Box(starts, lengths), Box(locals_, lengths)


def _part(local: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(box.start, box.shape, strict=True)):
        local = local.narrow(dim, start, length)
    return local


def _cut(axis: int, placement: Placement, num_dims: int) -> _Cut | None:
    # Exactly these: what derives from them places its rows differently.
    if type(placement) is Replicate:
        return None
    if isinstance(placement, Partial):
        raise LayoutError(
            f"placement {placement} can't travel, it is a sum that was not made yet; redistribute "
            "to Replicate or Shard first"
        )
    if not isinstance(placement, Shard | _StridedShard) or type(placement) not in (
        Shard,
        _StridedShard,
    ):
        raise LayoutError(
            f"placement {placement} can't travel; redistribute to Shard or Replicate first"
        )
    if not -num_dims <= placement.dim < num_dims:
        raise LayoutError(f"placement {placement} can't cut a tensor of {num_dims} dims")
    factor = placement.split_factor if isinstance(placement, _StridedShard) else 1
    return _Cut(axis, placement.dim % num_dims, int(factor))


def _in_order(cuts: Sequence[_Cut], mesh_shape: Sequence[int]) -> Sequence[_Cut]:
    """The cuts in the order in which they are made, those whose factor only told it without one.

    A factor tells an order when it is the product of the sizes of axes that come later and cut the
    same dim earlier. Torch reads it like this when it gathers (2.13,
    `DTensorSpec._maybe_convert_StridedShard_to_shard_order`), and so FSDP2 made it, also where
    chunks are uneven; if one factor tells no order, none does.
    """
    orders: dict[int, list[_Cut]] = {}
    for cut in reversed(cuts):
        order = orders.setdefault(cut.dim, [])
        products = itertools.accumulate(
            (mesh_shape[earlier.axis] for earlier in order), lambda a, b: a * b, initial=1
        )
        position = next((i for i, product in enumerate(products) if product == cut.factor), None)
        if position is None:
            return cuts
        order.insert(position, cut)
    return [cut._replace(factor=1) for order in orders.values() for cut in order]


def _chunks(length: int, num_ranks: int, rank: int, factor: int) -> list[_Run]:
    """What `rank` gets of `length` indices in `factor` chunks, each cut for all ranks."""
    parts = []
    outer = -(-length // factor)
    for start in range(0, length, outer or 1):
        size = min(outer, length - start)
        inner = -(-size // num_ranks)
        first = min(rank * inner, size)
        parts.append((start + first, min(inner, size - first)))
    return parts


def _taken(runs: Iterable[_Run], part: _Run) -> list[_Run]:
    """The indices of `part`, which counts along `runs`, as those that `runs` are made of."""
    taken = []
    first, stop = part[0], part[0] + part[1]
    at = 0
    for start, length in runs:
        a, b = max(first, at), min(stop, at + length)
        if a < b:
            taken.append((start + a - at, b - a))
        at += length
    return taken


def _joined(runs: Iterable[_Run]) -> list[_Run]:
    """The runs, with those in one that continue each other."""
    joined: list[_Run] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined
