"""What is trained and how it is cut: models of odd dimensions, and the ways over four ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NUM_RANKS = 4
VOCAB = 509  # a prime: every cut of it needs padding


def _config(kind: str, **settings: Any) -> dict[str, Any]:
    """A Hugging Face config.json with what all the models here have in common."""
    return {
        "model_type": kind,
        "vocab_size": VOCAB,
        "hidden_size": 72,
        "intermediate_size": 120,
        "num_hidden_layers": 4,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 128,
        "attention_bias": False,
        **settings,
    }


MODELS: dict[str, dict[str, Any]] = {
    "llama": _config("llama", architectures=["LlamaForCausalLM"], num_hidden_layers=3),
    "llama-tied": _config("llama", architectures=["LlamaForCausalLM"], tie_word_embeddings=True),
    "qwen2": _config("qwen2", architectures=["Qwen2ForCausalLM"], tie_word_embeddings=True),
    "qwen3": _config("qwen3", architectures=["Qwen3ForCausalLM"]),
    "qwen3-moe": _config(
        "qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "mixtral": _config(
        "mixtral",
        architectures=["MixtralForCausalLM"],
        num_local_experts=8,
        num_experts_per_tok=2,
        intermediate_size=24,
    ),
    "deepseek-v3": _config(
        "deepseek_v3",
        architectures=["DeepseekV3ForCausalLM"],
        num_key_value_heads=24,
        head_dim=8,
        q_lora_rank=36,
        kv_lora_rank=20,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=20,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.5,
        norm_topk_prob=True,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        num_nextn_predict_layers=0,
        rope_interleave=True,
    ),
}
MODELS["deepseek-v3-mtp"] = {**MODELS["deepseek-v3"], "num_nextn_predict_layers": 1}


@dataclass(slots=True, frozen=True, kw_only=True)
class Scenario:
    """One model cut in one way over `NUM_RANKS` ranks; what is left of them is data parallel."""

    model: str
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Virtual stages of each pipeline rank."""
    ep: int = 1
    etp: int = 1
    """Tensor parallelism of the experts; not that of the rest by default."""
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage, where stages are uneven."""
    dtype: str = "float32"
    """Of the weights; norms and router bias are float32 in any case."""
    grouped: bool = False
    """Experts stacked in one parameter for a grouped GEMM."""
    wrapped: bool = False
    """In Megatron's wrappers (Float16Module, DistributedDataParallel)."""

    spoils: bool = False
    """Also shows that wrong exports of it are seen."""
    engine_dtype: str | None = None
    """Of all that engines hold but biases of routers; as at the source by default."""
    refused: bool = False
    """The engines have no rule for casting to their dtype."""

    @property
    def name(self) -> str:
        """Short, and of use as a file name."""
        cuts = [f"tp{self.tp}", f"pp{self.pp}", f"vpp{self.vpp}", f"ep{self.ep}", f"etp{self.etp}"]
        extras = [
            *([f"first{self.first_stage_layers}"] if self.first_stage_layers else []),
            *([self.dtype] if self.dtype != "float32" else []),
            *(["grouped"] if self.grouped else []),
            *(["wrapped"] if self.wrapped else []),
            *([f"to-{self.engine_dtype}"] if self.engine_dtype else []),
            *(["refused"] if self.refused else []),
        ]
        return "-".join([self.model, *(c for c in cuts if not c.endswith("p1")), *extras])

    @property
    def mbridge(self) -> bool:
        """Whether mbridge 0.15.1 can export it: it builds no MLA config for Megatron 0.16, knows no
        stacked experts of the local kind, and merges experts only with both TP and EP."""
        kind = self.config["model_type"]
        is_moe = kind in ("qwen3_moe", "mixtral")
        return kind != "deepseek_v3" and (
            not is_moe or (not self.grouped and self.tp > 1 and self.ep > 1)
        )

    @property
    def has_draft(self) -> bool:
        """Whether a draft model is trained along, whose engine is a second target."""
        return bool(self.config.get("num_nextn_predict_layers"))

    @property
    def config(self) -> dict[str, Any]:
        """The model's Hugging Face config."""
        return MODELS[self.model]
