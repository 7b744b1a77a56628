"""Whole syncs into an engine whose loader computes and whose kernels want their own layouts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from streamsync.config import Config, Deadlines
from streamsync.engines.torch_module import TorchEngine
from streamsync.errors import LayoutError, VersionError
from streamsync.layout.landing import Transform, check_transform
from streamsync.layout.recorder import Recording, record_loader
from streamsync.layout.region import TensorSpec
from streamsync.stages.copies import BucketCopies
from streamsync.testing.job import LocalJob
from tests.sync_rig import StillEngine, bits, until

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from streamsync.types import Apply

    Weights = Iterable[tuple[str, torch.Tensor]]

HIDDEN, FFN, NUM_LAYERS, VOCABULARY, PADDED = 6, 10, 3, 11, 16
FAST = Config(transport="memory", bucket_bytes=100, deadlines=Deadlines(progress=5, total=30))


class Layer(nn.Module):
    """Plain q/k/v, gate and up packed by columns (a transform), down in int8 (opaque)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(3 * HIDDEN, HIDDEN))
        self.gate_up = nn.Parameter(torch.zeros(2 * FFN, HIDDEN))
        self.register_buffer("down", torch.zeros(HIDDEN, FFN, dtype=torch.int8))
        self.register_buffer("down_scale", torch.zeros(HIDDEN, 1))
        self.register_buffer("cos", torch.full((4,), 0.25), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ self.qkv.T).chunk(3, -1)
        gate, up = (torch.softmax(q @ k.mT, -1) @ v @ self.gate_up).chunk(2, -1)
        return x + (gate * up) @ (self.down * self.down_scale).T


class Engine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(PADDED, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.calls: list[tuple[str, ...]] = []
        self.fail_on = ""
        self.slow_seconds = 0.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x

    def load_weights(self, weights: Weights) -> None:
        names: list[str] = []
        for name, weight in weights:
            names.append(name)
            if name == self.fail_on:
                raise ValueError("scale out of range")
            if name == "embed.weight":
                self.embed.weight.data[:VOCABULARY].copy_(weight)
                self.embed.weight.data[VOCABULARY:].fill_(0)
                continue
            _, number, part, _ = name.split(".")
            layer = self.layers[int(number)]
            if part == "down":
                scale = weight.abs().amax(1, keepdim=True) / 127
                layer.down_scale.copy_(scale)
                time.sleep(self.slow_seconds)
                layer.down.copy_((weight / scale).round())
            elif part in ("gate", "up"):
                layer.gate_up.data.narrow(0, 0 if part == "gate" else FFN, FFN).copy_(weight)
            else:
                layer.qkv.data.unflatten(0, (3, -1))["qkv".index(part)].copy_(weight)
        self.calls.append(tuple(names))

    def post_process(self) -> None:
        for layer in self.layers:
            layer.gate_up.data = layer.gate_up.data.T.contiguous()


TRANSFORMS = [
    Transform(parameter=f"layers.{number}.gate_up", land=lambda staged, live: live.copy_(staged.T))
    for number in range(NUM_LAYERS)
]


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (VOCABULARY, HIDDEN)}
    for number in range(NUM_LAYERS):
        shapes |= {f"layers.{number}.{part}.weight": (HIDDEN, HIDDEN) for part in "qkv"}
        shapes |= {f"layers.{number}.{part}.weight": (FFN, HIDDEN) for part in ("gate", "up")}
        shapes[f"layers.{number}.down.weight"] = (HIDDEN, FFN)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


DOWN = [f"layers.{number}.down.weight" for number in range(NUM_LAYERS)]


def loaded(tensors: Mapping[str, torch.Tensor]) -> Engine:
    """An engine as it is after start-up."""
    engine = Engine()
    engine.load_weights(tensors.items())
    engine.post_process()
    engine.calls.clear()
    return engine


def started(tensors: Mapping[str, torch.Tensor]) -> tuple[Engine, Recording]:
    """A started engine and its recording, made where it must be: between load and post-process."""
    engine = Engine()
    engine.load_weights(tensors.items())
    specs = {name: TensorSpec(name, tuple(t.shape), "float32") for name, t in tensors.items()}
    recording = record_loader(engine, specs, engine.load_weights, transforms=TRANSFORMS)
    engine.post_process()
    engine.calls.clear()
    return engine, recording


def state(engine: Engine) -> dict[str, bytes]:
    return {name: bits(t) for name, t in (*engine.named_parameters(), *engine.named_buffers())}


def update(source: Mapping[str, torch.Tensor], seed: int) -> None:
    for name, tensor in checkpoint(seed).items():
        source[name].copy_(tensor)


