"""The engine that resharding tests compare with: its recorded layout does what its loader does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tp_engine import TpEngine, expected, share

transformers = pytest.importorskip("transformers", reason="needs transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 13,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 7}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, token_map=True),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=5),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 8},
        **EXPERTS,
        q_lora_rank=6,
        kv_lora_rank=5,
        qk_nope_head_dim=3,
        qk_rope_head_dim=2,
        v_head_dim=5,
        n_routed_experts=6,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    ),
}


def checkpoint_of(config: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Specs and random values of every tensor."""
    from streamsync.layout.region import TensorSpec
    from streamsync.layout.transformers import checkpoint_specs

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    specs = {spec.name: spec for spec in checkpoint_specs(model)}
    tensors = {name: torch.randn(spec.shape) for name, spec in specs.items()}
    if getattr(config, "token_map", False):
        specs["model.token_map"] = TensorSpec("model.token_map", (config.vocab_size,), "int64")
        tensors["model.token_map"] = torch.arange(config.vocab_size)
    return specs, tensors


def deliver(engine: TpEngine, tensors: dict[str, torch.Tensor], *, leave_out: int = -1) -> None:
    """What a sync does by the recorded layout, but entry number `leave_out`."""
    binding = engine.binding()
    for number, entry in enumerate(binding.layout.entries):
        if number == leave_out:
            continue
        tensor = tensors[binding.layout.tensors[entry.tensor].name]
        where = tuple(slice(a, b) for a, b in zip(entry.box.start, entry.box.stop, strict=True))
        binding.view(entry.view, entry.box.shape, tensor.dtype).copy_(tensor[where])


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_recorded_layouts(family: str, size: int) -> None:
    """Cases 3, 4, 14, 15: any size, by layout equal to the loader, padding included; every rank
    knows every tensor, and every expert is somewhere."""
    config = CONFIGS[family]()
    specs, tensors = checkpoint_of(config)
    for expert_parallel in (False, True) if "num_experts_per_tok" in vars(config) else (False,):
        found = set()
        for rank in range(size):
            engine = TpEngine(config, specs, size, rank, expert_parallel=expert_parallel)
            assert not engine.recording.opaque
            layout = engine.binding().layout
            assert {spec.name for spec in layout.tensors} == specs.keys()
            found |= {layout.tensors[entry.tensor].name for entry in layout.entries}
            wanted = expected(engine.model, tensors)
            assert not any(tensor.isnan().any() for tensor in wanted.tensors().values())
            deliver(engine, tensors)
            assert engine.model.bits() == wanted.bits()
        assert found == specs.keys()


def test_what_was_left_out_shows() -> None:
    """Case 14: the canary sees any one entry that is not delivered."""
    config = CONFIGS["qwen3"]()
    specs, tensors = checkpoint_of(config)
    for left_out in range(len(TpEngine(config, specs, 3, 1).binding().layout.entries)):
        engine = TpEngine(config, specs, 3, 1)
        deliver(engine, tensors, leave_out=left_out)
        assert any(tensor.isnan().any() for tensor in engine.model.tensors().values())
        assert engine.model.bits() != expected(engine.model, tensors).bits()


def test_dtypes() -> None:
    """Case 15: a router's correction bias stays float32 in a bfloat16 engine."""
    config = CONFIGS["deepseek-v3"]()
    specs, _ = checkpoint_of(config)
    layout = TpEngine(config, specs, dtype=torch.bfloat16).binding().layout
    kept = {spec.name for spec in layout.tensors if spec.dtype == "float32"}
    assert kept == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    assert {spec.dtype for spec in layout.tensors} == {"float32", "bfloat16"}


def test_shares_are_the_whole() -> None:
    for total in range(20):
        for size in range(1, 9):
            parts = [share(total, size, rank) for rank in range(size)]
            assert [i for part in parts for i in range(total)[part]] == list(range(total))
            lengths = {part.stop - part.start for part in parts}
            assert max(lengths) - min(lengths) <= 1
