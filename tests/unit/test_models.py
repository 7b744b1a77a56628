"""Models by rule: their tensors against transformers, engines against vLLM, trainers whole."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamsync.errors import ConfigError, LayoutError
from streamsync.models.engine import engine_key, engine_layout, expert_block
from streamsync.models.engine import stage_layers as engine_stage_layers
from streamsync.models.model import FAMILIES, read_model
from streamsync.models.parallelism import Parallelism
from streamsync.models.trainer import trainer_key, trainer_layout
from tests.vllm import recordings
from tests.vllm.models import CONFIGS

if TYPE_CHECKING:
    from pathlib import Path

    from streamsync.layout.region import Box, Layout
    from streamsync.models.model import Model

families = pytest.mark.parametrize("family", FAMILIES)
SMALLER = {
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "hidden_size": 10,
    "head_dim": 3,
    "intermediate_size": 12,
    "moe_intermediate_size": 4,
    "vocab_size": 37,
}
SMALL = {family: config | SMALLER for family, config in CONFIGS.items()}
del SMALL["mixtral"]["moe_intermediate_size"]
MOE = ("qwen3_moe", "mixtral", "deepseek_v3")
TRAINERS = [
    (family, text)
    for family in FAMILIES
    for text in ("tp1", "tp4", "tp2 pp2", "tp2 pp2 vpp2 dp2", "tp4 dp2 ep2", "tp2 dp2 ep4", "fsdp3")
    if "ep" not in text or family in MOE
]


def boxes(layout: Layout) -> dict[str, list[Box]]:
    found: dict[str, list[Box]] = {}
    for entry in layout.entries:
        found.setdefault(layout.tensors[entry.tensor].name, []).append(entry.box)
    return found


def counted(model: Model, layouts: list[Layout]) -> dict[str, np.ndarray]:
    """How often each element of each tensor is held."""
    counts = {spec.name: np.zeros(spec.shape, int) for spec in model.tensors}
    for layout in layouts:
        for name, them in boxes(layout).items():
            for box in them:
                counts[name][tuple(map(slice, box.start, box.stop))] += 1
    return counts


def has_no_overlap(layout: Layout) -> bool:
    """Whether no two entries of a layout share an element of a storage."""
    used: dict[int, list[np.ndarray]] = {}
    for entry in layout.entries:
        steps = [np.arange(n) * s for n, s in zip(entry.box.shape, entry.view.strides, strict=True)]
        flat = entry.view.offset + sum(np.ix_(*steps)) if steps else np.array([entry.view.offset])
        used.setdefault(entry.view.storage, []).append(np.ravel(flat))
    every = [np.concatenate(parts) for parts in used.values()]
    return all(len(np.unique(places)) == len(places) for places in every)


@families
def test_tensors_are_those_of_the_checkpoint(family: str) -> None:
    """The recordings list what transformers writes of the same config."""
    want = {spec.name: (spec.shape, spec.dtype) for spec in recordings.read(family).tensors}
    made = read_model(CONFIGS[family]).tensors
    assert {spec.name: (spec.shape, spec.dtype) for spec in made} == want
    assert len(made) == len(want)


@families
def test_engines_are_cut_as_vllm_cuts_them(family: str) -> None:
    """Cases 3, 4, 7: every rank of every recorded engine."""
    recorded, model = recordings.read(family), read_model(CONFIGS[family])
    for engine in recorded.engines:
        cut = engine.cut
        text = f"tp{cut.tp} pp{cut.pp}" + (f" ep{cut.tp}" if cut.ep else "")
        parallelism = Parallelism.parse(text)
        for rank, layout in enumerate(recorded.layouts(engine)):
            made = engine_layout(model, parallelism, rank)
            assert boxes(made) == boxes(layout), (text, rank)


@families
def test_what_an_engine_multiplies_at_once_lies_in_one_storage(family: str) -> None:
    model = read_model(SMALL[family])
    layout = engine_layout(model, Parallelism(tp=2), 1)
    assert has_no_overlap(layout)
    storages: dict[str, int] = {}
    for entry in layout.entries:
        storages[layout.tensors[entry.tensor].name] = entry.view.storage
    last = "model.layers.3."
    if family == "deepseek_v3":
        fused = [f"{last}self_attn.{x}.weight" for x in ("q_a_proj", "kv_a_proj_with_mqa")]
    else:
        fused = [f"{last}self_attn.{x}_proj.weight" for x in "qkv"]
    assert len({storages[name] for name in fused}) == 1
    gates = [name for name in storages if name.startswith(last) and "mlp.experts" in name]
    assert len({storages[name] for name in gates}) == (2 if gates else 0)


@pytest.mark.parametrize(("family", "text"), TRAINERS)
def test_trainers_hold_each_element_as_often_as_they_have_copies(family: str, text: str) -> None:
    """Cases 1, 4, 7: nothing is lost between ranks, and copies are whole."""
    model, parallelism = read_model(SMALL[family]), Parallelism.parse(text)
    layouts = [trainer_layout(model, parallelism, rank) for rank in range(parallelism.num_ranks)]
    assert all(map(has_no_overlap, layouts))
    for name, count in counted(model, layouts).items():
        assert count.min() == count.max() > 0, name
    by_key = {}
    for rank, layout in enumerate(layouts):
        assert by_key.setdefault(trainer_key(parallelism, rank), layout) == layout


def test_grouped_heads_are_cut_by_raw_rows() -> None:
    """Cases 1, 2: with 8 query heads, 2 key value heads and TP4, ranks 0 and 2 hold queries only;
    [q; k; v] cut evenly would be something else."""
    model = read_model(
        CONFIGS["llama"] | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}
    )
    held = [boxes(trainer_layout(model, Parallelism(tp=4), rank)) for rank in range(4)]
    prefix = "model.layers.0.self_attn."
    kinds = [{k for k in "qkv" if f"{prefix}{k}_proj.weight" in rank} for rank in held]
    assert kinds == [{"q"}, {"q", "k", "v"}, {"q"}, {"q", "k", "v"}]
    queries = [held[rank][f"{prefix}q_proj.weight"] for rank in range(4)]
    assert [[(box.start[0], box.shape[0]) for box in them] for them in queries] == [
        [(0, 12)],
        [(12, 4)],
        [(16, 12)],
        [(28, 4)],
    ]


def test_an_expert_keeps_its_number_on_every_rank() -> None:
    """Case 4: the third expert of rank 1 of EP2 is number 6 of 8."""
    model, parallelism = read_model(SMALL["qwen3_moe"]), Parallelism.parse("dp2 ep2")
    for rank in range(2):
        names = boxes(trainer_layout(model, parallelism, rank))
        mine = {int(name.split(".")[5]) for name in names if ".experts." in name}
        assert mine == set(range(4 * rank, 4 * rank + 4))


def test_vocabulary_padding_belongs_to_nobody() -> None:
    model = read_model(CONFIGS["llama"])  # 509 rows
    rows = [
        boxes(engine_layout(model, Parallelism(tp=8), rank))["lm_head.weight"][0].shape[0]
        for rank in range(8)
    ]
    assert rows == [64] * 7 + [61]


def test_drafts_stand_on_the_last_stage_and_no_engine_asks_for_them() -> None:
    """Case 9."""
    model = read_model(SMALL["deepseek_v3"] | {"num_nextn_predict_layers": 1})
    drafts = {spec.name for spec in model.tensors if spec.name.startswith("model.layers.4.")}
    assert "model.layers.4.eh_proj.weight" in drafts
    parallelism = Parallelism.parse("tp2 pp2")
    held = [boxes(trainer_layout(model, parallelism, rank)) for rank in range(4)]
    assert not drafts & (held[0].keys() | held[1].keys())
    assert drafts == drafts & held[2].keys() & held[3].keys()
    sink = engine_layout(model, Parallelism(), 0)
    assert not drafts & boxes(sink).keys()
    assert drafts <= {spec.name for spec in sink.tensors}


def test_layers_and_experts_that_do_not_divide() -> None:
    """As vLLM's `get_pp_indices` and its expert maps do."""
    assert [len(layers) for layers in engine_stage_layers(61, 8)] == [7, 7, 8, 8, 8, 8, 8, 7]
    assert [len(layers) for layers in engine_stage_layers(5, 2)] == [3, 2]
    assert [len(expert_block(10, 4, rank)) for rank in range(4)] == [3, 3, 2, 2]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tp2 tp4", "twice"),
        ("tp2,pp2", "none of"),
        ("tp0", "none of"),
        ("fsdp4 tp2", "alone"),
        ("tp2 etp2", "needs ep"),
        ("tp2 dp2 ep8", "no multiple"),
    ],
)
def test_a_parallelism_that_makes_no_sense_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Parallelism.parse(text)


def test_cuts_that_do_not_fit_are_refused() -> None:
    model = read_model(CONFIGS["qwen3_moe"])
    with pytest.raises(ConfigError, match="equal parts"):
        trainer_layout(model, Parallelism(tp=7), 0)
    with pytest.raises(ConfigError, match="does not divide 8 experts"):
        trainer_layout(model, Parallelism.parse("dp3 ep3"), 0)
    with pytest.raises(ConfigError, match="a head would be cut"):
        engine_layout(model, Parallelism(tp=3), 0)
    with pytest.raises(ConfigError, match="not among the 4"):
        engine_key(Parallelism(tp=4), 4)


def test_a_config_without_rules_is_refused(tmp_path: Path) -> None:
    config: dict[str, Any] = {"model_type": "mamba"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LayoutError, match=r"'mamba' have no rules yet.*qwen3_moe"):
        read_model(tmp_path)
    with pytest.raises(LayoutError, match="lacks 'hidden_size'"):
        read_model({"model_type": "llama", "vocab_size": 8})
    with pytest.raises(LayoutError, match="can't be read"):
        read_model(tmp_path / "nothing")
