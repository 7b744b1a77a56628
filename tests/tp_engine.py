"""An engine's model at any tensor parallel size, as inference engines build it, in plain torch.

`TpModel(config, size, rank)` is one rank of the model of a transformers config (Llama, Qwen2,
Qwen3, Qwen3-MoE, DeepSeek-V3, or any object with their attributes); it has no forward. It fuses
`qkv_proj`, `gate_up_proj`, DeepSeek's `fused_qkv_a_proj` and the experts (`w13`, `w2`), cuts rows
(heads, ffn, vocabulary) and columns (`o_proj`, `down_proj`), and `load_weights` narrows and copies,
tensor by tensor, as vLLM's does. Any size will do:

- heads are dealt out whole, unevenly if need be; a rank has the KV heads that its query heads use,
  so a KV head may be on several ranks and is never cut;
- the ffn is cut unevenly if need be; the vocabulary is padded with zeros to equal parts;
- experts are cut like the ffn, or with `expert_parallel` dealt out whole.

Every parameter has the dtype of the model, but a router's correction bias float32 and the integer
`model.token_map` of configs with `token_map=True`.

    specs = checkpoint_specs(meta_model)              # of streamsync.layout.transformers
    engine = TpEngine(config, specs, size, rank)      # streamsync's Engine over a recorded TpModel
    engine.model.poison()                             # NaN everywhere but in padding
    with replica(engines, hub=hub.address, secret=hub_secret) as subscribers: ...
    engine.model.bits() == expected(engine.model, state_dict).bits()

`TpEngine.kept[step]` are the bits of all parameters when `step` was committed.
"""

from __future__ import annotations

import re
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

import streamsync.transports.shm  # noqa: F401 - else many loops wait for one import at once
from streamsync import Subscriber
from streamsync.layout.recorder import Recording, record_loader
from tests.sync_rig import StillEngine, bits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from streamsync.config import Config
    from streamsync.layout.region import TensorSpec
    from streamsync.plan.plan import Rules
    from streamsync.types import Apply, Version

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)")
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj",
}


def share(total: int, size: int, rank: int) -> slice:
    """What `rank` of `size` has of `total`: sizes differ by one at most."""
    return slice(rank * total // size, (rank + 1) * total // size)


def rows_of(heads: slice, head_dim: int) -> slice:
    """The rows of whole heads."""
    return slice(heads.start * head_dim, heads.stop * head_dim)


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _copy(target: torch.Tensor, tensor: torch.Tensor, dim: int, part: slice) -> None:
    target.copy_(tensor.narrow(dim, part.start, _length(part)))


class Rows(nn.Module):
    """Rows of one or several checkpoint tensors, one below the other: `parts` says which of each.

    `padding` rows of zeros follow, which no loader touches.
    """

    def __init__(
        self, parts: Mapping[str, slice], columns: int, *, bias: bool = False, padding: int = 0
    ) -> None:
        super().__init__()
        self.parts = dict(parts)
        rows = sum(map(_length, parts.values())) + padding
        self.weight = nn.Parameter(torch.zeros(rows, columns))
        self.bias = nn.Parameter(torch.zeros(rows)) if bias else None

    def load(self, kind: str, field: str, tensor: torch.Tensor) -> None:
        first = 0
        for name, part in self.parts.items():
            if name == kind:
                _copy(getattr(self, field).narrow(0, first, _length(part)), tensor, 0, part)
            first += _length(part)

    def poison(self) -> None:
        used = sum(map(_length, self.parts.values()))
        for parameter in self.parameters():
            parameter[:used] = torch.nan


class Columns(nn.Module):
    """Columns of a checkpoint tensor; its bias is on every rank."""

    def __init__(self, rows: int, part: slice, *, bias: bool = False) -> None:
        super().__init__()
        self.part = part
        self.weight = nn.Parameter(torch.zeros(rows, _length(part)))
        self.bias = nn.Parameter(torch.zeros(rows)) if bias else None

    def load(self, _kind: str, field: str, tensor: torch.Tensor) -> None:
        if field == "weight":
            _copy(self.weight, tensor, 1, self.part)
        else:
            getattr(self, field).copy_(tensor)


class Whole(nn.Module):
    """On every rank: norms and routers. A router's correction bias stays float32."""

    def __init__(self, *shape: int, correction_bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))
        if correction_bias:
            self.e_score_correction_bias = nn.Parameter(torch.zeros(shape[0]))

    def load(self, _kind: str, field: str, tensor: torch.Tensor) -> None:
        getattr(self, field).copy_(tensor)


