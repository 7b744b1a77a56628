"""How Megatron-Core keeps a Hugging Face model: each parameter as boxes of checkpoint tensors.

Pure: a config and a rank's place in, boxes and views out. A parameter is a matrix (or vector) of
whole checkpoint blocks in Megatron's order, of which a rank holds an equal run of rows or columns:

    linear_qkv      per group of heads its query heads, its key, its value; cut by raw rows, so that
                    a rank may hold query heads alone where there are fewer groups than ranks
    linear_fc1      gate and up, each cut by rows, one after the other on each rank
    linear_proj, linear_fc2, linear_q_up_proj, ...    one tensor, cut by columns or rows
    weight1, weight2    the rank's experts stacked and transposed (`GroupedMLP`)

Sources: megatron/core/transformer/{attention,mlp,multi_latent_attention,multi_token_prediction}.py
and moe/experts.py of Megatron-Core 0.16.1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamsync.errors import LayoutError
from streamsync.layout.region import Box, contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Shape = tuple[int, ...]


@dataclass(slots=True, frozen=True, kw_only=True)
class Place:
    """A rank's place: its number and the size along each axis that cuts parameters."""

    tp: int = 0
    tp_size: int = 1
    ep: int = 0
    ep_size: int = 1
    etp: int = 0
    etp_size: int = 1


@dataclass(slots=True, frozen=True)
class Part:
    """A box of a checkpoint tensor of `shape`, and where it lies in the (row-major) parameter."""

    tensor: str
    shape: Shape
    box: Box
    offset: int
    strides: Shape


@dataclass(slots=True, frozen=True)
class Parameter:
    """What a parameter must be on this rank: its local shape, its parts, along which dim it is cut
    (None: whole on every rank) into how many, and whether it is an expert's."""

    shape: Shape
    parts: tuple[Part, ...]
    dim: int | None
    num_cuts: int = 1
    stride: int = 1
    is_expert: bool = False


