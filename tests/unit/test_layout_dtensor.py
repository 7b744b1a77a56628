"""Boxes of sharded tensors, as pure geometry and with real FSDP2 in three processes."""

from __future__ import annotations

import itertools
import math
import os
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from streamsync.errors import LayoutError
from streamsync.layout.binding import torch_dtype
from streamsync.layout.dtensor import shard_box
from streamsync.layout.module import bind_module
from streamsync.layout.region import Box, Layout

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.tensor.placement_types import Placement


@pytest.mark.parametrize(
    ("shape", "mesh", "placements"),
    [
        ((5, 3), (3,), (Shard(0),)),
        ((2, 3), (3,), (Shard(0),)),
        ((4,), (3,), (Shard(0),)),
        ((1,), (4,), (Shard(0),)),
        ((3, 7), (2,), (Shard(1),)),
        ((0, 4), (2,), (Shard(0),)),
        ((5, 7), (2, 3), (Shard(0), Shard(1))),
        ((5, 7), (3, 2), (Shard(1), Shard(0))),
        ((11, 2), (2, 3), (Shard(0), Shard(0))),
        ((7, 2), (2, 3), (Replicate(), Shard(0))),
        ((7, 2), (2, 3), (Shard(1), Replicate())),
        ((), (2,), (Replicate(),)),
    ],
)
def test_boxes_cover_and_agree_with_torch(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    """Case 24: shards, uneven and empty ones too, cover every element once per replica."""
    count = torch.zeros(shape, dtype=torch.int64)
    for coordinate in itertools.product(*map(range, mesh)):
        box = shard_box(shape, mesh, coordinate, placements)
        local, offset = _compute_local_shape_and_global_offset(
            shape, mesh, list(coordinate), placements
        )
        assert box.shape == local
        if box.numel:
            assert box.start == offset
        count[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] += 1
    replicas = math.prod(
        n for n, p in zip(mesh, placements, strict=True) if isinstance(p, Replicate)
    )
    assert (count == replicas).all()


@pytest.mark.parametrize("placement", [Partial(), _StridedShard(0, split_factor=2)])
def test_other_placements_are_refused(placement: Placement) -> None:
    with pytest.raises(LayoutError, match="redistribute"):
        shard_box((4, 4), (2,), (0,), (placement,))


NUM_RANKS = 3
ALIASES = {"alias.weight": "layers.0.weight", "alias.bias": "layers.0.bias"}


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


def _rank(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS
    )
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    module = Odd()
    for layer in module.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    binding = bind_module(module, side="source")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)  # the optimiser's step: in place, and seen through the binding
    assert not binding.rebind()
    with open(f"{folder}/{rank}.bytes", "wb") as data:
        for entry in binding.layout.entries:
            dtype = torch_dtype(binding.layout.tensors[entry.tensor].dtype)
            part = binding.view(entry.view, entry.box.shape, dtype)
            data.write(bytes(part.contiguous().view(-1).view(torch.uint8).tolist()))
    with open(f"{folder}/{rank}.json", "wb") as text:
        text.write(msgspec.json.encode(binding.layout))
    # An optimiser or an offload may swap a parameter's memory: same geometry, new address.
    module.scale = nn.Parameter(module.scale.detach().clone())
    assert binding.rebind() == (rank == 0)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.timeout(180)  # three interpreters import torch: a loaded host takes its time
@pytest.mark.allow_blocking
def test_fsdp2_shards_are_the_whole(tmp_path: Path) -> None:
    """Case 24: some ranks hold no row; boxes cover exactly and the bytes are the whole's."""
    mp.spawn(_rank, args=(str(tmp_path),), nprocs=NUM_RANKS)
    whole = {name: tensor + 1 for name, tensor in Odd().named_parameters(remove_duplicate=False)}
    whole["counts"] = torch.arange(4)
    covered = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in whole.items()}
    for rank in range(NUM_RANKS):
        layout = msgspec.json.decode((tmp_path / f"{rank}.json").read_bytes(), type=Layout)
        data = (tmp_path / f"{rank}.bytes").read_bytes()
        assert {t.name: t.shape for t in layout.tensors} == {n: t.shape for n, t in whole.items()}
        assert len(data) == layout.nbytes
        assert layout.ties == {"head.weight": "embed.weight", **ALIASES}
        for entry in layout.entries:
            spec = layout.tensors[entry.tensor]
            dtype = torch_dtype(spec.dtype)
            nbytes = entry.box.numel * spec.itemsize
            part = torch.frombuffer(bytearray(data[:nbytes]), dtype=dtype).view(entry.box.shape)
            data = data[nbytes:]
            where = tuple(slice(a, b) for a, b in zip(entry.box.start, entry.box.stop, strict=True))
            covered[spec.name][where] += 1
            assert torch.equal(part, whole[spec.name].detach()[where])
            if spec.name == "counts":
                assert entry.box == Box.whole((4,))
    assert (covered.pop("counts") == NUM_RANKS).all()
    for alias in ("head.weight", "alias.weight", "alias.bias"):
        del covered[alias]
    assert all((count == 1).all() for count in covered.values())
