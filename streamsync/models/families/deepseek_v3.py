"""DeepSeek-V3 and R1 (transformers: `DeepseekV3ForCausalLM`), with their MTP layers.

Layers from `num_hidden_layers` on are drafts of later tokens; their embedding and head are those of
the model, which the checkpoint repeats and nobody loads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamsync.models.weight import Weight, embedding, experts, gated, head, norms

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def weights(config: Mapping[str, Any]) -> Iterator[Weight]:
    """Every tensor of the checkpoint, in forward order."""
    num_layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    yield from embedding(config)
    for layer in range(num_layers):
        yield from _layer(config, layer)
    yield from head(config)
    for layer in range(num_layers, num_layers + (config.get("num_nextn_predict_layers") or 0)):
        prefix = f"model.layers.{layer}."
        yield Weight(f"{prefix}enorm.weight", (hidden,), "", layer)
        yield Weight(f"{prefix}hnorm.weight", (hidden,), "", layer)
        yield Weight(f"{prefix}eh_proj.weight", (hidden, 2 * hidden), "rows", layer)
        yield from _layer(config, layer)
        yield Weight(f"{prefix}shared_head.norm.weight", (hidden,), "", layer)


def _layer(config: Mapping[str, Any], layer: int) -> Iterator[Weight]:
    hidden, owner = config["hidden_size"], f"model.layers.{layer}.mlp"
    yield from _latent_attention(config, layer)
    if layer < config.get("first_k_dense_replace", 0):
        yield from gated(owner, hidden, config["intermediate_size"], layer)
    else:
        num_experts, ffn = config["n_routed_experts"], config["moe_intermediate_size"]
        yield from experts(owner, config, num_experts, ffn, layer)
        bias = f"{owner}.gate.e_score_correction_bias"
        yield Weight(bias, (num_experts,), "", layer, dtype="float32")
        shared = ffn * (config.get("n_shared_experts") or 0)
        if shared:
            yield from gated(f"{owner}.shared_experts", hidden, shared, layer)
    yield from norms(config, layer)


def _latent_attention(config: Mapping[str, Any], layer: int) -> Iterator[Weight]:
    prefix, hidden = f"model.layers.{layer}.self_attn.", config["hidden_size"]
    heads, q_rank, kv_rank = (
        config["num_attention_heads"],
        config.get("q_lora_rank"),
        config["kv_lora_rank"],
    )
    nope, rope, value = (config[f"{n}_head_dim"] for n in ("qk_nope", "qk_rope", "v"))
    if q_rank:
        yield Weight(f"{prefix}q_a_proj.weight", (q_rank, hidden), "", layer)
        yield Weight(f"{prefix}q_a_layernorm.weight", (q_rank,), "", layer)
        yield Weight(f"{prefix}q_b_proj.weight", (heads * (nope + rope), q_rank), "rows", layer)
    else:
        yield Weight(f"{prefix}q_proj.weight", (heads * (nope + rope), hidden), "rows", layer)
    yield Weight(f"{prefix}kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden), "", layer)
    yield Weight(f"{prefix}kv_a_layernorm.weight", (kv_rank,), "", layer)
    yield Weight(f"{prefix}kv_b_proj.weight", (heads * (nope + value), kv_rank), "rows", layer)
    yield Weight(f"{prefix}o_proj.weight", (hidden, heads * value), "columns", layer)
