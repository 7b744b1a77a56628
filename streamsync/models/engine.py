"""The layouts of an engine's ranks by rule, as vLLM's loaders make them. Pure.

Projections into heads and features are cut by rows, those out of them by columns; key value heads
are repeated where there are fewer than ranks; vocabularies are padded to multiples of 64 and cut;
experts go whole to the ranks of tp x dp (with ep) or are cut as other layers are. What a layer
multiplies at once lies in one storage: q, k and v; gate and up; all experts of the rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from streamsync.errors import ConfigError
from streamsync.layout.region import Box, Entry, Layout, View, contiguous_strides

if TYPE_CHECKING:
    from streamsync.models.model import Model
    from streamsync.models.parallelism import Parallelism
    from streamsync.models.weight import Weight

_PADDED_ROWS: Final = 64
_FUSED: Final = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "q_a_proj": "fused_qkv_a_proj",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "w1": "gate_up_proj",
    "w3": "gate_up_proj",
}
_WHOLE_ON_EVERY_STAGE: Final = ("qwen3_moe", "mixtral")
"""Families of vLLM whose every pipeline stage holds embedding, last norm and head."""


def engine_key(parallelism: Parallelism, rank: int) -> tuple[int, ...]:
    """Equal for ranks of equal layout."""
    parallelism.check_rank(rank)
    rank %= parallelism.replica_ranks
    tp = rank % parallelism.tp
    stage = rank // parallelism.tp % parallelism.pp
    dp = rank // (parallelism.tp * parallelism.pp)
    return (stage, tp, dp if parallelism.ep else 0)


def engine_layout(model: Model, parallelism: Parallelism, rank: int) -> Layout:
    """What `rank` of an engine needs. It lists all tensors of the model in forward order, those of
    other ranks without entries.

    Raises `ConfigError` where the model can't be cut that way.
    """
    stage, tp, dp = engine_key(parallelism, rank)
    stages = stage_layers(model.num_layers, parallelism.pp)
    entries: list[Entry] = []
    storages: dict[tuple[str, ...], int] = {}
    filled: list[int] = []
    for number, weight in enumerate(model.weights):
        if not _is_here(model, parallelism, weight, stage, stages):
            continue
        cut = parallelism
        if weight.expert is not None and parallelism.ep:
            place = dp * parallelism.tp + tp
            if weight.expert not in expert_block(model.num_experts, parallelism.stage_ranks, place):
                continue
            cut = replace(parallelism, tp=1, ep=0)
        box = _box(model, weight, cut.tp, tp if cut is parallelism else 0)
        owner = _owner(weight)
        storage = storages.setdefault(owner, len(storages))
        if storage == len(filled):
            filled.append(0)
        if box.numel:
            strides = contiguous_strides(box.shape)
            entries.append(Entry(number, box, View(storage, filled[storage], strides)))
        filled[storage] += box.numel
    return Layout(tensors=model.tensors, entries=tuple(entries))


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """The layers of each pipeline stage: what is left over goes to the stages before the last."""
    sizes = [num_layers // num_stages] * num_stages
    for n in range(num_layers % num_stages):
        sizes[-2 - n if n + 2 <= num_stages else 0] += 1
    starts = [sum(sizes[:stage]) for stage in range(num_stages)]
    return [range(a, a + n) for a, n in zip(starts, sizes, strict=True)]


def expert_block(num_experts: int, num_ranks: int, rank: int) -> range:
    """The experts of one rank: the first ranks have one more where they do not divide evenly."""
    base, more = divmod(num_experts, num_ranks)
    start = rank * base + min(rank, more)
    return range(start, start + base + (rank < more))


def _is_here(
    model: Model, parallelism: Parallelism, weight: Weight, stage: int, stages: list[range]
) -> bool:
    if 0 <= weight.layer < model.num_layers:
        return weight.layer in stages[stage]
    if weight.layer > model.num_layers or "eh_proj" in weight.name:
        return False  # drafts are another engine's
    if ".layers." in weight.name:
        return False
    if model.config["model_type"] in _WHOLE_ON_EVERY_STAGE:
        return True
    first, last = stage == 0, stage == parallelism.pp - 1
    if weight.layer < 0:
        return first or (last and model.is_tied)
    return last


def _box(model: Model, weight: Weight, num_ranks: int, rank: int) -> Box:
    shape = weight.shape
    if not weight.cut or num_ranks == 1:
        return Box.whole(shape)
    if weight.cut == "vocabulary":
        rows = -(-shape[0] // _PADDED_ROWS) * _PADDED_ROWS // num_ranks
        start = min(rank * rows, shape[0])
        return Box((start, 0), (min(rows, shape[0] - start), *shape[1:]))
    dim, num_parts = int(weight.cut == "columns"), num_ranks
    if weight.cut == "kv_rows":
        groups = model.config.get("num_key_value_heads") or model.config["num_attention_heads"]
        num_parts = min(num_ranks, groups)
        if num_ranks % num_parts or groups % num_parts:
            raise ConfigError(
                f"{weight.name}: {groups} key value heads and {num_ranks} ranks do not divide "
                "each other, so a head would be cut; choose another tp"
            )
    if shape[dim] % num_parts:
        raise ConfigError(
            f"{weight.name} {list(shape)} can't be cut along dim {dim} into {num_parts} equal "
            "parts; choose another tp"
        )
    size = shape[dim] // num_parts
    start = rank * num_parts // num_ranks * size
    if dim:
        return Box((0, start), (shape[0], size))
    return Box((start, *(0,) * (len(shape) - 1)), (size, *shape[1:]))


def _owner(weight: Weight) -> tuple[str, ...]:
    """What names the storage that a weight lies in."""
    path, _, kind = weight.name.rpartition(".")
    module, _, own = path.rpartition(".")
    own = _FUSED.get(own, own)
    if weight.expert is not None:
        module = module.rpartition(".")[0]
    return module, own, kind
