from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from streamsync import cli
from streamsync.bench import plan as benchmark
from streamsync.bench.options import PlanOptions
from streamsync.bench.plan_result import PlanResult
from streamsync.bench.readme import describe_plan
from streamsync.errors import ConfigError


@pytest.mark.timeout(180)
def test_quick_rows_have_every_figure_and_move_each_byte_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Case 9: a real hub, every rank on a socket of its own, whole plans on both sides."""
    arguments = ["bench", "plan", "--quick", "--model", "llama-70b", "--json", "-"]
    assert cli.main(arguments) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [(row["source_ranks"], row["sink_ranks"]) for row in result["rows"]] == [(32, 16)] * 2
    for row in result["rows"]:
        assert row["num_tensors"] == 723
        assert row["wire_bytes"] == row["needed_bytes"] > 2 * 141e9
        assert row["wire_over_needed"] == 1
        assert 1 <= row["balance_max_over_mean"] <= 1.05
        assert row["balance_max_over_mean"] <= row["egress_max_over_mean"] + 0.01
        assert 1 <= row["makespan_over_bound"] <= 1.1
        assert 0 < row["metadata_bytes_per_rank"] <= 2e6
        assert row["rank_seconds"] >= row["rank_cpu_seconds"] / 2 > 0
        assert row["num_pieces"] > 100
        for name in ("cluster_join_seconds", "hub_seconds_total", "hub_peak_bytes"):
            assert row[name] > 0
    assert "llama-70b" in describe_plan(msgspec.convert(result, PlanResult))


def test_rows_are_chosen_by_model_and_ranks() -> None:
    found = benchmark.chosen(PlanOptions(model="deepseek-v3", rows="512:256"))
    assert {(case.model, case.ranks) for case in found} == {("deepseek-v3", "512→256")}
    assert len(benchmark.chosen(PlanOptions())) > 15
    with pytest.raises(ConfigError, match="4096→2048"):
        benchmark.chosen(PlanOptions(rows="3:2"))


def test_a_plan_that_moves_a_byte_twice_fails_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = msgspec.convert(
        dict.fromkeys(benchmark.PlanRow.__struct_fields__, 1)
        | {"model": "m", "source": "s", "sink": "t", "wire_bytes": 2},
        benchmark.PlanRow,
    )
    monkeypatch.setattr(benchmark, "measure_case", lambda case: row)
    assert benchmark.main(PlanOptions(quick=True)) == 1
    assert "2 bytes planned, 1 needed" in capsys.readouterr().err
