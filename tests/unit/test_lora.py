"""Merging adapters on the way out: equal to the plain reference however the weight is cut."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from streamsync.errors import LayoutError
from streamsync.layout.binding import Binding, torch_dtype
from streamsync.layout.lora import Adapter, bind_peft, find_lora, merge_lora
from streamsync.layout.region import Box, Entry, Layout, TensorSpec, View
from streamsync.layout.state_dict import bind_tensors
from tests.lora_reference import merged
from tests.sync_rig import bits

if TYPE_CHECKING:
    from collections.abc import Iterator


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def computed(binding: Binding, name: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
    """What `binding` publishes of `box`."""
    layout = binding.layout
    entry = next(
        e for e in layout.entries if layout.tensors[e.tensor].name == name and e.box.contains(box)
    )
    local = torch_dtype(layout.tensors[entry.tensor].dtype)
    base = binding.view(entry.view.within(entry.box, box), box.shape, local)
    out = torch.empty(box.shape, dtype=dtype)
    binding.computed[name].compute(box, base, out)
    return out


@pytest.mark.parametrize("rank", [1, 5, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_reference_for_any_cut(dtype: torch.dtype, rank: int) -> None:
    weight = random(37, 53, dtype=dtype)
    down = random(rank, 53, dtype=torch.bfloat16, seed=1)
    up = random(37, rank, seed=2)
    binding = merge_lora(bind_tensors({"w": weight}), {"w": Adapter(down=down, up=up, scale=0.37)})
    before = [bits(t) for t in (weight, down, up)]
    wanted = merged(weight, down, up, 0.37)
    assert not torch.equal(wanted, weight)
    whole = computed(binding, "w", Box((0, 0), (37, 53)), dtype)
    assert bits(whole) == bits(wanted)
    for r0, r1 in pairwise((0, 1, 2, 10, 36, 37)):
        for c0, c1 in pairwise((0, 3, 4, 20, 53)):
            part = computed(binding, "w", Box((r0, c0), (r1 - r0, c1 - c0)), dtype)
            assert bits(part) == bits(wanted[r0:r1, c0:c1])
    assert [bits(t) for t in (weight, down, up)] == before, "the source was touched"


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cast_starts_from_the_weights_own_dtype(dtype: torch.dtype, out: torch.dtype) -> None:
    """What is published is what the trainer would hold had it merged, and then the cast."""
    weight, down, up = random(9, 7, dtype=dtype), random(4, 7, seed=1), random(9, 4, seed=2)
    binding = merge_lora(bind_tensors({"w": weight}), {"w": Adapter(down=down, up=up, scale=2)})
    got = computed(binding, "w", Box.whole((9, 7)), out)
    assert bits(got) == bits(merged(weight, down, up, 2).to(out))


def test_shards_need_their_rows_of_b_and_columns_of_a() -> None:
    weight, down, up = random(8, 6), random(2, 6, seed=1), random(8, 2, seed=2)
    rows = Box((4, 0), (4, 6))
    shard = Binding(
        layout=Layout(
            tensors=(TensorSpec("w", (8, 6), "float32"),),
            entries=(Entry(0, rows, View(0, 0, (6, 1))),),
        ),
        storages=(weight[4:].clone(),),
    )
    binding = merge_lora(shard, {"w": Adapter(down=down, up=up, scale=1.0)})
    got = computed(binding, "w", Box((5, 1), (2, 3)), torch.float32)
    assert bits(got) == bits(merged(weight, down, up, 1.0)[5:7, 1:4])


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """This process is rank 1 of 2; the other one is not there."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dim", [0, 1])
def test_adapters_sharded_as_the_weight(mesh: DeviceMesh, dim: int) -> None:
    """FSDP2 by rows: B by rows, too, A replicated; by columns the other way round."""
    weight, down, up = random(7, 9), random(2, 9, seed=1), random(7, 2, seed=2)
    cut = {0: 4, 1: 5}[dim]
    local = weight.tensor_split([cut], dim)[1].contiguous()

    def shard(whole: torch.Tensor) -> DTensor:
        part = whole.tensor_split([cut], dim)[1].contiguous()
        return DTensor.from_local(
            part, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    halves = (down, shard(up)) if dim == 0 else (shard(down), up)
    adapter = Adapter(down=halves[0], up=halves[1], scale=3.0)
    binding = merge_lora(bind_tensors({"w": shard(weight)}), {"w": adapter})
    start = (cut, 0) if dim == 0 else (0, cut)
    got = computed(binding, "w", Box(start, tuple(local.shape)), torch.float32)
    assert bits(got) == bits(merged(weight, down, up, 3.0).tensor_split([cut], dim)[1])


def test_a_rank_that_lacks_a_part_of_the_adapter_is_refused(mesh: DeviceMesh) -> None:
    """FSDP2 shards A by its rows, which are the rank: no rank could merge anything."""
    down = DTensor.from_local(random(2, 6), mesh, [Shard(0)], run_check=False)
    adapter = Adapter(down=down, up=random(8, 4), scale=1.0)
    with pytest.raises(
        LayoutError, match=r"needs \[0:4, 0:6\] of A, of which it holds \[2:4, 0:6\]"
    ):
        merge_lora(bind_tensors({"w": random(8, 6)}), {"w": adapter})


class Lora(nn.Module):
    """A linear layer as PEFT wraps it."""

    def __init__(self, rows: int, columns: int, rank: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(columns, rows, bias=True)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(columns, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, rows, bias=False)})
        self.scaling = {"default": 0.5}


