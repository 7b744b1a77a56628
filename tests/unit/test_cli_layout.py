"""`streamsync layout check` and `streamsync plan`: clusters on paper."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from streamsync.cli import layout as checking
from streamsync.cli import plan as planning
from streamsync.errors import LayoutError, PlanError
from streamsync.layout.binding import torch_dtype
from streamsync.models.checkpoint import read_listing
from streamsync.models.model import read_model
from streamsync.models.parallelism import Parallelism
from streamsync.models.trainer import trainer_layout
from tests.vllm.models import CONFIGS, write_config

if TYPE_CHECKING:
    from pathlib import Path


def check(config: Path, capsys: pytest.CaptureFixture[str], **options: str) -> dict[str, Any]:
    wanted = checking.Options(
        config=config,
        source=options.get("source", "tp1"),
        sink=options.get("sink", "tp1"),
        json=type(config)("-"),
    )
    code = checking.main(wanted)
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if result["ok"] else 1)
    return result


def checkpoint(folder: Path, family: str) -> dict[str, torch.Tensor]:
    model = read_model(write_config(folder, family))
    return {s.name: torch.zeros(s.shape, dtype=torch_dtype(s.dtype)) for s in model.tensors}


def test_a_checkpoint_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(checkpoint(tmp_path, "deepseek_v3"), tmp_path / "model.safetensors")
    result = check(tmp_path, capsys, source="tp4 pp2 ep4", sink="tp8 ep8")
    assert result["ok"]
    assert result["compared_with_checkpoint"]
    assert result["ranks"] == {"source": 8, "sink": 8}


def test_a_checkpoint_that_differs_is_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cases 9, 11, 15: a tensor more, one less, another shape and another dtype."""
    tensors = checkpoint(tmp_path, "deepseek_v3")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors["vision.weight"] = torch.zeros(1)
    tensors[bias] = tensors[bias].bfloat16()
    tensors["model.norm.weight"] = torch.zeros(1, dtype=torch.bfloat16)
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    faults = check(tmp_path, capsys)["faults"]
    assert faults[:2] == [
        "vision.weight: in the checkpoint, without a rule",
        "lm_head.weight: ruled, not in the checkpoint",
    ]
    assert f"{bias}: bfloat16[16] in the checkpoint, float32[16] by rule" in faults
    assert any("model.norm.weight: bfloat16[1] in the" in fault for fault in faults)
    assert len(faults) == 4


def test_an_index_knows_names_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = dict.fromkeys(checkpoint(tmp_path, "llama"), "model-00001.safetensors")
    index = {"metadata": {}, "weight_map": names | {"extra": "model-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert check(tmp_path, capsys)["faults"] == ["extra: in the checkpoint, without a rule"]


def test_a_hole_is_named_with_its_rows() -> None:
    """Case 5: one rank of four lost a shard."""
    model, parallelism = read_model(CONFIGS["llama"]), Parallelism(tp=4)
    layouts = [trainer_layout(model, parallelism, rank) for rank in range(4)]
    assert checking.gaps(model, layouts, set()) == []
    lost = layouts[2].tensors.index(
        next(t for t in layouts[2].tensors if t.name == "model.layers.1.mlp.gate_proj.weight")
    )
    kept = tuple(entry for entry in layouts[2].entries if entry.tensor != lost)
    layouts[2] = msgspec.structs.replace(layouts[2], entries=kept)
    assert checking.gaps(model, layouts, set()) == [
        "model.layers.1.mlp.gate_proj.weight bfloat16[120, 96]: nobody has rows 60:90 of 120"
    ]


def test_what_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(LayoutError, match="is no safetensors"):
        read_listing(tmp_path)
    (tmp_path / "a.safetensors").write_bytes((4).to_bytes(8, "little") + b"nul!")
    with pytest.raises(LayoutError, match="is no safetensors"):
        read_listing(tmp_path)


@pytest.mark.parametrize("family", sorted(CONFIGS))
@pytest.mark.parametrize(
    ("source", "sink"), [("tp2 pp2", "tp4"), ("tp4", "tp2 pp2"), ("fsdp3", "tp8"), ("tp1", "tp1")]
)
def test_every_rank_of_an_engine_finds_all_it_needs(family: str, source: str, sink: str) -> None:
    """Each plan is proved whole before it is returned; together they move the model."""
    model, engine = read_model(CONFIGS[family]), Parallelism.parse(sink)
    needed = 0
    for rank in range(engine.num_ranks):
        plan = planning.plan_rank(model, Parallelism.parse(source), engine, rank)
        assert plan.needed_bytes == sum(share.nbytes for share in plan.shares)
        needed += plan.needed_bytes
    assert needed >= sum(spec.nbytes for spec in model.tensors)


def test_replicas_take_turns_at_the_sources() -> None:
    model = read_model(CONFIGS["qwen3_moe"])
    source, sink = Parallelism.parse("tp2 dp2 ep4"), Parallelism.parse("tp2 ep2 replicas2")
    plans = [planning.plan_rank(model, source, sink, rank) for rank in (0, 2)]
    assert [plan.slot for plan in plans] == [(0, 2), (1, 2)]
    assert plans[0].needed_bytes == plans[1].needed_bytes


def test_a_plan_can_be_read_by_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_config(tmp_path, "qwen2")
    out = tmp_path / "plan.json"
    options = planning.Options(folder, "fsdp2", "tp2", 1, explain=True, json=out)
    assert planning.main(options) == 0
    assert capsys.readouterr().out.startswith("plan of engine0/1, slot 0 of 1: ")
    told = json.loads(out.read_text())
    assert told["needed_bytes"] == sum(source["bytes"] for source in told["sources"]) > 0
    assert [source["rank"] for source in told["sources"]] == ["trainer/0", "trainer/1"]


def test_what_a_rank_would_refuse_is_refused_on_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    model = read_model(CONFIGS["llama"])
    whole = trainer_layout

    def without_head(*arguments: Any) -> Any:
        layout = whole(*arguments)
        head = next(n for n, spec in enumerate(layout.tensors) if spec.name == "lm_head.weight")
        kept = tuple(entry for entry in layout.entries if entry.tensor != head)
        return msgspec.structs.replace(layout, entries=kept)

    monkeypatch.setattr(planning, "trainer_layout", without_head)
    with pytest.raises(PlanError, match=r"lm_head\.weight"):
        planning.plan_rank(model, Parallelism(), Parallelism(), 0)
