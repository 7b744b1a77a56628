"""An engine that does not return: the session goes on, and quarantine still reaches it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from streamsync.config import Config, Deadlines
from streamsync.errors import EngineError, VersionError
from streamsync.session.engine_gates import EngineGates
from streamsync.testing.job import LocalJob
from streamsync.types import Version
from tests.sync_rig import StillEngine, differing, fill

if TYPE_CHECKING:
    from collections.abc import Iterator

V1 = Version(1, 1)
QUICK = Config(transport="tcp", deadlines=Deadlines(connect=5, progress=1, total=8, gate=4, lag=3))


class Stuck(StillEngine):
    """Hangs in `post_load` while told to."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.tensors = tensors
        self.hangs = threading.Event()
        self.released = threading.Event()

    def post_load(self, group: str) -> None:
        if self.hangs.is_set():
            self.released.wait(30)


def tensors() -> dict[str, torch.Tensor]:
    return {"layers.0.weight": torch.zeros(4, 4), "norm.weight": torch.zeros(4)}


@pytest.fixture
def engine() -> Iterator[Stuck]:
    stuck = Stuck(tensors())
    yield stuck
    stuck.released.set()


async def test_later_calls_pass_one_that_hangs(engine: Stuck) -> None:
    gates = EngineGates(engine, "test", gate_seconds=1, call_seconds=0.2)
    engine.hangs.set()
    with pytest.raises(EngineError, match=r"did not return from post_load of norm within 0\.2 s"):
        await gates.open(V1, "norm")
    await gates.quarantine("torn")
    assert engine.calls[-1] == "quarantine"
    gates.close()


def test_a_sync_fails_by_name_and_the_next_one_heals(engine: Stuck) -> None:
    source = tensors()
    with LocalJob(QUICK) as job:
        job.add_sources([source])
        job.add_replica([engine])
        job.wait_for_replicas()
        job.sync(0)
        engine.hangs.set()
        fill(source, 1)
        version = job.publish(1)
        with pytest.raises(VersionError, match="did not return from post_load"):
            job.wait(version)
        engine.hangs.clear()
        engine.released.set()
        job.sync(2)
        assert differing(source, engine.tensors) == []
