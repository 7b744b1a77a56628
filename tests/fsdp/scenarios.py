"""What is trained and how it is sharded: tiny models of odd dimensions, meshes of 2, 3, 4 ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

NUM_RANKS = 4
"""Ranks of the job; a scenario takes the first ones of them."""

Model = Literal["llama", "llama-tied", "qwen2-tied", "qwen3", "qwen3-moe"]

_SIZES: dict[str, Any] = {
    "vocab_size": 101,  # a prime: every cut of it needs padding
    "hidden_size": 40,
    "intermediate_size": 53,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # fewer than sink ranks
    "head_dim": 6,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "token_map": True,
}


def hf_config(model: Model) -> Any:
    """The transformers config of a model."""
    import transformers as t

    match model:
        case "llama":
            return t.LlamaConfig(**_SIZES, attention_bias=True)
        case "llama-tied":
            return t.LlamaConfig(**{**_SIZES, "tie_word_embeddings": True})
        case "qwen2-tied":
            return t.Qwen2Config(**{**_SIZES, "tie_word_embeddings": True})
        case "qwen3":
            return t.Qwen3Config(**_SIZES)
        case "qwen3-moe":
            return t.Qwen3MoeConfig(
                **_SIZES, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=19
            )


@dataclass(slots=True, frozen=True, kw_only=True)
class Scenario:
    """One model, sharded by FSDP2 over the ranks that are left by the other axes."""

    model: Model
    num_ranks: int = NUM_RANKS
    copies: int = 1
    """HSDP: the mesh is `copies` times shards."""
    tp: int = 1
    """Tensor parallel ranks, cut by `parallelize_module` before FSDP2."""
    ep: int = 1
    """Ranks over which stacked experts are dealt out before FSDP2."""
    expert_dim: int = 0
    """The dim that FSDP2 cuts stacked experts on."""
    offload: bool = False
    """Shards wait in host memory (`CPUOffloadPolicy`)."""
    dtype: str = "float32"
    engine_dtype: str = "float32"
    bucket_bytes: tuple[int, ...] = ()
    """Instead of replicas of every size: replicas of two ranks whose buckets hold so many bytes."""
    transport: str = "auto"
    refused: bool = False
    """The engines have no rule for casting to their dtype."""

    @property
    def name(self) -> str:
        """Short, and of use as a file name."""
        return "-".join(
            [
                self.model,
                f"{self.num_ranks}ranks",
                *([f"copies{self.copies}"] if self.copies > 1 else []),
                *([f"tp{self.tp}"] if self.tp > 1 else []),
                *([f"ep{self.ep}dim{self.expert_dim}"] if self.ep > 1 else []),
                *(["offload"] if self.offload else []),
                *([f"{self.dtype}-{self.engine_dtype}"] if self.dtype != self.engine_dtype else []),
                *(["buckets"] if self.bucket_bytes else []),
                *([self.transport] if self.transport != "auto" else []),
                *(["refused"] if self.refused else []),
            ]
        )

    @property
    def has_forward(self) -> bool:
        """Whether it can be trained for real; dealt out experts would need a dispatcher, so their
        optimizer steps on made-up gradients."""
        return self.ep == 1
