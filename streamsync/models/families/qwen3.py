"""Qwen3 (transformers: `Qwen3ForCausalLM`): Llama with a norm per head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamsync.models.weight import attention, embedding, gated, head, norms

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from streamsync.models.weight import Weight


def weights(config: Mapping[str, Any]) -> Iterator[Weight]:
    """Every tensor of the checkpoint, in forward order."""
    yield from embedding(config)
    for layer in range(config["num_hidden_layers"]):
        yield from attention(config, layer, head_norms=True)
        owner = f"model.layers.{layer}.mlp"
        yield from gated(owner, config["hidden_size"], config["intermediate_size"], layer)
        yield from norms(config, layer)
    yield from head(config)
