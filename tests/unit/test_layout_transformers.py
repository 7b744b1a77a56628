"""Transformers models as sources and sinks, against transformers' own saving and loading."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Interleave, PermuteForRope

import streamsync.layout.transformers as under_test
from streamsync.errors import LayoutError
from streamsync.layout.binding import Binding, torch_dtype
from streamsync.layout.model import bind_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.core_model_loading import ConversionOps, WeightTransform

    from streamsync.layout.region import Box

SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 33,
    "intermediate_size": 14,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama_tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=10, num_experts=4, num_experts_per_tok=2
    ),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=3),
}


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()
    transformers.logging.set_verbosity(before)


def make(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.bfloat16
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)  # also norms, which begin as ones and would hide a mix-up
    return model


def write(binding: Binding, tensors: Mapping[str, torch.Tensor]) -> None:
    layout = binding.layout
    with torch.no_grad():
        for entry in layout.entries:
            spec = layout.tensors[entry.tensor]
            place = binding.view(entry.view, entry.box.shape, torch_dtype(spec.dtype))
            place.copy_(tensors[spec.name][slices(entry.box)])


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


@pytest.mark.allow_blocking
@pytest.mark.parametrize("kind", CONFIGS)
def test_replay_of_a_checkpoint_equals_from_pretrained(kind: str, tmp_path: Path) -> None:
    """Cases 12, 14: poison the sink, copy the checkpoint by layout: the model that HF loads."""
    model = make(CONFIGS[kind])
    model.save_pretrained(tmp_path)
    checkpoint = load_file(tmp_path / "model.safetensors")
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)

    sink = make(CONFIGS[kind], seed=1)
    binding = bind_model(sink, side="sink")
    names = {t.name for t in binding.layout.tensors}
    assert names - set(binding.layout.ties) == set(checkpoint)
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if kind == "llama_tied" else {}
    assert binding.layout.ties == tied
    with torch.no_grad():
        for parameter in sink.parameters():
            parameter.fill_(torch.nan)
    write(binding, checkpoint)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(sink.state_dict()[name], tensor), name

    # The layout doesn't depend on how the model was made.
    assert bind_model(expected, side="sink").layout == binding.layout


def test_experts_are_blocks_of_the_stack() -> None:
    """Case 4: the expert's number in the name is its place in the stack, gate before up."""
    model = make(CONFIGS["qwen3_moe"])
    binding = bind_model(model, side="source")
    stack = model.model.layers[1].mlp.experts
    found = {}
    for entry in binding.layout.entries:
        spec = binding.layout.tensors[entry.tensor]
        found[spec.name] = binding.view(entry.view, entry.box.shape, torch.bfloat16)
    for expert in range(4):
        prefix = f"model.layers.1.mlp.experts.{expert}"
        gate, up = stack.gate_up_proj[expert].chunk(2)
        assert torch.equal(found[f"{prefix}.gate_proj.weight"], gate)
        assert torch.equal(found[f"{prefix}.up_proj.weight"], up)
        assert torch.equal(found[f"{prefix}.down_proj.weight"], stack.down_proj[expert])


def test_layers_come_in_forward_order() -> None:
    names = [t.name for t in bind_model(make(CONFIGS["mixtral"]), side="sink").layout.tensors]
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers)


def test_binding_changes_nothing() -> None:
    model = make(CONFIGS["qwen3_moe"])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = set(vars(model))
    bind_model(model, side="sink")
    assert set(vars(model)) == attributes
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_refresh_follows_replaced_stacks() -> None:
    model = make(CONFIGS["mixtral"])
    binding = bind_model(model, side="source")
    assert not binding.rebind()
    experts = model.model.layers[0].mlp.experts
    experts.down_proj.data = torch.full_like(experts.down_proj, 3)
    assert binding.rebind()
    name = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    number = [t.name for t in binding.layout.tensors].index(name)
    (entry,) = [e for e in binding.layout.entries if e.tensor == number]
    assert binding.view(entry.view, entry.box.shape, torch.bfloat16).eq(3).all()
    experts.down_proj = torch.nn.Parameter(experts.down_proj[:2].detach().clone())
    with pytest.raises(LayoutError, match="when it was bound"):
        binding.rebind()


@pytest.mark.parametrize(
    "operation", [Interleave(dim=1), PermuteForRope()], ids=lambda o: type(o).__name__
)
def test_conversions_that_are_not_blocks_are_refused(
    operation: ConversionOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    def conversions(model: PreTrainedModel) -> list[WeightTransform]:
        found = get_model_conversion_mapping(model)
        for conversion in found:
            if "gate_up_proj" in conversion.target_patterns[0]:
                conversion.operations.append(operation)
        return found

    monkeypatch.setattr(under_test, "_conversions", conversions)
    with pytest.raises(LayoutError, match=type(operation).__name__) as caught:
        bind_model(make(CONFIGS["mixtral"]), side="sink")
    assert caught.value.where["tensor"] == "model.layers.0.mlp.experts.gate_up_proj"


def test_quantised_models_are_refused() -> None:
    model = make(CONFIGS["llama"])
    model.hf_quantizer = object()
    with pytest.raises(LayoutError, match="quantised"):
        under_test.bind_transformers(model, side="sink")


@pytest.fixture
def no_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.allow_blocking
@pytest.mark.usefixtures("no_process_group")
@pytest.mark.parametrize("kind", ["llama_tied", "qwen3_moe", "mixtral"])
def test_fsdp_shards_have_checkpoint_names(kind: str, tmp_path: Path) -> None:
    """Case 24: sharded stacks of experts, uneven and empty, make up the checkpoint exactly."""
    whole = make(CONFIGS[kind])
    whole.save_pretrained(tmp_path)
    checkpoint = load_file(tmp_path / "model.safetensors")
    covered = {name: torch.zeros(tensor.shape) for name, tensor in checkpoint.items()}
    for rank in range(3):
        dist.init_process_group("fake", rank=rank, world_size=3, store=FakeStore())
        model = make(CONFIGS[kind])
        model.load_state_dict(whole.state_dict())
        # torch caches meshes by what they look like, so each rank's gets a name of its own.
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=(f"{kind}{rank}",))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        if kind != "llama_tied":  # FSDP2 can't tie across two of its groups
            fully_shard(model.model, mesh=mesh)  # changes the class that names are found by
        fully_shard(model, mesh=mesh)
        binding = bind_model(model, side="source")
        layout = binding.layout
        assert {t.name for t in layout.tensors} - set(layout.ties) == set(checkpoint)
        for entry in layout.entries:
            name = layout.tensors[entry.tensor].name
            part = binding.view(entry.view, entry.box.shape, torch.bfloat16)
            assert torch.equal(part, checkpoint[name][slices(entry.box)]), name
            covered[name][slices(entry.box)] += 1
        dist.destroy_process_group()
    assert all((count == 1).all() for count in covered.values())
