"""The guards of conftest.py, each shown to bite."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SUITE = """
import asyncio, os, subprocess, sys, threading, time, warnings
import pytest, uvloop

done = threading.Event()

async def test_pass_runs_on_uvloop():
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)

@pytest.mark.allow_blocking
async def test_pass_may_block():
    time.sleep(0.01)

async def test_fail_blocks():
    time.sleep(0.01)

def test_fail_warns():
    warnings.warn("old", DeprecationWarning)

def test_fail_skips_what_is_installed():
    pytest.skip("needs the extra 'ucx'")

def test_skip_what_is_absent():
    pytest.skip("needs the moon")

def test_leak_thread():
    threading.Thread(target=done.wait, name="streamsync-loop", daemon=True).start()

def test_leak_child():
    globals()["child"] = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

def test_leak_file(shm):
    open(shm, "w").close()

@pytest.fixture(scope="session")
def shm():
    path = f"/dev/shm/streamsync-guard-{os.getpid()}"
    yield path
    os.unlink(path)

def test_pass_cleans_up():
    done.set()
    child.communicate(b"")
"""


def test_guards_bite(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    conftest = tmp_path / "conftest.py"
    text = conftest.read_text()
    assert "GRACE_SECONDS = 5.0" in text
    conftest.write_text(text.replace("GRACE_SECONDS = 5.0", "GRACE_SECONDS = 0.1"))
    (tmp_path / "test_suite.py").write_text(SUITE)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"),
            *("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path)),
        ],
        env=os.environ | {"STREAMSYNC_FORBID_SKIP": "ucx,demo", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    outcomes: dict[str, list[str]] = {}
    for name, outcome in re.findall(r"::test_(\w+) (PASSED|FAILED|SKIPPED|ERROR)", done.stdout):
        outcomes.setdefault(name, []).append(outcome)
    expected = {"pass": ["PASSED"], "fail": ["FAILED"], "skip": ["SKIPPED"]}
    assert len(outcomes) == 10, done.stdout
    for name, outcome in outcomes.items():
        assert outcome == expected.get(name.split("_")[0], ["PASSED", "ERROR"]), done.stdout
