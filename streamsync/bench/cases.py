"""The clusters that `streamsync bench plan` plans for: two models, and how both sides cut them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from streamsync.models.parallelism import Parallelism

LLAMA_70B: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""config.json of Llama 3 70B: 723 tensors."""

DEEPSEEK_V3: Final[dict[str, Any]] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""config.json of DeepSeek-V3, in bfloat16: 61 layers, 256 experts."""

MODELS: Final = {"llama-70b": LLAMA_70B, "deepseek-v3": DEEPSEEK_V3}


@dataclass(frozen=True, slots=True)
class Case:
    """One row: a model, how the trainer cuts it, and how the engines do. Both are written as
    `streamsync plan` takes them."""

    model: str
    source: str
    sink: str
    is_quick: bool = False

    @property
    def ranks(self) -> str:
        """How many ranks either side has, as `512→256`."""
        return "→".join(str(Parallelism.parse(s).num_ranks) for s in (self.source, self.sink))


CASES: Final = (
    Case("llama-70b", "tp8 dp4", "tp8 replicas2", is_quick=True),
    Case("llama-70b", "tp4 pp8", "tp8 replicas2"),
    Case("llama-70b", "tp2 pp16", "tp8 replicas2", is_quick=True),
    Case("llama-70b", "tp8 pp4 dp4", "tp16"),  # Awex's own case
    Case("llama-70b", "tp8 dp64", "tp8 replicas32"),
    Case("llama-70b", "tp8 pp8 dp8", "tp8 replicas32"),
    Case("llama-70b", "tp8 pp16 dp4", "tp8 replicas32"),
    Case("llama-70b", "tp8 dp512", "tp8 replicas512"),
    Case("llama-70b", "tp8 pp8 dp64", "tp8 replicas512"),
    Case("llama-70b", "tp8 pp16 dp32", "tp8 replicas512"),
    Case("deepseek-v3", "tp8 ep32 dp4", "tp16 ep16"),
    Case("deepseek-v3", "tp4 pp8 ep4", "tp16 ep16"),
    Case("deepseek-v3", "tp2 pp16 ep2", "tp16 ep16", is_quick=True),
    Case("deepseek-v3", "tp8 ep256 dp64", "tp16 ep16 replicas16"),
    Case("deepseek-v3", "tp8 pp8 ep32 dp8", "tp16 ep16 replicas16"),
    Case("deepseek-v3", "tp8 pp16 ep32 dp4", "tp16 ep16 replicas16"),
    Case("deepseek-v3", "tp8 ep256 dp512", "tp16 ep16 replicas128"),
    Case("deepseek-v3", "tp8 pp8 ep64 dp64", "tp16 ep16 replicas128"),
    Case("deepseek-v3", "tp8 pp16 ep64 dp32", "tp16 ep16 replicas128"),
)
