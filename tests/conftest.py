"""What every test stands on: uvloop, no blocking calls on a loop, nothing left behind."""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import uvloop
from blockbuster import blockbuster_ctx
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FORBID_SKIP = "STREAMSYNC_FORBID_SKIP"
GRACE_SECONDS = 5.0

# Timing of a shared machine is no property of the code, so neither deadline nor "too slow".
settings.register_profile(
    "dev", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.register_profile("full", settings.get_profile("dev"), max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "dev"))


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], object]]:
    return {"uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent: dict[str, bool] = {}

    def is_absent(marker: str, probe: Callable[[], bool]) -> bool:
        if marker not in absent:
            absent[marker] = not probe()
        return absent[marker]

    for item in items:
        for marker, (probe, reason) in _NEEDS.items():
            if item.get_closest_marker(marker) and is_absent(marker, probe):
                item.add_marker(pytest.mark.skip(reason=reason))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


_NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "gpu": (_has_cuda, "needs a CUDA device"),
    "rdma": (lambda: any(Path("/sys/class/infiniband").glob("*")), "needs an RDMA device"),
    "vllm": (lambda: importlib.util.find_spec("vllm") is not None, "needs vLLM"),
}


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """A skip for something that this run was told to have is a failure, not a skip."""
    if not report.skipped or hasattr(report, "wasxfail") or not isinstance(report.longrepr, tuple):
        return
    reason = str(report.longrepr[2])
    for word in os.environ.get(FORBID_SKIP, "").split(","):
        if word and word.strip().lower() in reason.lower():
            report.outcome = "failed"
            report.longrepr = (
                f"{FORBID_SKIP} lists {word.strip()!r}, but this was skipped: {reason}"
            )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    report = yield
    _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    report = yield
    _forbid_skip(report)
    return report


@pytest.fixture(autouse=True)
def _no_blocking(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("allow_blocking"):
        yield
    else:
        with blockbuster_ctx():
            yield


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Fails a test that leaves a thread, a child process or a file in shared memory behind."""
    before = _owned()
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    while left := _owned() - before:
        left = {name for name in left if not _is_foreign(name)}
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    if left:
        pytest.fail(f"left behind: {', '.join(sorted(left))}", pytrace=False)


def _owned() -> set[str]:
    threads = {
        f"thread {thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if thread.name.startswith("streamsync")
    }
    return threads | _children() | {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}


def _children() -> set[str]:
    found = set()
    for child in psutil.Process().children():
        try:
            command = " ".join(child.cmdline()[:6])
        except psutil.Error:
            continue
        # Python's own, started once for the process and ended with it.
        if "resource_tracker" not in command and "forkserver" not in command:
            found.add(f"process {child.pid} {command}")
    return found


def _is_foreign(name: str) -> bool:
    """Whether another program of this machine has that file of shared memory open, or ended it."""
    if not name.startswith("/dev/shm/"):
        return False
    if not Path(name).exists():
        return True
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if int(maps.parent.name) not in own and name in maps.read_text():
                return True
        except OSError:
            continue
    return False