class Experts(nn.Module):
    """Experts `experts` of the model, stacked; `part` is what this rank has of each one's ffn."""

    def __init__(self, experts: slice, hidden: int, part: slice) -> None:
        super().__init__()
        self.experts, self.part = experts, part
        self.w13 = nn.Parameter(torch.zeros(_length(experts), 2 * _length(part), hidden))
        self.w2 = nn.Parameter(torch.zeros(_length(experts), hidden, _length(part)))

    def load_expert(self, expert: int, kind: str, tensor: torch.Tensor) -> None:
        if not self.experts.start <= expert < self.experts.stop:
            return
        local, width = expert - self.experts.start, _length(self.part)
        if kind == "down_proj":
            _copy(self.w2[local], tensor, 1, self.part)
        else:
            first = width * (kind == "up_proj")
            _copy(self.w13[local].narrow(0, first, width), tensor, 0, self.part)


class TpModel(nn.Module):
    """One rank; all zeros until `load_weights`. See the module's docstring.

    `tied=False` gives it an `lm_head` of its own also where the config ties it, and `tied=True`
    the reverse.
    """

    def __init__(
        self,
        config: Any,
        size: int = 1,
        rank: int = 0,
        *,
        dtype: torch.dtype = torch.float32,
        expert_parallel: bool = False,
        tied: bool | None = None,
    ) -> None:
        super().__init__()
        self._made_of = {
            "config": config,
            "size": size,
            "rank": rank,
            "dtype": dtype,
            "expert_parallel": expert_parallel,
            "tied": tied,
        }
        self._config, self._size, self._rank = config, size, rank
        self._expert_parallel = expert_parallel
        self.model = nn.Module()
        self.model.embed_tokens = self._vocabulary("embed_tokens")
        if getattr(config, "token_map", False):
            self.model.register_buffer("token_map", torch.zeros(config.vocab_size).long())
        self.model.layers = nn.ModuleList(map(self._layer, range(config.num_hidden_layers)))
        self.model.norm = Whole(config.hidden_size)
        if not (config.tie_word_embeddings if tied is None else tied):
            self.lm_head = self._vocabulary("lm_head")
        self.to(dtype).requires_grad_(False)
        for module in self.modules():
            if hasattr(module, "e_score_correction_bias"):
                module.e_score_correction_bias.data = module.e_score_correction_bias.float()

    def twin(self) -> TpModel:
        """Another one of its kind, all zeros."""
        return TpModel(**self._made_of)

    def _share(self, total: int) -> slice:
        return share(total, self._size, self._rank)

    def _vocabulary(self, kind: str) -> Rows:
        total = self._config.vocab_size
        rows = -(-total // self._size)
        part = slice(min(self._rank * rows, total), min((self._rank + 1) * rows, total))
        return Rows({kind: part}, self._config.hidden_size, padding=rows - _length(part))

    def _layer(self, number: int) -> nn.Module:
        config = self._config
        layer = nn.Module()
        layer.input_layernorm = Whole(config.hidden_size)
        layer.self_attn = self._mla() if hasattr(config, "kv_lora_rank") else self._attention()
        layer.post_attention_layernorm = Whole(config.hidden_size)
        is_dense = not self._num_experts or number < getattr(config, "first_k_dense_replace", 0)
        layer.mlp = self._mlp(config.intermediate_size) if is_dense else self._moe()
        return layer

    def _attention(self) -> nn.Module:
        config, head = self._config, self._config.head_dim
        hidden = config.hidden_size
        per_group = config.num_attention_heads // config.num_key_value_heads
        queries = self._share(config.num_attention_heads)
        keys = slice(queries.start // per_group, -(-queries.stop // per_group))
        has_bias = config.model_type == "qwen2" or config.attention_bias
        attention = nn.Module()
        attention.qkv_proj = Rows(
            {
                "q_proj": rows_of(queries, head),
                "k_proj": rows_of(keys, head),
                "v_proj": rows_of(keys, head),
            },
            hidden,
            bias=has_bias,
        )
        attention.o_proj = Columns(
            hidden, rows_of(queries, head), bias=has_bias and config.model_type != "qwen2"
        )
        if config.model_type.startswith("qwen3"):
            attention.q_norm, attention.k_norm = Whole(head), Whole(head)
        return attention

    def _mla(self) -> nn.Module:
        config, heads = self._config, self._share(self._config.num_attention_heads)
        hidden, rope, nope = config.hidden_size, config.qk_rope_head_dim, config.qk_nope_head_dim
        attention = nn.Module()
        attention.fused_qkv_a_proj = Rows(
            {
                "q_a_proj": slice(0, config.q_lora_rank),
                "kv_a_proj_with_mqa": slice(0, config.kv_lora_rank + rope),
            },
            hidden,
        )
        attention.q_a_layernorm = Whole(config.q_lora_rank)
        attention.kv_a_layernorm = Whole(config.kv_lora_rank)
        attention.q_b_proj = Rows({"q_b_proj": rows_of(heads, nope + rope)}, config.q_lora_rank)
        attention.kv_b_proj = Rows(
            {"kv_b_proj": rows_of(heads, nope + config.v_head_dim)}, config.kv_lora_rank
        )
        attention.o_proj = Columns(hidden, rows_of(heads, config.v_head_dim))
        return attention

    def _mlp(self, ffn: int) -> nn.Module:
        part, hidden = self._share(ffn), self._config.hidden_size
        mlp = nn.Module()
        mlp.gate_up_proj = Rows({"gate_proj": part, "up_proj": part}, hidden)
        mlp.down_proj = Columns(hidden, part)
        return mlp

    @property
    def _num_experts(self) -> int:
        config = self._config
        return getattr(config, "num_experts", 0) or getattr(config, "n_routed_experts", 0) or 0

    def _moe(self) -> nn.Module:
        config, number, ffn = self._config, self._num_experts, self._config.moe_intermediate_size
        is_deepseek = hasattr(config, "n_shared_experts")
        moe = nn.Module()
        moe.gate = Whole(number, config.hidden_size, correction_bias=is_deepseek)
        if self._expert_parallel:
            moe.experts = Experts(self._share(number), config.hidden_size, slice(0, ffn))
        else:
            moe.experts = Experts(slice(0, number), config.hidden_size, self._share(ffn))
        if is_deepseek:
            moe.shared_experts = self._mlp(ffn * config.n_shared_experts)
        return moe

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes the tensors of a Hugging Face checkpoint, in any order; leaves padding alone."""
        for name, tensor in weights:
            if name == "model.token_map":
                self.get_buffer(name).copy_(tensor)
                continue
            path, _, field = name.rpartition(".")
            owner, _, kind = path.rpartition(".")
            if expert := _EXPERT.fullmatch(owner):
                experts: Any = self.get_submodule(expert[1])
                experts.load_expert(int(expert[2]), kind, tensor)
                continue
            if name == "lm_head.weight" and not hasattr(self, "lm_head"):
                continue
            module: Any = self.get_submodule(f"{owner}.{_FUSED.get(kind, kind)}".lstrip("."))
            module.load(kind, field, tensor)

    def poison(self) -> None:
        """Makes everything that a checkpoint fills NaN (integers -1); padding stays zero."""
        for module in self.modules():
            if isinstance(module, Rows):
                module.poison()
            else:
                for parameter in module.parameters(recurse=False):
                    parameter.fill_(torch.nan)
        for buffer in self.buffers():
            buffer.fill_(-1)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers by name."""
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    def bits(self) -> dict[str, bytes]:
        """Of every parameter and buffer, padding included."""
        return {name: bits(tensor) for name, tensor in self.tensors().items()}


def record(model: TpModel, checkpoint: Mapping[str, TensorSpec]) -> Recording:
    """The recording of `model`'s loader over all tensors of a checkpoint.

    Experts of other ranks are listed in the layout without entries, so that a plan knows them.
    """
    recording = record_loader(model, checkpoint, model.load_weights)
    layout = recording.binding.layout
    elsewhere = tuple(checkpoint[name] for name in recording.ignored if name != "lm_head.weight")
    recording.binding.layout = msgspec.structs.replace(layout, tensors=layout.tensors + elsewhere)
    return recording


def expected(model: TpModel, checkpoint: Mapping[str, torch.Tensor]) -> TpModel:
    """A twin of `model` that its own loader loaded `checkpoint` into.

    An untied `lm_head` takes the embedding when the checkpoint has none.
    """
    twin = model.twin()
    twin.load_weights(checkpoint.items())
    if hasattr(twin, "lm_head") and "lm_head.weight" not in checkpoint:
        twin.load_weights([("lm_head.weight", checkpoint["model.embed_tokens.weight"])])
    return twin


class TpEngine(StillEngine):
    """An engine rank over the recorded loader of its own `model`, which starts poisoned.

    `checkpoint` has the specs of all tensors of the checkpoint; options are those of `TpModel`.
    """

    def __init__(
        self,
        config: Any,
        checkpoint: Mapping[str, TensorSpec],
        size: int = 1,
        rank: int = 0,
        **options: Any,
    ) -> None:
        self.model = TpModel(config, size, rank, **options)
        self.model.poison()
        self.recording = record(self.model, checkpoint)
        self.kept: dict[int, dict[str, bytes]] = {}
        super().__init__(self.recording.binding)

    def commit(self, version: Version) -> None:
        super().commit(version)
        self.kept[version.step] = self.model.bits()


def tp_engines(
    config: Any, checkpoint: Mapping[str, TensorSpec], size: int, **options: Any
) -> list[TpEngine]:
    """The ranks of one replica."""
    return [TpEngine(config, checkpoint, size, rank, **options) for rank in range(size)]


@contextmanager
def replica(
    engines: Sequence[TpEngine],
    *,
    hub: str,
    secret: str,
    name: str = "engine",
    config: Config | None = None,
    rules: Rules | None = None,
    apply: Apply = "layer",
) -> Iterator[list[Subscriber]]:
    """Subscribes the ranks of one replica from this process; `config` says the transport."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Subscriber(
                    engine,
                    hub=hub,
                    secret=secret,
                    replica=name,
                    rank=rank,
                    num_ranks=len(engines),
                    rules=rules,
                    config=config,
                    apply=apply,
                )
            )
            for rank, engine in enumerate(engines)
        ]
