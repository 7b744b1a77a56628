"""The layouts of a trainer's ranks by rule: Megatron-Core's, and FSDP's. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from streamsync.errors import ConfigError
from streamsync.layout.region import Box, Entry, Layout, TensorSpec, View, contiguous_strides
from streamsync.models.megatron_rules import Place, Rules
from streamsync.models.parallelism import even_part

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from streamsync.models.megatron_rules import Parameter
    from streamsync.models.model import Model
    from streamsync.models.parallelism import Parallelism

_VOCABULARY_MULTIPLE: Final = 128
"""Megatron's default of `make_vocab_size_divisible_by`: rows of each rank are a multiple of it."""


def trainer_key(parallelism: Parallelism, rank: int) -> tuple[int, ...]:
    """Equal for ranks of equal layout (data parallel copies)."""
    parallelism.check_rank(rank)
    rank %= parallelism.replica_ranks
    if parallelism.fsdp:
        return (rank,)
    stage, inner = divmod(rank, parallelism.stage_ranks)
    expert = inner % parallelism.expert_ranks if parallelism.ep else 0
    return (stage, inner % parallelism.tp, expert)


def trainer_layout(model: Model, parallelism: Parallelism, rank: int) -> Layout:
    """What `rank` of a trainer holds; it lists nothing else.

    Raises `ConfigError` where the model can't be cut that way, `LayoutError` for a family without
    rules.
    """
    key = trainer_key(parallelism, rank)
    if parallelism.fsdp:
        return _fsdp_layout(model, parallelism.fsdp, key[0])
    check_cut(model, parallelism)
    stage, tp, expert = key
    etp_size = max(parallelism.etp, 1) if parallelism.ep else parallelism.tp
    place = Place(
        tp=tp,
        tp_size=parallelism.tp,
        ep=expert // etp_size if parallelism.ep else 0,
        ep_size=max(parallelism.ep, 1),
        etp=expert % etp_size if parallelism.ep else tp,
        etp_size=etp_size,
    )
    return _megatron_layout(model, parallelism, stage, Rules(model.config, place))


def check_cut(model: Model, parallelism: Parallelism) -> None:
    """Raises `ConfigError` unless every tensor divides into equal parts."""
    if model.num_experts and parallelism.ep and model.num_experts % parallelism.ep:
        raise ConfigError(f"ep{parallelism.ep} does not divide {model.num_experts} experts")
    etp = max(parallelism.etp, 1) if parallelism.ep else parallelism.tp
    groups = model.config.get("num_key_value_heads") or model.config["num_attention_heads"]
    for weight in model.weights:
        num_parts = parallelism.tp if weight.expert is None else etp
        if weight.cut in ("", "vocabulary"):
            continue
        size = weight.shape[weight.cut == "columns"]
        if weight.cut == "kv_rows":  # cut together with the query heads of its group
            heads = model.config["num_attention_heads"]
            size = size // groups * (heads + 2 * groups)
        if size % num_parts:
            raise ConfigError(
                f"{weight.name} {list(weight.shape)} can't be cut into {num_parts} equal parts; "
                "choose another tp or etp"
            )
        if weight.layer > 0:
            break  # layers are alike, but for first dense ones


def stage_layers(parallelism: Parallelism, num_layers: int, stage: int) -> list[int]:
    """The layers of a pipeline stage: with virtual stages, every `pp`-th run of them."""
    num_runs = parallelism.pp * parallelism.vpp
    runs = (stage + parallelism.pp * v for v in range(parallelism.vpp))
    return [layer for run in runs for layer in even_part(num_layers, num_runs, run)]


