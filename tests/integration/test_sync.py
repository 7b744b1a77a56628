"""Whole syncs in one process: every transport, several ranks, both ways to apply."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from streamsync.config import Config
from streamsync.engines.torch_module import TorchEngine
from streamsync.errors import PlanError, VersionError
from streamsync.layout.binding import Binding
from streamsync.layout.region import Box, Entry, Layout, TensorSpec, View
from streamsync.observability.probe import Event, Probe
from streamsync.plan.plan import CastRule, Rules
from streamsync.testing.job import LocalJob

BF16 = Rules(casts=(CastRule(source="float32", sink="bfloat16"),))


class Net(nn.Module):
    """Odd sizes, several layers, a tied head."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 13)
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(3))
        self.norm = nn.LayerNorm(13)
        self.head = nn.Linear(13, 37, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def change(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def mismatched(source: nn.Module, sink: nn.Module) -> list[str]:
    wanted = dict(source.named_parameters(remove_duplicate=False))
    return [
        name
        for name, parameter in sink.named_parameters(remove_duplicate=False)
        if not torch.equal(parameter, wanted[name].to(parameter.dtype))
    ]


def rows(tensors: dict[str, torch.Tensor], rank: int, num_ranks: int) -> Binding:
    """This rank's rows of every tensor, cut unevenly; a rank may hold none of a small one."""
    specs, entries, storages = [], [], []
    for name, tensor in tensors.items():
        size = -(-tensor.shape[0] // num_ranks)
        start = min(rank * size, tensor.shape[0])
        stop = min(start + size, tensor.shape[0])
        part = tensor[start:stop]
        if part.numel():
            box = Box((start, *[0] * (tensor.dim() - 1)), tuple(part.shape))
            view = View(len(storages), part.storage_offset(), part.stride())
            entries.append(Entry(len(specs), box, view))
            storages.append(tensor)
        specs.append(TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).split(".")[1]))
    return Binding(layout=Layout(tensors=tuple(specs), entries=tuple(entries)), storages=storages)


@pytest.mark.parametrize("transport", ["memory", "shm", "tcp"])
@pytest.mark.parametrize("apply", ["layer", "version"])
def test_three_syncs_bit_for_bit(transport: str, apply: str) -> None:
    """Three syncs with changed values, each compared bit for bit; wire bytes = needed bytes."""
    source, sink = Net(), Net().to(torch.bfloat16)
    config = Config(transport=transport, bucket_bytes=300, pool_bytes=1 << 16)
    with LocalJob(config) as job:
        job.add_sources([source])
        (subscriber,) = job.add_replica([TorchEngine(sink)], apply=apply, rules=BF16)
        job.wait_for_replicas()
        for step in range(3):
            change(source, step)
            before = [p.clone() for p in source.parameters()]
            version = job.sync(step)
            assert mismatched(source, sink) == []
            assert all(map(torch.equal, before, source.parameters())), "the source was touched"
            assert subscriber.version == version
            needed = subscriber.plan.needed_bytes
            assert needed == sum(p.numel() * 2 for p in source.parameters()), "tied tensors once"
            assert subscriber.reports[-1].wire_bytes == needed
            assert job.publishers[0].report(version).wire_bytes == needed


def test_shards_meet_shards() -> None:
    """Three uneven source ranks feed a replica of two ranks, each with other rows."""
    full = {f"layers.{i}.weight": torch.zeros(7, 5) for i in range(4)}
    full["norm"] = torch.zeros(2)

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in full:
                self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.zeros(())))

        def forward(self) -> None:
            return None

    sinks = [{n: torch.full_like(t, torch.nan) for n, t in full.items()} for _ in range(2)]

    def engine(rank: int) -> TorchEngine:
        module = Holder()
        for name, tensor in sinks[rank].items():
            module.register_parameter(name.replace(".", "_"), nn.Parameter(tensor))
            sinks[rank][name] = module.get_parameter(name.replace(".", "_")).data
        return TorchEngine(module, binding=rows(sinks[rank], rank, 2))

    with LocalJob(Config(transport="tcp", bucket_bytes=64)) as job:
        job.add_sources([rows(full, rank, 3) for rank in range(3)])
        job.add_replica([engine(0), engine(1)])
        job.wait_for_replicas()
        for step in range(3):
            for tensor in full.values():
                tensor.copy_(torch.randn(tensor.shape))
            job.sync(step)
            for name, tensor in full.items():
                half = -(-tensor.shape[0] // 2)
                assert torch.equal(sinks[0][name][:half], tensor[:half])
                assert torch.equal(sinks[1][name][half:], tensor[half:])
                assert sinks[0][name][half:].isnan().all(), "a rank got rows that it does not need"


def test_replicas_share_one_convert() -> None:
    """Two replicas of equal layout: one convert, one pin, two sends; both bit-equal."""
    source, sinks = Net(), [Net(), Net()]
    with LocalJob(Config(transport="tcp", bucket_bytes=500)) as job:
        job.add_sources([source])
        for number, sink in enumerate(sinks):
            job.add_replica([TorchEngine(sink)], name=f"engine{number}")
        job.wait_for_replicas(2)
        for step in range(3):
            change(source, step)
            version = job.sync(step)
            assert [mismatched(source, sink) for sink in sinks] == [[], []]
            stages = job.publishers[0].report(version).stages
            assert stages["send"].bytes == 2 * stages["convert"].bytes
            assert stages["pin"].bytes == stages["convert"].bytes


def test_source_overwritten_after_publish() -> None:
    """Case 27: parameters change right after `publish` returns; the sync delivers the old bytes."""
    source, sink = Net(), Net()
    with LocalJob(Config(transport="tcp", bucket_bytes=256)) as job:
        job.add_sources([source])
        job.add_replica([TorchEngine(sink)])
        job.wait_for_replicas()
        for step in range(3):
            change(source, step)
            wanted = [p.clone() for p in source.parameters()]
            version = job.publish(step)
            change(source, 1000 + step)
            job.wait(version)
            assert all(map(torch.equal, wanted, sink.parameters()))


def test_pool_smaller_than_the_share() -> None:
    """A pool of a few buckets on both sides: backpressure, early arming, and still every byte."""
    source, sink = Net(), Net()
    config = Config(transport="tcp", bucket_bytes=200, pool_bytes=1024)
    with LocalJob(config) as job:
        job.add_sources([source])
        job.add_replica([TorchEngine(sink)])
        job.wait_for_replicas()
        for step in range(3):
            change(source, step)
            version = job.sync(step)
            assert mismatched(source, sink) == []
            assert job.publishers[0].report(version).peak_pool_bytes <= 1024


def test_generation_goes_on_and_every_forward_is_of_one_version() -> None:
    """A forward loop runs through ten syncs; every output belongs to exactly one version."""
    source, sink = Net(tied=False), Net(tied=False)
    ids = torch.arange(10)
    torn: list[int] = []
    seen: set[int] = set()
    stop = threading.Event()

    def outputs(seed: int) -> torch.Tensor:
        change(source, seed)
        with torch.no_grad():
            return source(ids)

    known = [outputs(step) for step in range(10)]
    sink.load_state_dict(source.state_dict())

    def generate() -> None:
        with torch.no_grad():
            while not stop.is_set():
                out = sink(ids)
                match = [step for step, wanted in enumerate(known) if torch.equal(out, wanted)]
                seen.update(match)
                torn.extend([] if len(match) == 1 else [len(torn)])

    with LocalJob(Config(transport="tcp", bucket_bytes=200)) as job:
        job.add_sources([source])
        job.add_replica([TorchEngine(sink)], arm="begin")
        job.wait_for_replicas()
        thread = threading.Thread(target=generate)
        thread.start()
        try:
            for step in range(10):
                change(source, step)
                job.sync(step)
        finally:
            stop.set()
            thread.join()
    assert not torn
    assert 9 in seen


def test_cast_without_a_rule_is_refused_on_both_sides() -> None:
    """Case 16: fp32 to bf16 without a rule: the subscriber and the trainer both say why."""
    with LocalJob(Config(transport="tcp")) as job:
        job.add_sources([Net()])
        (subscriber,) = job.add_replica([TorchEngine(Net().to(torch.bfloat16))])
        with pytest.raises(PlanError, match="float32"):
            subscriber.wait(0, timeout=20)
        with pytest.raises(PlanError, match="float32"):
            job.wait_for_replicas(timeout=20)


def test_versions_only_grow() -> None:
    with LocalJob(Config(transport="memory")) as job:
        job.add_sources([Net()])
        job.add_replica([TorchEngine(Net())])
        job.wait_for_replicas()
        job.sync(5)
        with pytest.raises(VersionError, match="not above"):
            job.publish(4)
        with pytest.raises(VersionError, match="published before"):
            job.publish(5)
        assert job.sync().step == 6


def test_unchanged_weights_change_nothing() -> None:
    """Case 21: lr = 0."""
    source, sink = Net(), Net().to(torch.bfloat16)
    with LocalJob(Config(transport="shm")) as job:
        job.add_sources([source])
        job.add_replica([TorchEngine(sink)], rules=BF16)
        job.wait_for_replicas()
        job.sync(0)
        first = [p.clone() for p in sink.parameters()]
        for step in range(1, 5):
            job.sync(step)
            assert all(map(torch.equal, first, sink.parameters()))


def test_nan_canary() -> None:
    """Case 14: a poisoned sink holds no NaN after a sync."""
    source, sink = Net(), Net()
    with torch.no_grad():
        for parameter in sink.parameters():
            parameter.fill_(torch.nan)
    with LocalJob(Config(transport="memory")) as job:
        job.add_sources([source])
        job.add_replica([TorchEngine(sink)])
        job.wait_for_replicas()
        job.sync(0)
    assert not any(p.isnan().any() for p in sink.parameters())


def test_every_group_lands_before_commit() -> None:
    events: list[Event] = []
    probe = Probe()
    probe.subscribe(events.append)
    with LocalJob(Config(transport="tcp", bucket_bytes=300)) as job:
        job.add_sources([Net()])
        (subscriber,) = job.add_replica([TorchEngine(Net())], probe=probe)
        job.wait_for_replicas()
        for step in range(3):
            version = job.sync(step)
            subscriber.wait(step)
            names = [(e.name, e.group) for e in events if e.version == version]
            landed = {group for name, group in names if name == "landed"}
            assert landed == set(subscriber.plan.groups)
            order = [name for name, _ in names if name in ("go", "armed", "installed", "committed")]
            assert order == ["armed", "go", "committed"]


def test_a_version_that_nobody_took_is_no_success() -> None:
    with LocalJob(Config(transport="memory")) as job:
        job.add_sources([Net()])
        version = job.publish(0)
        with pytest.raises(VersionError, match="no replica was subscribed"):
            job.wait(version)
        assert job.publishers[0].wait(version, require=0) == []
