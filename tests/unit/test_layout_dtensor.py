"""Boxes of sharded tensors: as torch distributes them, as FSDP2 cuts modules, and what is refused.

Every rank in turn lives in this process, in a process group that moves nothing.
"""

from __future__ import annotations

import itertools
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from streamsync.errors import LayoutError
from streamsync.layout.binding import torch_dtype
from streamsync.layout.dtensor import shard_boxes
from streamsync.layout.module import bind_module
from streamsync.layout.region import Box
from streamsync.layout.state_dict import bind_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.tensor.placement_types import Placement

    from streamsync.layout.binding import Binding


@contextmanager
def as_rank(rank: int, mesh_shape: Sequence[int]) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(mesh_shape))
    try:
        names = ("a", "b", "c")[: len(mesh_shape)]
        yield init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # what torch remembers holds the mesh, and so the rank


def counted(*shape: int) -> torch.Tensor:
    """Every element another value."""
    return torch.arange(math.prod(shape)).view(shape)


def paint(binding: Binding, whole: dict[str, torch.Tensor], count: dict[str, torch.Tensor]) -> None:
    """Counts what a rank holds, each value of which must be the whole's."""
    layout = binding.layout
    for entry in layout.entries:
        spec = layout.tensors[entry.tensor]
        where = tuple(slice(a, b) for a, b in zip(entry.box.start, entry.box.stop, strict=True))
        held = binding.view(entry.view, entry.box.shape, torch_dtype(spec.dtype))
        assert torch.equal(held, whole[spec.name].detach()[where]), spec.name
        count[spec.name][where] += 1


def zeros_like(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in whole.items()}


PLACED = [
    ((5, 3), (3,), (Shard(0),)),
    ((2, 3), (3,), (Shard(0),)),
    ((1,), (4,), (Shard(0),)),
    ((3, 7), (2,), (Shard(-1),)),
    ((3, 7, 2), (2,), (Shard(-2),)),
    ((0, 4), (2,), (Shard(0),)),
    ((5, 0), (2,), (Shard(0),)),
    ((5, 7), (2, 3), (Shard(0), Shard(1))),
    ((5, 7), (3, 2), (Shard(1), Shard(0))),
    ((11, 2), (2, 3), (Shard(0), Shard(0))),
    ((7, 2), (2, 3), (Replicate(), Shard(0))),
    ((7, 2), (2, 3), (Shard(1), Replicate())),
    ((), (2,), (Replicate(),)),
    ((8, 3), (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((3, 12), (2, 3), (_StridedShard(1, split_factor=3), Shard(1))),
    ((8, 4), (2, 2, 2), (Replicate(), _StridedShard(0, split_factor=2), Shard(0))),
    ((11, 2), (2,), (_StridedShard(0, split_factor=3),)),
    ((11, 5), (2, 2), (_StridedShard(0, split_factor=3), _StridedShard(1, split_factor=2))),
]


@pytest.mark.parametrize(("shape", "mesh_shape", "placements"), PLACED)
def test_what_torch_distributes(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    """Case 24: shards of `distribute_tensor`, uneven, empty and strided ones too: every value where
    the boxes say, every element once per replica."""
    whole = {"w": counted(*shape)}
    count = zeros_like(whole)
    for rank in range(math.prod(mesh_shape)):
        with as_rank(rank, mesh_shape) as mesh:
            tensor = distribute_tensor(whole["w"], mesh, placements, src_data_rank=None)
            paint(bind_tensors({"w": tensor}), whole, count)
    replicas = math.prod(
        n for n, p in zip(mesh_shape, placements, strict=True) if isinstance(p, Replicate)
    )
    assert (count["w"] == replicas).all()


def test_a_strided_shard_may_be_several_boxes() -> None:
    placements = (_StridedShard(0, split_factor=3),)
    assert shard_boxes((11, 2), (2,), (0,), placements) == [
        (Box((0, 0), (2, 2)), Box((0, 0), (2, 2))),
        (Box((4, 0), (2, 2)), Box((2, 0), (2, 2))),
        (Box((8, 0), (2, 2)), Box((4, 0), (2, 2))),
    ]


@pytest.mark.parametrize("num_rows", [8, 9, 7, 3, 1])
def test_what_fsdp_cuts_of_tensor_parallel_shards(num_rows: int) -> None:
    """FSDP2 over 3 of what tensor parallelism over 2 left, where a rule that follows the mesh axes
    would be wrong: 7 rows are 4 and 3, which are 2, 2, 0 and 1, 1, 1."""
    whole = {
        "0.weight": counted(num_rows, 4).float(),
        "0.bias": counted(num_rows).float(),
        "1.weight": counted(3, num_rows).float(),
        "1.bias": counted(3).float(),
    }
    count = zeros_like(whole)
    for rank in range(6):
        with as_rank(rank, (3, 2)) as mesh:
            module = nn.Sequential(nn.Linear(4, num_rows), nn.Linear(num_rows, 3))
            module.load_state_dict(whole)
            plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
            parallelize_module(module, mesh["b"], plan, src_data_rank=None)
            fully_shard(module, mesh=mesh["a"])
            paint(bind_module(module, side="source"), whole, count)
    assert (count.pop("1.bias") == 2).all()  # a copy on each tensor parallel rank
    assert all((number == 1).all() for number in count.values())


def test_stacked_experts_over_experts_and_data() -> None:
    """Case 4: 5 experts dealt out over 2 ranks, FSDP2 over 2 on the same dim and on another."""
    whole = {"same": counted(5, 6, 3), "other": counted(5, 6, 3)}
    count = zeros_like(whole)
    for rank in range(4):
        with as_rank(rank, (2, 2)) as mesh:
            module = nn.Module()
            for name, tensor in whole.items():
                local = distribute_tensor(tensor, mesh["b"], [Shard(0)], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(local, requires_grad=False))
            dims = {module.get_parameter("same"): Shard(0), module.get_parameter("other"): Shard(1)}
            fully_shard(module, mesh=mesh["a"], shard_placement_fn=dims.get)
            paint(bind_module(module, side="source"), whole, count)
    assert all((number == 1).all() for number in count.values())


class Odd(nn.Module):
    """Rows 5, 2, 7, 1 over three ranks: uneven and empty shards; a scale and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(5, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 7, dtype=torch.bfloat16)])
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.alias = self.layers[0]
        self.scale = nn.Parameter(torch.randn(1))
        self.register_buffer("counts", torch.arange(4))


@pytest.mark.parametrize("offload", [False, True])
def test_fsdp2_shards_are_the_whole(offload: bool) -> None:
    """Cases 20 and 24: some ranks hold no row, ties stay ties, buffers are everywhere; also where
    the shards wait in host memory; an optimizer's steps and moves are seen."""
    aliases = {"alias.weight": "layers.0.weight", "alias.bias": "layers.0.bias"}
    whole = {name: tensor + 1 for name, tensor in Odd().named_parameters(remove_duplicate=False)}
    whole["counts"] = torch.arange(4)
    count = zeros_like(whole)
    policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    for rank in range(3):
        with as_rank(rank, (3,)) as mesh:
            module = Odd()
            for layer in module.layers:
                fully_shard(layer, mesh=mesh, offload_policy=policy)
            fully_shard(module, mesh=mesh, offload_policy=policy)
            binding = bind_module(module, side="source")
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(1)  # the optimizer's step: in place
            assert not binding.rebind()
            layout = binding.layout
            assert {t.name: t.shape for t in layout.tensors} == {
                n: t.shape for n, t in whole.items()
            }
            assert layout.ties == {"head.weight": "embed.weight", **aliases}
            paint(binding, whole, count)
            # An optimizer or an offload may swap a parameter's memory: same geometry, new address.
            weight: Any = module.layers[1].weight
            weight._local_tensor = weight.to_local().clone()
            module.scale = nn.Parameter(module.scale.detach().clone())
            assert binding.rebind()
            paint(binding, whole, {name: number.clone() for name, number in count.items()})
            module.scale = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Replicate()]))
            with pytest.raises(LayoutError, match="scale"):
                binding.rebind()
    assert (count.pop("counts") == 3).all()
    for alias in ("head.weight", *aliases):
        del count[alias]
    assert all((number == 1).all() for number in count.values())


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    with as_rank(2, (3,)):
        mesh = DeviceMesh("cpu", [0, 1])
        layout = bind_tensors({"w": distribute_tensor(counted(4, 2), mesh, [Shard(0)])}).layout
        assert [spec.shape for spec in layout.tensors] == [(4, 2)]
        assert layout.entries == ()