def _megatron_layout(model: Model, parallelism: Parallelism, stage: int, rules: Rules) -> Layout:
    specs: dict[str, int] = {}
    dtypes = {spec.name: spec.dtype for spec in _odd_specs(model)}
    tensors: list[TensorSpec] = []
    entries: list[Entry] = []
    vocabulary = model.config["vocab_size"]
    rows = -(-vocabulary // (_VOCABULARY_MULTIPLE * parallelism.tp)) * _VOCABULARY_MULTIPLE
    for storage, name in enumerate(parameters(model, parallelism, stage, rules.place)):
        parameter: Parameter = rules.parameter(name, is_cut=False, num_rows=rows)
        for part in parameter.parts:
            if part.tensor == "lm_head.weight" and model.is_tied:
                continue
            if part.tensor not in specs:
                specs[part.tensor] = len(tensors)
                dtype = dtypes.get(part.tensor, model.dtype)
                tensors.append(TensorSpec(part.tensor, part.shape, dtype))
            if part.box.numel:
                view = View(storage, part.offset, part.strides)
                entries.append(Entry(specs[part.tensor], part.box, view))
    return Layout(tensors=tuple(tensors), entries=tuple(entries))


def _odd_specs(model: Model) -> Iterator[TensorSpec]:
    return (spec for spec in model.tensors if spec.dtype != model.dtype)


def parameters(model: Model, parallelism: Parallelism, stage: int, place: Place) -> Iterator[str]:
    """Names of a rank's parameters in Megatron-Core (layers and experts counted over the whole
    model, as `Rules.parameter` takes them), in forward order."""
    last = parallelism.pp - 1
    num_experts = model.num_experts // place.ep_size
    experts = range(place.ep * num_experts, (place.ep + 1) * num_experts)
    if stage == 0:
        yield "embedding.word_embeddings.weight"
    for layer in stage_layers(parallelism, model.num_layers, stage):
        yield from _layer(model, layer, f"decoder.layers.{layer}.", experts)
    if stage != last:
        return
    yield "decoder.final_layernorm.weight"
    if stage != 0 or not model.is_tied:
        yield "output_layer.weight"
    for number in range(int(model.config.get("num_nextn_predict_layers") or 0)):
        prefix = f"mtp.layers.{number}."
        for name in ("enorm", "hnorm", "eh_proj"):
            yield f"{prefix}{name}.weight"
        layer = model.num_layers + number
        yield from _layer(model, layer, f"{prefix}transformer_layer.", experts)
        yield f"{prefix}final_layernorm.weight"


def _layer(model: Model, layer: int, prefix: str, experts: Sequence[int]) -> Iterator[str]:
    own = {
        model.weights[number].name.removeprefix(f"model.layers.{layer}.")
        for number in model.numbers[layer, None]
    }
    attention = {
        "q_proj": "linear_q_proj" if model.config.get("kv_lora_rank") else "linear_qkv",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "q_a_proj": "linear_q_down_proj",
        "q_a_layernorm": "q_layernorm",
        "q_b_proj": "linear_q_up_proj",
        "kv_a_proj_with_mqa": "linear_kv_down_proj",
        "kv_a_layernorm": "kv_layernorm",
        "kv_b_proj": "linear_kv_up_proj",
        "o_proj": "linear_proj",
    }
    yield f"{prefix}input_layernorm.weight"
    for ours, theirs in attention.items():
        for kind in ("weight", "bias"):
            if f"self_attn.{ours}.{kind}" in own:
                yield f"{prefix}self_attention.{theirs}.{kind}"
    yield f"{prefix}pre_mlp_layernorm.weight"
    moe = "block_sparse_moe" if model.config["model_type"] == "mixtral" else "mlp"
    if f"{moe}.gate.weight" not in own:
        yield f"{prefix}mlp.linear_fc1.weight"
        yield f"{prefix}mlp.linear_fc2.weight"
        return
    yield f"{prefix}mlp.router.weight"
    if f"{moe}.gate.e_score_correction_bias" in own:
        yield f"{prefix}mlp.router.expert_bias"
    for expert in experts:
        yield f"{prefix}mlp.experts.local_experts.{expert}.linear_fc1.weight"
        yield f"{prefix}mlp.experts.local_experts.{expert}.linear_fc2.weight"
    if f"{moe}.shared_experts.gate_proj.weight" in own:
        yield f"{prefix}mlp.shared_experts.linear_fc1.weight"
        yield f"{prefix}mlp.shared_experts.linear_fc2.weight"


def _fsdp_layout(model: Model, num_ranks: int, rank: int) -> Layout:
    """Every tensor's first dim in chunks of the rounded-up size, as `torch.chunk` cuts."""
    entries: list[Entry] = []
    for number, spec in enumerate(model.tensors):
        rows, *inner = spec.shape
        chunk = -(-rows // num_ranks)
        start = min(rank * chunk, rows)
        box = Box((start, *(0,) * len(inner)), (min(chunk, rows - start), *inner))
        if box.numel:
            view = View(len(entries), 0, contiguous_strides(box.shape))
            entries.append(Entry(number, box, view))
    return Layout(tensors=model.tensors, entries=tuple(entries))
