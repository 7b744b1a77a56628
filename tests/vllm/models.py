"""Tiny models of the families that vLLM serves, with dimensions that cuts don't fit by luck."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path


def _config(kind: str, architecture: str, **settings: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        "architectures": [architecture],
        "dtype": "bfloat16",
        "vocab_size": 509,  # a prime: every cut of it needs padding
        "hidden_size": 96,  # vLLM's experts on the CPU want multiples of 32
        "intermediate_size": 120,
        "num_hidden_layers": 2,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,  # fewer than ranks
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        **settings,
    }


_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _config("llama", "LlamaForCausalLM"),
    "qwen2": _config("qwen2", "Qwen2ForCausalLM", tie_word_embeddings=True, hidden_size=768),
    "qwen3": _config("qwen3", "Qwen3ForCausalLM"),
    "qwen3_moe": _config(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        num_experts=8,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        **_MOE,
    ),
    "mixtral": _config("mixtral", "MixtralForCausalLM", num_local_experts=8, num_experts_per_tok=2),
    "deepseek_v3": _config(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        num_key_value_heads=24,
        q_lora_rank=44,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=1,
        n_routed_experts=16,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        **_MOE,
    )
    | {"head_dim": 8, "num_nextn_predict_layers": 0},
}
"""By family, what config.json says."""


class Cut(NamedTuple):
    """How an engine spreads a model: ranks of a stage, stages, and whether whole experts."""

    tp: int
    pp: int
    ep: bool


def cuts(family: str) -> list[Cut]:
    """The engines that are recorded of `family`."""
    dense = [Cut(1, 1, False), Cut(2, 1, False), Cut(4, 1, False), Cut(8, 1, False)]
    dense.append(Cut(2, 2, False))
    if family not in ("qwen3_moe", "mixtral", "deepseek_v3"):
        return dense
    return [*dense, Cut(2, 1, True), Cut(4, 1, True), Cut(8, 1, True), Cut(4, 2, True)]


def write_config(folder: Path, family: str) -> Path:
    """A folder with the config.json of `family` and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[family]))
    return folder
