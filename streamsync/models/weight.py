"""The tensors of a checkpoint as rules write them down: name, shape, and how they may be cut. Pure.

A family's file is a function from a config.json to `Weight`s in forward order, written in the words
of this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Shape = tuple[int, ...]
Cut = Literal["rows", "columns", "kv_rows", "vocabulary", ""]
"""How tensor parallelism cuts a tensor: rows or columns evenly; `kv_rows` by whole key value heads,
which are repeated where there are fewer than ranks; `vocabulary` rows, padded at the end; or not at
all."""


class Weight(NamedTuple):
    """One tensor. `layer` is its decoder layer (-1: before all, `num_layers` and more: after), and
    `expert` the number of the routed expert that it belongs to."""

    name: str
    shape: Shape
    cut: Cut = ""
    layer: int = -1
    expert: int | None = None
    dtype: str = ""
    """Empty: the model's own."""


def head_dim(config: Mapping[str, Any]) -> int:
    """Features of one attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def embedding(config: Mapping[str, Any]) -> Iterator[Weight]:
    """What stands before the layers."""
    shape = config["vocab_size"], config["hidden_size"]
    yield Weight("model.embed_tokens.weight", shape, "vocabulary")


def head(config: Mapping[str, Any]) -> Iterator[Weight]:
    """What stands after the layers, the head, too, where it is tied to the embedding."""
    last = config["num_hidden_layers"]
    hidden = config["hidden_size"]
    yield Weight("model.norm.weight", (hidden,), "", last)
    yield Weight("lm_head.weight", (config["vocab_size"], hidden), "vocabulary", last)


def norms(config: Mapping[str, Any], layer: int) -> Iterator[Weight]:
    """The two norms of a decoder layer."""
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield Weight(f"model.layers.{layer}.{name}.weight", (config["hidden_size"],), "", layer)


def attention(
    config: Mapping[str, Any], layer: int, *, bias: bool = False, head_norms: bool = False
) -> Iterator[Weight]:
    """Grouped-query attention, with biases of q, k and v, and with norms of every head."""
    prefix, hidden, size = (
        f"model.layers.{layer}.self_attn.",
        config["hidden_size"],
        head_dim(config),
    )
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    cuts: dict[str, tuple[int, Cut]] = {
        "q_proj": (heads * size, "rows"),
        "k_proj": (groups * size, "kv_rows"),
        "v_proj": (groups * size, "kv_rows"),
    }
    for name, (rows, cut) in cuts.items():
        yield Weight(f"{prefix}{name}.weight", (rows, hidden), cut, layer)
        if bias:
            yield Weight(f"{prefix}{name}.bias", (rows,), cut, layer)
    yield Weight(f"{prefix}o_proj.weight", (hidden, heads * size), "columns", layer)
    if head_norms:
        for name in ("q_norm", "k_norm"):
            yield Weight(f"{prefix}{name}.weight", (size,), "", layer)


def gated(
    owner: str,
    hidden: int,
    ffn: int,
    layer: int,
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    expert: int | None = None,
) -> Iterator[Weight]:
    """A gated feed-forward network: gate and up, then down."""
    gate, up, down = names
    yield Weight(f"{owner}.{gate}.weight", (ffn, hidden), "rows", layer, expert)
    yield Weight(f"{owner}.{up}.weight", (ffn, hidden), "rows", layer, expert)
    yield Weight(f"{owner}.{down}.weight", (hidden, ffn), "columns", layer, expert)


def experts(
    owner: str,
    config: Mapping[str, Any],
    num_experts: int,
    ffn: int,
    layer: int,
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[Weight]:
    """A router and its experts."""
    hidden = config["hidden_size"]
    yield Weight(f"{owner}.gate.weight", (num_experts, hidden), "", layer)
    for expert in range(num_experts):
        prefix = f"{owner}.experts.{expert}"
        yield from gated(prefix, hidden, ffn, layer, names=names, expert=expert)
