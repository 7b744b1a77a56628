from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from streamsync.bench import readme

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
BENCH = {
    "transport": "shm", "bytes": 1000, "gb_per_s": 3.456, "ratio_to_roof": 0.871, "samples": [1],
}  # fmt: skip
SYNC = {
    "seconds": 1.5, "stall_seconds": 0.25, "publish_blocked_seconds": 0.125,
    "mismatched_tensors": 0,
}  # fmt: skip
DEMO = {
    "ok": True, "model": "smollm2", "transport": "shm", "source_ranks": 2,
    "needed_bytes": 269_000_000,
    "syncs": [SYNC, SYNC | {"seconds": 2.5, "stall_seconds": 0.75, "publish_blocked_seconds": 0.5}],
}  # fmt: skip


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Any], int]:
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(bench: Any, demo: Any) -> int:
        Path("bench.json").write_text(json.dumps(bench))
        Path("demo.json").write_text(json.dumps(demo))
        return readme.main(["bench.json", "demo.json"])

    return run


def test_figures_are_the_worst_of_the_syncs_and_replace_the_old(
    write: Callable[[Any, Any], int],
) -> None:
    before = Path("README.md").read_text()
    assert write(BENCH | {"gb_per_s": 9.99}, DEMO) == 0
    assert write(BENCH, DEMO) == 0
    text = Path("README.md").read_text()
    for figure in ("3.46 GB/s over shm", "87%", "0.75 s", "2.50 s", "269 MB", "0.50 s"):
        assert figure in text
    assert "9.99" not in text
    outside = readme.PLACE.sub("", text)
    assert outside == readme.PLACE.sub("", before)


@pytest.mark.parametrize(
    "demo", [DEMO | {"ok": False}, DEMO | {"syncs": []}, {**DEMO, "model": 3},
             DEMO | {"syncs": [SYNC | {"mismatched_tensors": 1}]}],
)  # fmt: skip
def test_a_failed_demo_gives_no_figures(
    write: Callable[[Any, Any], int], demo: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path("README.md").read_text()
    assert write(BENCH, demo) == 2
    assert Path("README.md").read_text() == before
    assert capsys.readouterr().err.startswith("streamsync: ")