def peft_model() -> nn.Module:
    """`PeftModel.base_model.model` is the model that the user had."""
    inner = nn.Module()
    inner.layers = nn.ModuleList([Lora(6, 5, 2), Lora(5, 6, 3)])
    inner.layers[1].scaling = {"default": 2.0}
    inner.norm = nn.LayerNorm(5)
    tuner, model = nn.Module(), nn.Module()
    tuner.model, model.base_model = inner, tuner
    return model


def test_a_module_that_peft_wrapped() -> None:
    model = peft_model()
    binding = bind_peft(model)
    assert [spec.name for spec in binding.layout.tensors] == [
        "layers.0.weight",
        "layers.0.bias",
        "layers.1.weight",
        "layers.1.bias",
        "norm.weight",
        "norm.bias",
    ]
    assert list(binding.computed) == ["layers.0.weight", "layers.1.weight"]
    for index, scale in enumerate((0.5, 2.0)):
        layer = model.base_model.model.layers[index]
        weight = layer.base_layer.weight.detach()
        down, up = (m["default"].weight.detach() for m in (layer.lora_A, layer.lora_B))
        got = computed(binding, f"layers.{index}.weight", Box.whole(weight.shape), weight.dtype)
        assert bits(got) == bits(merged(weight, down, up, scale))


def test_a_refresh_finds_replaced_adapters() -> None:
    model = peft_model()
    binding = bind_peft(model)
    layer = model.base_model.model.layers[0]
    layer.lora_B["default"].weight = nn.Parameter(torch.ones(6, 2))
    assert binding.rebind()
    assert not binding.rebind()
    weight = layer.base_layer.weight.detach()
    wanted = merged(weight, layer.lora_A["default"].weight.detach(), torch.ones(6, 2), 0.5)
    assert bits(computed(binding, "layers.0.weight", Box.whole((6, 5)), weight.dtype)) == bits(
        wanted
    )


def test_names_of_other_adapters_and_saved_modules() -> None:
    prefix = "base_model.model.head"
    tensors = {
        f"{prefix}.base_layer.weight": random(3, 4),
        f"{prefix}.lora_A.other.weight": random(1, 4),
        f"{prefix}.lora_B.other.weight": random(3, 1),
        "base_model.model.out.original_module.weight": random(2, 2),
        "base_model.model.out.modules_to_save.default.weight": random(2, 2, seed=5),
    }
    base, adapters = find_lora(tensors, 1.0)
    assert list(base) == ["head.weight", "out.weight"]
    assert base["out.weight"] is tensors["base_model.model.out.modules_to_save.default.weight"]
    assert not adapters
    assert list(find_lora(tensors, 1.0, adapter="other")[1]) == ["head.weight"]


def lora_names(*names: str) -> dict[str, torch.Tensor]:
    return {f"a.{name}": random(2, 2) for name in names}


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (lora_names("base_layer.weight", "lora_A.default.weight"), "only lora_A"),
        (lora_names("lora_magnitude_vector.default.weight"), "only plain LoRA"),
        (lora_names("lora_embedding_A.default"), "only plain LoRA"),
        (lora_names("lora_B.default.bias"), "only plain LoRA"),
    ],
)
def test_what_is_not_plain_lora_is_refused(tensors: dict[str, torch.Tensor], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        find_lora(tensors, 1.0)


def pair(rows: int, columns: int, rank: int, dtype: torch.dtype = torch.float32) -> Adapter:
    return Adapter(down=random(rank, columns, dtype=dtype), up=random(rows, rank), scale=1.0)


@pytest.mark.parametrize(
    ("name", "adapter", "text"),
    [
        ("v", pair(4, 3, 2), "not bound"),
        ("w", pair(3, 4, 2), "do not fit"),
        ("w", pair(4, 3, 2, torch.float64), "must be float32, bfloat16 or float16"),
        ("tied", pair(4, 3, 2), "tied"),
        ("norm", pair(4, 3, 2), "do not fit"),
        ("ids", pair(4, 3, 2), "must be float32, bfloat16 or float16"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(name: str, adapter: Adapter, text: str) -> None:
    shared = random(4, 3, seed=3)
    tensors = {
        "w": random(4, 3),
        "tied": shared,
        "head": shared,
        "norm": random(4),
        "ids": torch.zeros(4, 3, dtype=torch.int32),
    }
    with pytest.raises(LayoutError, match=text) as caught:
        merge_lora(bind_tensors(tensors), {name: adapter})
    assert caught.value.where["tensor"] == name


def test_two_adapters_of_one_tensor_are_refused() -> None:
    once = merge_lora(bind_tensors({"w": random(4, 3)}), {"w": pair(4, 3, 2)})
    with pytest.raises(LayoutError, match="two adapters"):
        merge_lora(once, {"w": pair(4, 3, 2)})
