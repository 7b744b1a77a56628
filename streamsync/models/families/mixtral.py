"""Mixtral (transformers: `MixtralForCausalLM`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamsync.models.weight import attention, embedding, experts, head, norms

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from streamsync.models.weight import Weight


def weights(config: Mapping[str, Any]) -> Iterator[Weight]:
    """Every tensor of the checkpoint, in forward order."""
    num_experts, ffn = config["num_local_experts"], config["intermediate_size"]
    yield from embedding(config)
    for layer in range(config["num_hidden_layers"]):
        yield from attention(config, layer)
        owner = f"model.layers.{layer}.block_sparse_moe"
        yield from experts(owner, config, num_experts, ffn, layer, names=("w1", "w3", "w2"))
        yield from norms(config, layer)
    yield from head(config)
