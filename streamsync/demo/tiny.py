"""A random Llama with odd sizes and byte tokens: exercises every path in seconds, knows nothing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from streamsync.demo.instructions import Tokenizer

_SEED: Final = 20
_BEGIN, _END, _VOCABULARY = 256, 257, 259


class ByteTokenizer:
    """A token is a byte of UTF-8; two more ids begin and end a turn, and one is never used."""

    end: int = _END

    def prompt(self, question: str) -> list[int]:
        """The question's bytes after the begin token."""
        return [_BEGIN, *question.encode()]

    def answer(self, text: str) -> list[int]:
        """The answer's bytes and the end token."""
        return [*text.encode(), _END]

    def decode(self, tokens: Sequence[int]) -> str:
        """The bytes among `tokens` as printable text: a random model seldom writes UTF-8."""
        return "".join(chr(t) if 32 <= t < 127 else f"\\x{t:02x}" for t in tokens if t < 256)


class TinyModel:
    """See `DemoModel`. 4 layers, hidden 60, 3 query heads and 1 KV head of 4 elements.

    Over 3 FSDP ranks the vocabulary's 259 rows are cut into 87, 87 and 85, and the KV projections'
    4 rows into 2, 2 and none: an uneven shard and an empty one.
    """

    name = "tiny"
    steps_per_sync = 2
    learning_rate = 3e-3
    answer_tokens = 12
    example_tokens = 80
    batch_size = 2

    def tokenizer(self) -> Tokenizer:
        """The byte tokenizer."""
        return ByteTokenizer()

    def trainer_model(self) -> nn.Module:
        """The fp32 model, the same in every process."""
        return self._build(_SEED, torch.float32)

    def engine_model(self) -> nn.Module:
        """A bf16 model of the same shape and other weights."""
        return self._build(_SEED + 1, torch.bfloat16)

    def _build(self, seed: int, dtype: torch.dtype) -> nn.Module:
        # Typed differently from release to release, hence not imported by name.
        transformers: Any = import_module("transformers")
        config = transformers.LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=60,
            intermediate_size=101,
            num_hidden_layers=4,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=4,
            max_position_embeddings=256,
            bos_token_id=_BEGIN,
            eos_token_id=_END,
            pad_token_id=_END,
            tie_word_embeddings=True,
            initializer_range=0.1,
            attn_implementation="eager",
        )
        torch.manual_seed(seed)
        model: nn.Module = transformers.LlamaForCausalLM(config).to(dtype)
        return model
