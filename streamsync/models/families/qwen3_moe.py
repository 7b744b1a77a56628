"""Qwen3-MoE (transformers: `Qwen3MoeForCausalLM`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamsync.models.weight import attention, embedding, experts, gated, head, norms

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from streamsync.models.weight import Weight


def weights(config: Mapping[str, Any]) -> Iterator[Weight]:
    """Every tensor of the checkpoint, in forward order."""
    dense = config.get("mlp_only_layers") or ()
    step = config.get("decoder_sparse_step") or 1
    yield from embedding(config)
    for layer in range(config["num_hidden_layers"]):
        yield from attention(config, layer, head_norms=True)
        owner = f"model.layers.{layer}.mlp"
        if layer in dense or (layer + 1) % step:
            yield from gated(owner, config["hidden_size"], config["intermediate_size"], layer)
        else:
            ffn = config["moe_intermediate_size"]
            yield from experts(owner, config, config["num_experts"], ffn, layer)
        yield from norms(config, layer)
    yield from head(config)
