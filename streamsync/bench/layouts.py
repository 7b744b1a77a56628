"""Layouts of every rank of a cluster, from its parallelism alone. Pure.

Ranks are numbered as Megatron-Core numbers them by default (tp fastest, then dp, then pp; experts
over tp x dp); an engine is one pipeline stage of tp ranks, with its experts over these.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from streamsync.errors import ConfigError
from streamsync.layout.region import Box, Entry, Layout, TensorSpec, View, contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

Shape = tuple[int, ...]


class Weight(NamedTuple):
    """A tensor of a model: along which dim tensor parallelism cuts it (None: whole on every rank),
    its layer (-1 before, `num_layers` after all), and its expert, if it is one's."""

    name: str
    shape: Shape
    dim: int | None
    layer: int
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """How many ranks each axis has; `ep` divides `tp * dp` and 0 cuts no experts."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    @classmethod
    def parse(cls, text: str) -> Cut:
        """`tp8 pp4 dp4`; raises `ConfigError`."""
        sizes: dict[str, int] = {}
        for word in text.split():
            found = re.fullmatch(r"(tp|pp|dp|ep)([1-9]\d*)", word)
            if found is None:
                raise ConfigError(f"{word!r} in {text!r} is none of tpN, ppN, dpN, epN")
            sizes[found[1]] = int(found[2])
        return cls(**sizes)

    @property
    def num_ranks(self) -> int:
        """All ranks of one copy of the parallelism."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True)
class Side:
    """The ranks of a trainer, or of one engine: rank `r` has `layouts[numbers[r]]`."""

    layouts: Sequence[Layout]
    numbers: Sequence[int]


def side(config: Mapping[str, Any], parallelism: str, *, is_sink: bool) -> Side:
    """The layouts of every rank that `parallelism` has, each different one made once. An engine's
    ranks list the whole model, a trainer's what they hold."""
    cut, model = Cut.parse(parallelism), _Model(config)
    numbers: dict[tuple[int, int, int], int] = {}
    layouts: list[Layout] = []
    of_ranks: list[int] = []
    for rank in range(cut.num_ranks):
        stage, inner = divmod(rank, cut.tp * cut.dp)
        place = (stage, inner % cut.tp, inner % cut.ep)
        if place not in numbers:
            numbers[place] = len(layouts)
            layouts.append(model.layout(cut, *place, lists_all=is_sink))
        of_ranks.append(numbers[place])
    return Side(layouts, of_ranks)


class _Model:
    """A model's tensors by layer and expert (None: no expert's), so that a rank's are found at
    once among thousands."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._num_layers: int = config["num_hidden_layers"]
        self._num_experts: int = config.get("n_routed_experts", 0)
        self._weights = tuple(weights(config))
        self._specs = tuple(TensorSpec(w.name, w.shape, "bfloat16") for w in self._weights)
        self._places: dict[tuple[int, int | None], list[int]] = {}
        for number, weight in enumerate(self._weights):
            layer = min(max(weight.layer, 0), self._num_layers - 1)
            self._places.setdefault((layer, weight.expert), []).append(number)

    def layout(self, cut: Cut, stage: int, tp: int, ep: int, *, lists_all: bool) -> Layout:
        """What a rank at this place of `cut` holds."""
        layers = range(*(self._num_layers * s // cut.pp for s in (stage, stage + 1)))
        experts = range(*(self._num_experts * e // cut.ep for e in (ep, ep + 1)))
        held = [
            number
            for layer in layers
            for expert in (None, *experts)
            for number in self._places.get((layer, expert), ())
        ]
        held.sort()
        listed = self._specs if lists_all else tuple(self._specs[number] for number in held)
        entries = []
        for place, number in enumerate(held):
            weight = self._weights[number]
            box = Box.whole(weight.shape)
            if weight.expert is None and weight.dim is not None:
                start, shape = list(box.start), list(box.shape)
                shape[weight.dim] //= cut.tp
                start[weight.dim] = tp * shape[weight.dim]
                box = Box(tuple(start), tuple(shape))
            view = View(place, 0, contiguous_strides(box.shape))
            entries.append(Entry(number if lists_all else place, box, view))
        return Layout(tensors=listed, entries=tuple(entries))


def weights(config: Mapping[str, Any]) -> Iterator[Weight]:
    """The tensors of a Llama or DeepSeek-V3 checkpoint, in forward order, by their config.json."""
    hidden, num_layers = config["hidden_size"], config["num_hidden_layers"]
    vocabulary = (config["vocab_size"], hidden)
    yield Weight("model.embed_tokens.weight", vocabulary, 0, -1)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        for name, shape, dim in (*_attention(config), *_norms(hidden)):
            yield Weight(f"{prefix}{name}.weight", shape, dim, layer)
        num_experts = config.get("n_routed_experts", 0)
        if not num_experts or layer < config["first_k_dense_replace"]:
            for name, shape, dim in _gated(hidden, config["intermediate_size"]):
                yield Weight(f"{prefix}mlp.{name}.weight", shape, dim, layer)
            continue
        ffn = config["moe_intermediate_size"]
        yield Weight(f"{prefix}mlp.gate.weight", (num_experts, hidden), None, layer)
        bias = f"{prefix}mlp.gate.e_score_correction_bias"
        yield Weight(bias, (num_experts,), None, layer)
        for name, shape, dim in _gated(hidden, ffn * config["n_shared_experts"]):
            yield Weight(f"{prefix}mlp.shared_experts.{name}.weight", shape, dim, layer)
        for expert in range(num_experts):
            for name, shape, dim in _gated(hidden, ffn):
                name = f"{prefix}mlp.experts.{expert}.{name}.weight"
                yield Weight(name, shape, dim, layer, expert)
    yield Weight("model.norm.weight", (hidden,), None, num_layers)
    yield Weight("lm_head.weight", vocabulary, 0, num_layers)


def _norms(hidden: int) -> Iterator[tuple[str, Shape, int | None]]:
    yield "input_layernorm", (hidden,), None
    yield "post_attention_layernorm", (hidden,), None


def _gated(hidden: int, ffn: int) -> Iterator[tuple[str, Shape, int | None]]:
    yield "gate_proj", (ffn, hidden), 0
    yield "up_proj", (ffn, hidden), 0
    yield "down_proj", (hidden, ffn), 1


def _attention(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape, int | None]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if "kv_lora_rank" in config:
        rope, nope = config["qk_rope_head_dim"], config["qk_nope_head_dim"]
        q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
        yield "self_attn.q_a_proj", (q_rank, hidden), None
        yield "self_attn.q_a_layernorm", (q_rank,), None
        yield "self_attn.q_b_proj", (heads * (nope + rope), q_rank), 0
        yield "self_attn.kv_a_proj_with_mqa", (kv_rank + rope, hidden), None
        yield "self_attn.kv_a_layernorm", (kv_rank,), None
        yield "self_attn.kv_b_proj", (heads * (nope + config["v_head_dim"]), kv_rank), 0
        yield "self_attn.o_proj", (hidden, heads * config["v_head_dim"]), 1
        return
    head = config["head_dim"]
    for name, rows in (("q", heads), ("k", None), ("v", None)):
        yield (
            f"self_attn.{name}_proj",
            ((rows or config["num_key_value_heads"]) * head, hidden),
            0,
        )
    yield "self_attn.o_proj", (hidden, heads * head), 1
