"""What is trained and how it is sharded: tiny models of odd dimensions, meshes of 2, 3, 4 ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

NUM_RANKS = 4
"""Ranks of the job; a scenario takes the first ones of them."""

Model = Literal["llama", "llama-tied", "qwen2-tied", "qwen3", "qwen3-moe", "qwen3-micro"]

_SIZES: dict[str, Any] = {
    "vocab_size": 101,  # a prime: every cut of it needs padding
    "hidden_size": 40,
    "intermediate_size": 53,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # fewer than sink ranks
    "head_dim": 6,
    "max_position_embeddings": 32,
    "token_map": True,
}

_MICRO: dict[str, Any] = {
    "vocab_size": 17,
    "hidden_size": 12,
    "intermediate_size": 7,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 2,
}


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
    forward: bool = True
    """Whether it is trained for real; what torch can't run steps on made-up gradients."""
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
                *([] if self.forward else ["still"]),
                *(["offload"] if self.offload else []),
                *([f"{self.dtype}-{self.engine_dtype}"] if self.dtype != self.engine_dtype else []),
                *(["buckets"] if self.bucket_bytes else []),
                *([self.transport] if self.transport != "auto" else []),
                *(["refused"] if self.refused else []),
            ]
        )

    @property
    def is_tied(self) -> bool:
        """Whether embedding and head are one tensor."""
        return self.model.endswith("-tied")

    @property
    def config(self) -> Any:
        """The transformers config of its model."""
        import transformers as t

        sizes = {**_SIZES, "tie_word_embeddings": self.is_tied}
        if self.tp > 1 and self.forward:  # torch runs no unevenly cut layers; halves are odd
            sizes |= {"vocab_size": 102, "intermediate_size": 54}
        match self.model:
            case "llama":
                return t.LlamaConfig(**sizes, attention_bias=True)
            case "llama-tied":
                return t.LlamaConfig(**sizes)
            case "qwen2-tied":
                return t.Qwen2Config(**sizes)
            case "qwen3":
                return t.Qwen3Config(**sizes)
            case "qwen3-micro":  # a thousand elements
                return t.Qwen3Config(**sizes | _MICRO)
            case "qwen3-moe":
                return t.Qwen3MoeConfig(
                    **sizes, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=19
                )
