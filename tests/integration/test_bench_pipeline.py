from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from streamsync import cli
from streamsync.bench import model, pipeline
from streamsync.bench.options import PipelineOptions
from streamsync.bench.readme import BenchResult

if TYPE_CHECKING:
    from collections.abc import Sequence

TINY = "--bytes 40KiB --bucket-bytes 4KiB --pool-bytes 1MiB --tensors 6 --syncs 2"


def bench(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert cli.main(["bench", "pipeline", *TINY.split(), *options, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("transport", "options"),
    [("memory", []), ("memory", ["--digest", "off", "--apply", "version"]), ("tcp", ["--cast"])],
)
def test_the_result_has_every_figure(
    capsys: pytest.CaptureFixture[str], transport: str, options: Sequence[str]
) -> None:
    result = bench(capsys, "--transport", transport, *options)
    assert result["transport"] == transport
    assert result["bytes"] == result["wire_bytes"] == 6 * 2 * (40 * 1024 // 12 // 64 * 64)
    assert result["mismatched_tensors"] == 0
    assert result["digest"] is ("off" not in options)
    assert ("read of the bytes" in result["roof"]) is result["digest"]
    for name in ("seconds", "gb_per_s", "roof_gb_per_s", "bare_gb_per_s", "ratio_to_roof"):
        assert result[name] > 0
    assert result["ratio_to_roof"] == pytest.approx(result["gb_per_s"] / result["roof_gb_per_s"])
    assert 0 < result["peak_pool_bytes"] <= 1 << 20
    assert list(result["stages"]) == ["convert", "pin", "send", "receive", "load"]
    for stage in result["stages"].values():
        assert stage["bytes"] == result["bytes"]
        assert set(stage) == {"busy_seconds", "blocked_seconds", "bytes"}
    assert len(result["samples"]) == result["options"]["syncs"] == 2
    assert set(result["machine"]) == {"cpu", "cores", "memory_bytes"}
    assert set(result["versions"]) == {"python", "torch", "streamsync", "ucxx"}
    assert result["date"]
    msgspec.convert(result, BenchResult)  # what the README's figures are made from


def test_a_value_that_did_not_arrive_fails_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check is independent of the sync: here the source's tensors change behind its back."""

    def change_one_first(tensors: Any) -> list[int]:
        values = list(tensors)
        values[2].view(-1)[-1:].view(torch.int16).add_(1)
        return model.hashes(values)

    monkeypatch.setattr(pipeline, "hashes", change_one_first)
    options = PipelineOptions(transport="memory", bytes=4096, tensors=4, syncs=1)
    assert pipeline.main(options) == 1
    captured = capsys.readouterr()
    assert "2 tensors are not as they were published" in captured.err  # one a sync
    assert "convert busy" in captured.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--pool-bytes", "1KiB", "--transport", "memory"], "pool_bytes"),
        (["--json", "/no/such/folder/out.json"], "/no/such/folder"),
        (["--bytes", "much"], "much"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert cli.main(["bench", "pipeline", *TINY.split(), *options]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