class Ragged(Shard):
    """Someone's own placement."""


@pytest.mark.parametrize(
    ("placement", "advice"),
    [
        (Partial(), "a sum that was not made yet; redistribute to Replicate"),
        (Ragged(0), "redistribute to Shard"),
        (Shard(2), "can't cut a tensor of 2 dims"),
        (Shard(-3), "can't cut a tensor of 2 dims"),
    ],
)
def test_other_placements_are_refused(placement: Placement, advice: str) -> None:
    with pytest.raises(LayoutError, match=advice):
        shard_boxes((4, 4), (2,), (0,), (placement,))


def test_refusals_name_the_tensor() -> None:
    with as_rank(1, (2,)) as mesh:
        summed = DTensor.from_local(counted(4, 2), mesh, [Partial()], run_check=False)
        with pytest.raises(LayoutError, match=r"redistribute.*layer\.weight"):
            bind_tensors({"layer.weight": summed})
        short = DTensor.from_local(
            counted(1, 2),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size((4, 2)),
            stride=(2, 1),
        )
        with pytest.raises(LayoutError, match=r"its local shape is \(1, 2\).*layer\.weight"):
            bind_tensors({"layer.weight": short})


def test_every_rank_of_a_wrong_order_is_seen() -> None:
    """Uneven shards that were cut axis by axis are not what the strides tell; someone notices."""
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    seen = 0
    for rank in range(6):
        with as_rank(rank, (3, 2)) as mesh:
            tensor = distribute_tensor(counted(7, 1), mesh, placements, src_data_rank=None)
            try:
                bind_tensors({"w": tensor})
            except LayoutError:
                seen += 1
    assert seen == 2


def test_boxes_of_all_ranks_are_disjoint_in_torchs_own_words() -> None:
    """Local shapes and first offsets agree with what torch's checkpoints use."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    for shape, mesh_shape, placements in PLACED:
        if any(isinstance(p, Shard) and p.dim < 0 for p in placements):
            continue
        for coordinate in itertools.product(*map(range, mesh_shape)):
            boxes = shard_boxes(shape, mesh_shape, coordinate, placements)
            local, offset = _compute_local_shape_and_global_offset(
                shape, mesh_shape, list(coordinate), placements
            )
            assert math.prod(local) == sum(box.numel for box, _ in boxes)
            if boxes:
                assert boxes[0][0].start == offset
                assert boxes[-1][1].stop == local
