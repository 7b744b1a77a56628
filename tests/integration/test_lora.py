"""Adapters through whole syncs: as tensors of their own, and merged on the way out."""

from __future__ import annotations

import pytest
import torch

from streamsync.config import Config
from streamsync.errors import PlanError
from streamsync.layout.lora import Adapter, merge_lora
from streamsync.layout.region import Box
from streamsync.plan.conversion import QuantRule
from streamsync.plan.plan import CastRule, Rules
from streamsync.testing.job import LocalJob
from tests.fp8_reference import reference
from tests.lora_reference import merged
from tests.shards import Rank, slices, within
from tests.sync_rig import StillEngine, bits

WEIGHTS = {"layers.0.q_proj.weight": (48, 40), "layers.1.q_proj.weight": (40, 48)}
RANK = 4


class Trainer:
    """Rank `shard` of those that hold the weights by rows, as many as there are `cuts` and one; of
    each adapter it holds its rows of B and all of A."""

    def __init__(self, cuts: list[int], shard: int, dtype: torch.dtype) -> None:
        self.base = Rank()
        self.boxes = {name: slices(shape, 0, cuts)[shard] for name, shape in WEIGHTS.items()}
        for name, shape in WEIGHTS.items():
            self.base.add(name, shape, dtype, [self.boxes[name]])
        self.base.add("norm.weight", (40,), torch.float32, [Box.whole((40,))])
        self.adapters = {
            name: Adapter(
                down=torch.zeros(RANK, shape[1]), up=torch.zeros(shape[0], RANK), scale=0.5
            )
            for name, shape in WEIGHTS.items()
        }

    def fill(self, tensors: dict[str, torch.Tensor]) -> None:
        self.base.fill(tensors)
        for name, adapter in self.adapters.items():
            adapter.down.copy_(tensors[f"{name} A"])
            adapter.up.copy_(tensors[f"{name} B"])

    def bytes(self) -> list[bytes]:
        pairs = [t for adapter in self.adapters.values() for t in (adapter.down, adapter.up)]
        parts = [memory for parts in self.base.parts.values() for _, memory in parts]
        return [bits(tensor) for tensor in (*pairs, *parts)]


def model(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights and adapters of a version, whole."""
    generator = torch.Generator().manual_seed(step)
    tensors = {"norm.weight": torch.randn(40, generator=generator)}
    for name, (rows, columns) in WEIGHTS.items():
        tensors[name] = torch.randn(rows, columns, generator=generator).to(dtype)
        tensors[f"{name} A"] = torch.randn(RANK, columns, generator=generator)
        tensors[f"{name} B"] = torch.randn(rows, RANK, generator=generator)
    return tensors


def merged_model(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    wanted = {"norm.weight": tensors["norm.weight"]}
    for name in WEIGHTS:
        wanted[name] = merged(tensors[name], tensors[f"{name} A"], tensors[f"{name} B"], 0.5)
    return wanted


@pytest.mark.parametrize("sink_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_merged_on_the_way_out(sink_dtype: torch.dtype) -> None:
    """Three syncs of adapters that change, from two ranks to two, cast or quantised after merging;
    the trainers' weights and adapters stay as they are."""
    trainers = [Trainer([20], shard, torch.float32) for shard in range(2)]
    engines = [Rank(), Rank()]
    for shard, engine in enumerate(engines):
        for name, shape in WEIGHTS.items():
            engine.add(name, shape, sink_dtype, [slices(shape, 1, [17])[shard]])
            if sink_dtype is torch.float8_e4m3fn:
                grid = tuple(-(-n // 16) for n in shape)
                first, stop = (0, 2) if shard == 0 else (1, grid[1])
                blocks = Box((0, first), (grid[0], stop - first))
                engine.add(f"{name}_scale_inv", grid, torch.float32, [blocks])
        engine.add("norm.weight", (40,), torch.float32, [Box.whole((40,))])
    rules = Rules(
        casts=(CastRule(source="float32", sink="bfloat16", pattern="layers.*"),),
        quantise=(QuantRule(block=(16, 16)),),
    )
    with LocalJob(Config(transport="tcp", bucket_bytes=1000)) as job:
        job.add_sources([merge_lora(t.base.binding(), t.adapters) for t in trainers])
        subscribers = job.add_replica([StillEngine(e.binding()) for e in engines], rules=rules)
        job.wait_for_replicas()
        for step in range(3):
            tensors = model(step, torch.float32)
            for trainer in trainers:
                trainer.fill(tensors)
            before = [trainer.bytes() for trainer in trainers]
            job.sync(step)
            assert [trainer.bytes() for trainer in trainers] == before
            whole = merged_model(tensors)
            wanted = dict(whole)
            for name in WEIGHTS:
                if sink_dtype is torch.bfloat16:
                    wanted[name] = whole[name].bfloat16()
                else:
                    wanted[name], wanted[f"{name}_scale_inv"] = reference(whole[name], (16, 16))
            assert [engine.wrong(wanted) for engine in engines] == [[], []]
            for subscriber in subscribers:
                assert subscriber.reports[-1].wire_bytes == subscriber.plan.needed_bytes
        assert any(subscriber.plan.wide for subscriber in subscribers) == (
            sink_dtype is torch.float8_e4m3fn
        )


def test_a_merge_is_what_changed() -> None:
    """The comparison above would not pass for weights without their adapters."""
    tensors = model(0, torch.bfloat16)
    assert all(bits(merged_model(tensors)[name]) != bits(tensors[name]) for name in WEIGHTS)


def test_adapters_as_tensors_of_their_own() -> None:
    """Case 13: a declared part of the model; the rest of the sink stays as it is."""
    names = {f"layers.0.q_proj.lora_{part}.weight": part for part in "AB"}
    shapes = {"A": (RANK, 40), "B": (48, RANK)}
    trainer, engine = Rank(), Rank()
    for name, part in names.items():
        box = Box.whole(shapes[part])
        trainer.add(name, box.shape, torch.float32, [box])
        engine.add(name, box.shape, torch.float32, [box])
    engine.add("layers.0.q_proj.weight", (48, 40), torch.float32, [Box.whole((48, 40))])
    ((_, base),) = engine.parts["layers.0.q_proj.weight"]
    before = bits(base)
    with LocalJob(Config(transport="memory")) as job:
        job.add_sources([trainer.binding()])
        (subscriber,) = job.add_replica(
            [StillEngine(engine.binding())], rules=Rules(subset=("*.lora_*",))
        )
        job.wait_for_replicas()
        for step in range(3):
            tensors = {name: torch.randn(shapes[part]) for name, part in names.items()}
            trainer.fill(tensors)
            job.sync(step)
            assert all(
                bits(memory) == bits(within(tensors[name], box))
                for name in names
                for box, memory in engine.parts[name]
            )
        assert bits(base) == before
        assert subscriber.plan.needed_bytes == 4 * RANK * (40 + 48)
        assert list(subscriber.plan.left) == ["layers.0.q_proj.weight"]


def test_adapters_without_the_declaration_are_refused() -> None:
    trainer, engine = Rank(), Rank()
    for rank in (trainer, engine):
        rank.add("lora_A.weight", (2, 3), torch.float32, [Box.whole((2, 3))])
    engine.add("weight", (4, 3), torch.float32, [Box.whole((4, 3))])
    with LocalJob(Config(transport="memory")) as job:
        job.add_sources([trainer.binding()])
        (subscriber,) = job.add_replica([StillEngine(engine.binding())])
        with pytest.raises(PlanError, match="weight"):
            subscriber.wait(0, timeout=30)
