"""One tensor parallel rank of an engine that fuses what engines fuse, for all families here.

Query heads are dealt out evenly, and each rank has the key and value heads that its query heads
use, so that any number of ranks that divides the query heads will do: a key head may be on several
ranks. Gate and up of an expert lie row beside row (`w13[expert, 0::2]`, `[1::2]`), all experts
stacked; the vocabulary is padded to equal parts. The loader takes a checkpoint tensor by tensor.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from streamsync.layout.binding import torch_dtype
from streamsync.layout.region import TensorSpec
from tests.sync_rig import bits

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Index = tuple[slice | int, ...]

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w[123])\.weight")
_HEADS = re.compile(r"\.[qkv]_proj\.(weight|bias)$")
_KINDS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up"}


class FusedModel(nn.Module):
    """Parameters of NaN until `load` was called; it has no forward.

    Parameters are of `dtype` (None: of the checkpoint's), but biases of routers float32.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, TensorSpec],
        rank: int,
        size: int,
        dtype: str | None = None,
    ) -> None:
        super().__init__()
        self.fused = nn.ParameterDict()
        self._config, self._rank, self._size = config, rank, size
        self._places: dict[str, tuple[str, Index, Index]] = {}
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        assert heads % size == 0
        first, stop = self._share(heads)
        self._queries = slice(first, stop)
        per_group = heads // groups
        self._keys = slice(first // per_group, -(-stop // per_group))
        for spec in tensors.values():
            keeps = dtype is None or spec.name.endswith("e_score_correction_bias")
            own = spec.dtype if keeps else dtype
            self._place(TensorSpec(spec.name, spec.shape, own))

    def _share(self, total: int) -> tuple[int, int]:
        assert total % self._size == 0, f"{total} over {self._size} ranks"
        return self._rank * total // self._size, (self._rank + 1) * total // self._size

    def _place(self, spec: TensorSpec) -> None:
        """Gives a tensor its place in a parameter, which the first of its tensors makes."""
        owner, _, name = spec.name.removesuffix(".weight").rpartition(".")
        shape, dtype, everything = spec.shape, torch_dtype(spec.dtype), slice(None)
        if expert := _EXPERT.fullmatch(spec.name):
            self._place_expert(spec, expert[1], int(expert[2]), _KINDS.get(expert[3], "down"))
        elif name in ("embed_tokens", "lm_head"):
            rows = -(-shape[0] // self._size)
            start, stop = (min(shape[0], rows * at) for at in (self._rank, self._rank + 1))
            self._add(spec.name, spec.name, (rows, shape[1]), dtype)
            self._to(spec.name, spec.name, (slice(stop - start),), (slice(start, stop),))
        elif _HEADS.search(spec.name):
            self._place_heads(spec)
        elif name in ("q_b_proj", "kv_b_proj"):
            start, stop = self._share(shape[0])
            self._add(spec.name, spec.name, (stop - start, shape[1]), dtype)
            self._to(spec.name, spec.name, (everything,), (slice(start, stop),))
        elif name in ("o_proj", "down_proj"):
            start, stop = self._share(shape[1])
            self._add(spec.name, spec.name, (shape[0], stop - start), dtype)
            self._to(spec.name, spec.name, (everything,), (everything, slice(start, stop)))
        elif name in ("gate_proj", "up_proj"):
            start, stop = self._share(shape[0])
            rows, fused = stop - start, f"{owner}.gate_up_proj"
            self._add(spec.name, fused, (2 * rows, shape[1]), dtype)
            at = rows * (name == "up_proj")
            self._to(spec.name, fused, (slice(at, at + rows),), (slice(start, stop),))
        elif name in ("q_a_proj", "kv_a_proj_with_mqa"):
            fused, rank = f"{owner}.qkv_a_proj", self._config["q_lora_rank"]
            rows = rank + self._config["kv_lora_rank"] + self._config["qk_rope_head_dim"]
            self._add(spec.name, fused, (rows, shape[1]), dtype)
            target = slice(rank) if name == "q_a_proj" else slice(rank, None)
            self._to(spec.name, fused, (target,), (everything,))
        else:
            self._add(spec.name, spec.name, shape, dtype)
            self._to(spec.name, spec.name, (everything,), (everything,))

    def _place_heads(self, spec: TensorSpec) -> None:
        owner, name, kind = spec.name.rsplit(".", 2)
        head, (queries, keys) = self._config["head_dim"], (self._queries, self._keys)
        num_queries, num_keys = (part.stop - part.start for part in (queries, keys))
        fused, inner = f"{owner}.qkv_proj.{kind}", spec.shape[1:]
        rows = (num_queries + 2 * num_keys) * head
        self._add(spec.name, fused, (rows, *inner), torch_dtype(spec.dtype))
        first = {"q_proj": 0, "k_proj": num_queries, "v_proj": num_queries + num_keys}[name]
        taken = queries if name == "q_proj" else keys
        target = slice(first * head, (first + taken.stop - taken.start) * head)
        self._to(spec.name, fused, (target,), (slice(taken.start * head, taken.stop * head),))

    def _place_expert(self, spec: TensorSpec, owner: str, number: int, kind: str) -> None:
        config, dtype = self._config, torch_dtype(spec.dtype)
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = next(config[name] for name in names if name in config)
        hidden, everything = config["hidden_size"], slice(None)
        start, stop = self._share(spec.shape[1 if kind == "down" else 0])
        if kind == "down":
            self._add(spec.name, f"{owner}.w2", (experts, hidden, stop - start), dtype)
            self._to(spec.name, f"{owner}.w2", (number,), (everything, slice(start, stop)))
        else:
            self._add(spec.name, f"{owner}.w13", (experts, 2 * (stop - start), hidden), dtype)
            rows = slice(int(kind == "up"), None, 2)
            self._to(spec.name, f"{owner}.w13", (number, rows), (slice(start, stop),))

    def _add(self, tensor: str, parameter: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        key = parameter.replace(".", "/")
        if key not in self.fused:
            value = torch.full(shape, torch.nan, dtype=dtype)
            self.fused[key] = nn.Parameter(value, requires_grad=False)
        assert (tuple(self.fused[key].shape), self.fused[key].dtype) == (shape, dtype), tensor

    def _to(self, tensor: str, parameter: str, target: Index, source: Index) -> None:
        self._places[tensor] = parameter.replace(".", "/"), target, source

    @property
    def names(self) -> set[str]:
        """The checkpoint tensors that it takes."""
        return set(self._places)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """What an engine's `load_weights` does."""
        for name, tensor in weights:
            parameter, target, source = self._places[name]
            self.fused[parameter][target].copy_(tensor[source])

    def bits(self) -> list[bytes]:
        """Of every parameter, padding included."""
        return [bits(parameter) for parameter in self.parameters()]
