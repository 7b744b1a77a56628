"""Whole syncs between models on a GPU. The copies are plain ones so far: right, not yet fast."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from streamsync.config import Config
from streamsync.engines.torch_module import TorchEngine
from streamsync.plan.plan import CastRule, Rules
from streamsync.testing.job import LocalJob

pytestmark = pytest.mark.gpu


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.head = nn.Linear(64, 97)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


@pytest.mark.parametrize("transport", ["memory", "shm", "tcp"])
@pytest.mark.parametrize("apply", ["layer", "version"])
def test_three_syncs_on_a_gpu(transport: str, apply: str) -> None:
    """fp32 to bf16 on one GPU while forwards go on: bit-equal, and no forward of two versions."""
    source, sink = Net().cuda(), Net().cuda().to(torch.bfloat16)
    ids = torch.arange(20, device="cuda")
    known: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    stop = threading.Event()

    def generate() -> None:
        with torch.no_grad():
            while not stop.is_set():
                outputs.append(sink(ids).clone())

    rules = Rules(casts=(CastRule(source="float32", sink="bfloat16"),))
    with LocalJob(Config(transport=transport, bucket_bytes=3000)) as job:
        job.add_sources([source])
        job.add_replica([TorchEngine(sink)], apply=apply, rules=rules)
        job.wait_for_replicas()
        known.append(sink(ids).clone())
        thread = threading.Thread(target=generate)
        thread.start()
        try:
            for step in range(3):
                with torch.no_grad():
                    for parameter in source.parameters():
                        parameter.normal_(0, 0.2)
                job.sync(step)
                for ours, theirs in zip(sink.parameters(), source.parameters(), strict=True):
                    assert torch.equal(ours, theirs.to(torch.bfloat16))
                fresh = Net().cuda().to(torch.bfloat16)
                fresh.load_state_dict(source.state_dict())
                known.append(fresh(ids))
        finally:
            stop.set()
            thread.join()
    torn = sum(not any(torch.equal(out, wanted) for wanted in known) for out in outputs)
    assert (torn, len(outputs) > 3) == (0, True)