@pytest.mark.parametrize("apply", ["layer", "version"])
def test_three_syncs_equal_fresh_engines(apply: Apply) -> None:
    """Cases 17, 18, 19: padding, int8 with scales and packed kernels: every sync leaves what a
    fresh engine holds that loaded the same checkpoint, at the same addresses; the loader runs once
    per group and sync, whatever buckets its tensors came in."""
    source = checkpoint(0)
    engine, recording = started(source)
    assert recording.opaque.keys() == set(DOWN)
    assert recording.unwritten == {}
    assert recording.filled == {"embed.weight": (PADDED - VOCABULARY) * HIDDEN}
    staged = NUM_LAYERS * (HIDDEN * FFN + 2 * FFN * HIDDEN) * 4
    assert recording.binding.staging_bytes == staged
    for transform in TRANSFORMS:
        check_transform(recording.binding, transform, source, loaded(source))
    addresses = [t.data_ptr() for t in (*engine.parameters(), *engine.buffers())]
    with LocalJob(FAST) as job:
        job.add_sources([source])
        (subscriber,) = job.add_replica(
            [TorchEngine(engine, binding=recording.binding)], apply=apply
        )
        job.wait_for_replicas()
        for step in range(3):
            update(source, step + 1)
            engine.calls.clear()
            job.sync(step)
            assert state(engine) == state(loaded(source))
            assert sorted(engine.calls) == [(name,) for name in DOWN]
            ids = torch.arange(5)
            assert torch.equal(engine(ids), loaded(source)(ids))
        for report in subscriber.reports:
            assert (
                report.wire_bytes == report.needed_bytes == sum(t.nbytes for t in source.values())
            )
    assert [t.data_ptr() for t in (*engine.parameters(), *engine.buffers())] == addresses


def test_a_forward_that_waits_for_a_layer_waits_for_its_landing() -> None:
    """The gate of a layer opens after its loader ran: what comes out is never half loaded."""
    source = checkpoint(0)
    engine, recording = started(source)
    engine.slow_seconds = 0.1
    ids = torch.arange(5)
    with torch.no_grad():
        known = [loaded(checkpoint(seed))(ids) for seed in range(3)]
    with LocalJob(FAST) as job:
        job.add_sources([source])
        job.add_replica([TorchEngine(engine, binding=recording.binding)])
        job.wait_for_replicas()
        for step in range(3):
            update(source, step)
            version = job.publish(step)
            outputs = []
            with torch.no_grad():
                until(lambda: outputs.append(engine(ids)) or len(outputs) > 2)  # noqa: B023
            job.wait(version)
            with torch.no_grad():
                outputs.append(engine(ids))
            assert all(any(torch.equal(out, one) for one in known) for out in outputs)
            assert torch.equal(outputs[-1], known[step])


def test_a_loader_that_raises_fails_its_version_and_the_next_heals() -> None:
    """Cases 31, 33, 35: with the group, the tensors and the loader's own words, on both sides."""
    source = checkpoint(0)
    engine, recording = started(source)
    with LocalJob(FAST) as job:
        job.add_sources([source])
        (subscriber,) = job.add_replica([TorchEngine(engine, binding=recording.binding)])
        job.wait_for_replicas()
        job.sync(0)
        engine.fail_on = DOWN[1]
        update(source, 1)
        with pytest.raises(VersionError) as failed:
            job.sync(1)
        text = str(failed.value)
        assert "EngineError" in text
        assert f"{DOWN[1]} of layers.1: ValueError: scale out of range" in text
        assert subscriber.state == "quarantined"
        engine.fail_on = ""
        update(source, 2)
        job.sync(2)
        assert state(engine) == state(loaded(source))


def test_damaged_bytes_never_reach_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest is of the staged bytes, so one wrong bit there stops the landing."""
    source = checkpoint(0)
    engine, recording = started(source)
    opaque = {t.data_ptr() for landing in recording.binding.landings for t in landing.staging}
    real = BucketCopies.scatter
    struck: list[int] = []

    def scatter(self: BucketCopies, payload: torch.Tensor) -> None:
        real(self, payload)
        for run in self._runs:
            for live in run.live:
                if armed and not struck and live.data_ptr() in opaque:
                    struck.append(live.data_ptr())
                    live.view(-1)[:1].view(torch.uint8)[0] ^= 1

    armed = False
    monkeypatch.setattr(BucketCopies, "scatter", scatter)
    with LocalJob(FAST) as job:
        job.add_sources([source])
        (subscriber,) = job.add_replica([TorchEngine(engine, binding=recording.binding)])
        job.wait_for_replicas()
        job.sync(0)
        engine.calls.clear()
        armed = True
        update(source, 1)
        with pytest.raises(VersionError, match="IntegrityError"):
            job.sync(1)
        assert struck
        names = [x.names for x in recording.binding.landings if x.staging[0].data_ptr() in struck]
        assert not set(names) & set(engine.calls)
        assert subscriber.state == "quarantined"
        update(source, 2)
        job.sync(2)
        assert state(engine) == state(loaded(source))


def test_a_layout_without_memory_can_not_subscribe() -> None:
    with torch.device("meta"):
        engine = Engine()
    specs = {n: TensorSpec(n, tuple(t.shape), "float32") for n, t in checkpoint(0).items()}
    recording = record_loader(engine, specs, engine.load_weights, transforms=TRANSFORMS)
    assert recording.binding.layout == started(checkpoint(0))[1].binding.layout
    with LocalJob(FAST) as job, pytest.raises(LayoutError, match="it serves plans"):
        job.add_replica([StillEngine(recording.binding)])
