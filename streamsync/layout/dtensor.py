"""The part of a DTensor that this rank holds: a global box and the local memory of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from streamsync.errors import LayoutError
from streamsync.layout.region import Box

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.tensor.placement_types import Placement


def shard_box(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> Box:
    """The box of a global tensor of `shape` that the rank at `coordinate` of a mesh holds.

    Mesh axes apply from the first to the last, each cutting what the axes before it left, in
    chunks of the rounded-up size as `torch.chunk` does, so that late ranks may get less or
    nothing (an empty box at the end of the dim). `Replicate` holds everything. Pure: needs no
    process group. Raises `LayoutError` for placements that are not one box (`_StridedShard`) or
    not a value (`Partial`).
    """
    start, local = [0] * len(shape), list(shape)
    for num_ranks, rank, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, Replicate):
            continue
        # Exactly Shard: what derives from it places its rows differently.
        if type(placement) is not Shard:
            raise LayoutError(
                f"placement {placement} can't travel; redistribute to Shard or Replicate first"
            )
        dim = placement.dim % len(shape)
        chunk = -(-local[dim] // num_ranks)
        first = min(rank * chunk, local[dim])
        start[dim] += first
        local[dim] = min(chunk, local[dim] - first)
    return Box(tuple(start), tuple(local))


def local_part(name: str, tensor: DTensor) -> tuple[Box, torch.Tensor]:
    """The box of `tensor` that this rank holds, and the local tensor of the same shape.

    The local tensor is the live memory, not a copy. The box is empty on a rank outside the mesh
    and for an empty shard. Starts no collective. Raises `LayoutError` for placements of
    `shard_box`, and when the local shape is not what the placements say.
    """
    shape = tuple(tensor.shape)
    with torch.no_grad():  # with gradients on, to_local() records a view for autograd
        local = tensor.to_local()
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return Box(shape, (0,) * len(shape)), local
    try:
        box = shard_box(shape, tensor.device_mesh.shape, coordinate, tensor.placements)
    except LayoutError as error:
        raise error.at(tensor=name, rank=tensor.device_mesh.get_rank()) from None
    if box.numel != local.numel() or (box.numel and box.shape != tuple(local.shape)):
        raise LayoutError(
            f"placements {tensor.placements} of global shape {shape} give this rank {box}, but its "
            f"local shape is {tuple(local.shape)}; was it sharded by something other than torch?",
            tensor=name,
            rank=tensor.device_mesh.get_rank(),
        )
    return box, local