_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(?:transformer_layer\.)?(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")
_NORMS = {
    "input_layernorm.weight": "input_layernorm",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm",
    "pre_mlp_layernorm.weight": "post_attention_layernorm",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm",
}
_MTP = {
    "enorm.weight": "enorm",
    "hnorm.weight": "hnorm",
    "final_layernorm.weight": "shared_head.norm",
}


class Rules:
    """The rules of one model at one place. `config` is the Hugging Face config as a mapping."""

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        self.place = place
        self._config = config
        self._kind = config["model_type"]
        if self._kind not in _KINDS:
            raise LayoutError(
                f"Megatron models of model_type {self._kind!r} have no rules yet; there are rules "
                f"for {', '.join(sorted(_KINDS))}"
            )
        self._hidden: int = config["hidden_size"]
        self._heads: int = config["num_attention_heads"]
        self._groups: int = config.get("num_key_value_heads") or self._heads
        self._head: int = config.get("head_dim") or self._hidden // self._heads
        self._is_mla = bool(config.get("kv_lora_rank"))
        self._moe = "block_sparse_moe" if self._kind == "mixtral" else "mlp"
        expert_names = ("num_experts", "num_local_experts", "n_routed_experts")
        self._experts: int = next((config[n] for n in expert_names if config.get(n)), 0)
        self._expert_ffn: int = config.get("moe_intermediate_size") or config["intermediate_size"]
        gated = ("gate_proj", "up_proj", "down_proj")
        self._expert_names = ("w1", "w3", "w2") if self._kind == "mixtral" else gated

    def parameter(self, name: str, *, is_cut: bool, num_rows: int) -> Parameter:
        """What the parameter of that name is here.

        `name` counts layers and sequential experts over the whole model. Two facts are the
        parameter's own: whether it `is_cut` (MLA's down projections come either way), and its
        `num_rows` (only Megatron knows how far the vocabulary is padded). Raises `LayoutError`
        for a name without a rule.
        """
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            return self._vocabulary(name, num_rows)
        if name == "decoder.final_layernorm.weight":
            return self._whole("model.norm.weight", (self._hidden,))
        match = _LAYER.fullmatch(name)
        if match is None:
            raise self._unknown(name)
        block, number, rest = match.groups()
        layer = int(number) + (self._config["num_hidden_layers"] if block == "mtp" else 0)
        found = self._layer(f"model.layers.{layer}.", rest, is_cut=is_cut)
        if found is None:
            raise self._unknown(name)
        return found

    def _unknown(self, name: str) -> LayoutError:
        return LayoutError(
            f"no rule of {self._kind} knows this parameter of Megatron; take it out of the model, "
            "or add a rule for it to streamsync/models",
            tensor=name,
        )

    def _layer(self, layer: str, name: str, *, is_cut: bool) -> Parameter | None:
        """The parameter `name` of a layer whose checkpoint prefix is `layer`."""
        hidden, attention = self._hidden, f"{layer}self_attn."
        if name in _NORMS:
            return self._whole(f"{layer}{_NORMS[name]}.weight", (hidden,))
        if name in _MTP:
            return self._whole(f"{layer}{_MTP[name]}.weight", (hidden,))
        if name == "eh_proj.weight":
            return self._rows([(f"{layer}eh_proj.weight", (hidden, 2 * hidden), 0, hidden)])
        if name.startswith("self_attention."):
            name = name.removeprefix("self_attention.")
            if self._is_mla:
                return self._latent(attention, name, is_cut=is_cut)
            return self._attention(attention, name)
        if name == "mlp.router.weight":
            return self._whole(f"{layer}{self._moe}.gate.weight", (self._experts, hidden))
        if name == "mlp.router.expert_bias":
            bias = f"{layer}{self._moe}.gate.e_score_correction_bias"
            return self._whole(bias, (self._experts,))
        return self._feed_forward(layer, name)

    def _attention(self, prefix: str, name: str) -> Parameter | None:
        head = self._head
        if name in ("q_layernorm.weight", "k_layernorm.weight"):
            return self._whole(f"{prefix}{name[0]}_norm.weight", (head,))
        if name == "linear_proj.weight":
            shape = self._hidden, self._heads * head
            return self._columns(f"{prefix}o_proj.weight", shape)
        if name not in ("linear_qkv.weight", "linear_qkv.bias"):
            return None
        kind = name.removeprefix("linear_qkv.")
        inner = (self._hidden,) if kind == "weight" else ()
        rows = {"q": self._heads // self._groups * head, "k": head, "v": head}
        return self._rows(
            [
                (f"{prefix}{x}_proj.{kind}", (self._groups * n, *inner), group * n, n)
                for group in range(self._groups)
                for x, n in rows.items()
            ]
        )

    def _latent(self, prefix: str, name: str, *, is_cut: bool) -> Parameter | None:
        """Multi-latent attention: down projections are whole with TransformerEngine."""
        config, heads = self._config, self._heads
        q_rank, kv_rank = config.get("q_lora_rank") or 0, config["kv_lora_rank"]
        nope, rope, value = (
            config[n] for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        if name in ("q_layernorm.weight", "linear_q_up_proj.layer_norm_weight"):
            return self._whole(f"{prefix}q_a_layernorm.weight", (q_rank,))
        if name in ("kv_layernorm.weight", "linear_kv_up_proj.layer_norm_weight"):
            return self._whole(f"{prefix}kv_a_layernorm.weight", (kv_rank,))
        if name == "linear_proj.weight":
            return self._columns(f"{prefix}o_proj.weight", (self._hidden, heads * value))
        shapes = {
            "linear_q_proj.weight": ("q_proj", heads * (nope + rope), self._hidden),
            "linear_q_down_proj.weight": ("q_a_proj", q_rank, self._hidden),
            "linear_q_up_proj.weight": ("q_b_proj", heads * (nope + rope), q_rank),
            "linear_kv_down_proj.weight": ("kv_a_proj_with_mqa", kv_rank + rope, self._hidden),
            "linear_kv_up_proj.weight": ("kv_b_proj", heads * (nope + value), kv_rank),
        }
        if name not in shapes:
            return None
        own, rows, columns = shapes[name]
        if "_down_" in name and not is_cut:
            return self._whole(f"{prefix}{own}.weight", (rows, columns))
        return self._rows([(f"{prefix}{own}.weight", (rows, columns), 0, rows)])

    def _feed_forward(self, layer: str, name: str) -> Parameter | None:
        place, gated = self.place, ("gate_proj", "up_proj", "down_proj")
        if expert := _EXPERT.fullmatch(name):
            owner = f"{layer}{self._moe}.experts.{expert[1]}."
            cut = place.etp, place.etp_size
            return self._gated(owner, self._expert_names, self._expert_ffn, expert[2], cut, True)
        if name in ("mlp.experts.weight1", "mlp.experts.weight2"):
            return self._stacked(f"{layer}{self._moe}.experts.", name[-7:])
        dense = {
            "mlp.": ("mlp.", self._config["intermediate_size"]),
            "mlp.shared_experts.": (
                "mlp.shared_experts.",
                self._expert_ffn * (self._config.get("n_shared_experts") or 0),
            ),
        }
        owner, _, linear = name.removesuffix(".weight").rpartition("linear_fc")
        if owner not in dense or linear not in ("1", "2"):
            return None
        own, ffn = dense[owner]
        cut = place.tp, place.tp_size
        return self._gated(layer + own, gated, ffn, f"linear_fc{linear}", cut, False)

    def _gated(
        self,
        owner: str,
        names: tuple[str, str, str],
        ffn: int,
        linear: str,
        cut: tuple[int, int],
        is_expert: bool,
    ) -> Parameter:
        gate, up, down = (f"{owner}{name}.weight" for name in names)
        hidden, (rank, size) = self._hidden, cut
        if linear == "linear_fc2":
            return self._columns(down, (hidden, ffn), rank, size, is_expert=is_expert)
        rows = ffn // size
        box = Box((rank * rows, 0), (rows, hidden))
        return Parameter(
            (2 * rows, hidden),
            tuple(
                Part(tensor, (ffn, hidden), box, number * rows * hidden, (hidden, 1))
                for number, tensor in enumerate((gate, up))
            ),
            0,
            size,
            stride=2,
            is_expert=is_expert,
        )

    def _stacked(self, owner: str, name: str) -> Parameter:
        """`GroupedMLP`: its memory is [expert, hidden, gate and up] and [expert, ffn, hidden],
        whatever its shape says."""
        hidden, place, ffn = self._hidden, self.place, self._expert_ffn
        local, rows = self._experts // place.ep_size, ffn // place.etp_size
        gate, up, down = self._expert_names
        parts = []
        for number in range(local):
            prefix = f"{owner}{place.ep * local + number}."
            if name == "weight1":
                box, start = Box((place.etp * rows, 0), (rows, hidden)), number * hidden * 2 * rows
                parts += [
                    Part(f"{prefix}{gate}.weight", (ffn, hidden), box, start, (1, 2 * rows)),
                    Part(f"{prefix}{up}.weight", (ffn, hidden), box, start + rows, (1, 2 * rows)),
                ]
            else:
                box, start = Box((0, place.etp * rows), (hidden, rows)), number * rows * hidden
                parts.append(Part(f"{prefix}{down}.weight", (hidden, ffn), box, start, (1, hidden)))
        shape = (hidden, local * 2 * rows) if name == "weight1" else (local * rows, hidden)
        dim = 1 if name == "weight1" else 0
        return Parameter(shape, tuple(parts), dim, place.etp_size, is_expert=True)

    def _vocabulary(self, name: str, num_rows: int) -> Parameter:
        """Rows beyond the vocabulary are padding; a tied tensor is held under both its names."""
        vocab, hidden, place = self._config["vocab_size"], self._hidden, self.place
        tensors = ["model.embed_tokens.weight", "lm_head.weight"]
        if not self._config.get("tie_word_embeddings"):
            tensors = [tensors[name == "output_layer.weight"]]
        if num_rows * place.tp_size < vocab:
            raise LayoutError(
                f"its {num_rows} rows on each of {place.tp_size} ranks are fewer than the "
                f"config's vocab_size {vocab}; bind it with the config that it was built from",
                tensor=name,
            )
        start, stop = (min(vocab, num_rows * rank) for rank in (place.tp, place.tp + 1))
        box = Box((start, 0), (stop - start, hidden))
        return Parameter(
            (num_rows, hidden),
            tuple(Part(tensor, (vocab, hidden), box, 0, (hidden, 1)) for tensor in tensors),
            0,
            place.tp_size,
        )

    def _whole(self, tensor: str, shape: Shape) -> Parameter:
        part = Part(tensor, shape, Box.whole(shape), 0, contiguous_strides(shape))
        return Parameter(shape, (part,), None)

    def _columns(
        self,
        tensor: str,
        shape: Shape,
        rank: int | None = None,
        size: int | None = None,
        *,
        is_expert: bool = False,
    ) -> Parameter:
        rank = self.place.tp if rank is None else rank
        size = size or self.place.tp_size
        columns = shape[1] // size
        box = Box((0, rank * columns), (shape[0], columns))
        part = Part(tensor, shape, box, 0, (columns, 1))
        return Parameter((shape[0], columns), (part,), 1, size, is_expert=is_expert)

    def _rows(self, blocks: Sequence[tuple[str, Shape, int, int]]) -> Parameter:
        """Blocks of rows (tensor, its shape, first row, rows), one below the other, cut evenly."""
        place, inner = self.place, blocks[0][1][1:]
        rows = sum(n for *_, n in blocks) // place.tp_size
        low, high = place.tp * rows, (place.tp + 1) * rows
        strides = contiguous_strides((rows, *inner))
        parts, at = [], 0
        for tensor, shape, first, n in blocks:
            start, stop = max(at, low), min(at + n, high)
            if start < stop:
                zeros = (0,) * len(inner)
                box = Box((first + start - at, *zeros), (stop - start, *inner))
                parts.append(Part(tensor, shape, box, (start - low) * strides[0], strides))
            at += n
        return Parameter((rows, *inner), tuple(parts), 0, place.tp_size)


_KINDS = frozenset({"llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3"})
