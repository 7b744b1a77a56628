"""Arming over whole syncs: which rank's word closes the gates, and that nothing waits for more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from streamsync.config import Config
from streamsync.layout.binding import Binding
from streamsync.layout.region import Box, Entry, Layout, TensorSpec, View
from streamsync.stages.arrival import Arrival
from streamsync.testing.job import LocalJob
from tests.sync_rig import StillEngine, bits, fill

if TYPE_CHECKING:
    import pytest


def rows(tensor: torch.Tensor, start: int, stop: int) -> Binding:
    """These rows of one global tensor, in memory of the whole size."""
    box = Box((start, 0), (stop - start, tensor.shape[1]))
    view = View(0, start * tensor.stride(0), tensor.stride())
    spec = TensorSpec("layers.0.weight", tuple(tensor.shape), "float32")
    return Binding(
        layout=Layout(tensors=(spec,), entries=(Entry(0, box, view),)), storages=[tensor]
    )


def test_one_starved_rank_arms_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has room for a part of its share only, and the other would never arm by itself:
    GO comes to it all the same, and its sync ends with its last bucket."""
    monkeypatch.setattr(Arrival, "may_arm", lambda _self, _now: False)
    source = {"layers.0.weight": torch.empty(64, 16)}
    sinks = [torch.zeros(64, 16), torch.zeros(64, 16)]
    config = Config(transport="tcp", bucket_bytes=256, pool_bytes=1536)
    with LocalJob(config) as job:
        job.add_sources([source])
        job.add_replica(
            [StillEngine(rows(sinks[0], 0, 4)), StillEngine(rows(sinks[1], 4, 64))], config=config
        )
        job.wait_for_replicas()
        for step in range(3):
            fill(source, step)
            job.wait(job.publish(step), timeout=15)
            whole = torch.cat([sinks[0][:4], sinks[1][4:]])
            assert bits(whole) == bits(source["layers.0.weight"])
