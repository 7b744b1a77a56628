"""Random shards: boxes against tensors that torch's own `Shard` cut, axis after axis."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from streamsync.layout.dtensor import shard_boxes

if TYPE_CHECKING:
    from streamsync.layout.region import Box

Shape = tuple[int, ...]

shapes = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def check(
    shape: Shape, mesh: Shape, placements: list[Placement], cuts: list[tuple[int, Placement]]
) -> None:
    """Boxes of `placements` hold what is left of a tensor after `cuts` (mesh axis, placement) in
    this order, and all ranks' hold every element once per replica."""
    whole = torch.arange(math.prod(shape)).reshape(shape)
    count = torch.zeros(shape, dtype=torch.int64)
    for coordinate in itertools.product(*map(range, mesh)):
        local = whole
        for axis, placement in cuts:
            assert isinstance(placement, Shard | _StridedShard)
            parts, _ = placement._split_tensor(local, mesh[axis], with_padding=False)
            local = parts[coordinate[axis]]
        found = torch.full_like(local, -1)
        for box, at in shard_boxes(shape, mesh, coordinate, placements):
            assert box.numel
            assert (found[slices(at)] == -1).all()
            found[slices(at)] = whole[slices(box)]
            count[slices(box)] += 1
        assert torch.equal(found, local)
    replicas = math.prod(n for n, p in zip(mesh, placements, strict=True) if p.is_replicate())
    assert (count == replicas).all()


@st.composite
def dims_of(draw: st.DrawFn, shape: Shape, mesh: Shape) -> list[int | None]:
    """The dim that each mesh axis cuts; None where it holds copies."""
    return [draw(st.sampled_from([None, *range(len(shape))])) for _ in mesh]


@given(st.data(), shapes, meshes)
def test_axis_after_axis(data: st.DataObject, shape: Shape, mesh: Shape) -> None:
    """Case 24: several axes on one dim, uneven and empty shards, dims counted from the end."""
    dims = data.draw(dims_of(shape, mesh))
    from_end = data.draw(st.lists(st.booleans(), min_size=len(mesh), max_size=len(mesh)))
    placements: list[Placement] = [
        Replicate() if dim is None else Shard(dim - len(shape) * end)
        for dim, end in zip(dims, from_end, strict=True)
    ]
    check(shape, mesh, placements, [(i, Shard(d)) for i, d in enumerate(dims) if d is not None])


@given(st.data(), shapes, meshes)
def test_any_order(data: st.DataObject, shape: Shape, mesh: Shape) -> None:
    """FSDP2 over tensor parallel shards, and every other order of cutting, as torch says it."""
    dims = data.draw(dims_of(shape, mesh))
    axes: list[int] = data.draw(st.permutations(range(len(mesh))))
    order = tuple(
        ShardOrderEntry(tensor_dim=dim, mesh_dims=tuple(a for a in axes if dims[a] == dim))
        for dim in range(len(shape))
        if dim in dims
    )
    plain = tuple(Replicate() if dim is None else Shard(dim) for dim in dims)
    placements = DTensorSpec._convert_shard_order_to_StridedShard(
        order,
        plain,
        SimpleNamespace(size=lambda axis: mesh[axis]),  # type: ignore[arg-type]
    )
    cuts: list[tuple[int, Placement]] = [(a, plain[a]) for a in axes if dims[a] is not None]
    check(shape, mesh, list(placements), cuts)


@given(st.data(), shapes, meshes)
def test_strides_that_tell_no_order(data: st.DataObject, shape: Shape, mesh: Shape) -> None:
    """One axis takes a part of each of several chunks, so that its shard is several boxes."""
    dims = data.draw(dims_of(shape, mesh))
    strided = data.draw(st.integers(0, len(mesh) - 1))
    dim = dims[strided] = data.draw(st.integers(0, len(shape) - 1))
    # No product of sizes of axes of this mesh.
    factor = data.draw(st.sampled_from([5, 7, 10]))
    placements: list[Placement] = [Replicate() if d is None else Shard(d) for d in dims]
    placements[strided] = _StridedShard(dim, split_factor=factor)
    check(
        shape, mesh, placements, [(i, p) for i, p in enumerate(placements) if dims[i] is not None]
    )
