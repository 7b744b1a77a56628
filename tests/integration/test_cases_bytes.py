"""Cases 20 and 22 to 26 over whole syncs: what kinds of bytes, how many, how often."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from streamsync.config import Config
from streamsync.layout.binding import Binding
from streamsync.layout.state_dict import bind_tensors
from streamsync.observability.probe import Probe
from streamsync.testing.job import LocalJob
from tests.sync_rig import StillEngine, bits, differing, fill

BUCKET = 512
transports = pytest.mark.parametrize("transport", ["memory", "shm", "tcp"])
# ucx serves one event loop a process, so its syncs need two processes: tests/fault.


def empty_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous memory of the same shapes and dtypes, every byte of it wrong."""
    return {
        name: torch.full(tensor.shape, 1, dtype=tensor.dtype).contiguous()
        for name, tensor in tensors.items()
    }


@transports
def test_all_dtypes_arrive_bit_for_bit(transport: str) -> None:
    """Case 20: int maps, bools, fp32 biases and fp8 arrive bit for bit on every transport; so do
    NaNs with payloads, infinities and negative zero."""
    source = {
        "layers.0.expert_map": torch.empty(8, dtype=torch.int32),
        "layers.0.token_ids": torch.empty(3, 5, dtype=torch.int64),
        "layers.0.mask": torch.empty(7, dtype=torch.bool),
        "layers.0.bias": torch.empty(9, dtype=torch.float32),
        "layers.0.weight": torch.empty(4, 9, dtype=torch.bfloat16),
        "layers.0.quantized": torch.empty(33, dtype=torch.uint8),
        "layers.0.scaled": torch.zeros(16, dtype=torch.float8_e4m3fn),
        "layers.1.step": torch.empty((), dtype=torch.int64),
        "layers.1.special": torch.empty(6, dtype=torch.float32),
    }
    sink = empty_like(source)
    special = torch.tensor([0x7FC01234, 0x7F800000, 1 << 31, 1, 0x7F800001, 0xFFC00001])
    with LocalJob(Config(transport=transport, bucket_bytes=61)) as job:
        job.add_sources([source])
        job.add_replica([StillEngine(sink)])
        job.wait_for_replicas()
        for step in range(3):
            fill({n: t for n, t in source.items() if n != "layers.0.scaled"}, step)
            source["layers.0.scaled"].view(torch.uint8).copy_(
                torch.randint(0, 256, (16,), dtype=torch.uint8)
            )
            source["layers.1.special"].view(torch.int32).copy_(special.to(torch.int32))
            job.sync(step)
            assert differing(source, sink) == []
        assert set(job.publishers[0].transports().values()) == {transport}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_sizes_around_a_bucket(transport: str) -> None:
    """Case 22: tensors of bucket - 1, bucket, bucket + 1 and 3.5 buckets, in both orders."""
    sizes = (BUCKET - 1, BUCKET, BUCKET + 1, 3 * BUCKET + BUCKET // 2)
    source = {
        f"layers.{i}.t{size}": torch.empty(size, dtype=torch.uint8)
        for i, order in enumerate((sizes, sizes[::-1]))
        for size in order
    }
    source["layers.2.words"] = torch.empty(BUCKET // 4 + 1, dtype=torch.float32)
    sink = empty_like(source)
    with LocalJob(Config(transport=transport, bucket_bytes=BUCKET)) as job:
        job.add_sources([source])
        (subscriber,) = job.add_replica([StillEngine(sink)])
        job.wait_for_replicas()
        for step in range(3):
            fill(source, step)
            job.sync(step)
            assert differing(source, sink) == []
        assert subscriber.plan is not None
        buckets = [b for share in subscriber.plan.shares for b in share.buckets]
        assert max(bucket.nbytes for bucket in buckets) <= BUCKET
        assert len(buckets) > len(source)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_tensor_of_two_and_a_half_gib_with_defaults() -> None:
    """Case 22: one tensor whose bytes need more than 31 bits, with default settings."""
    rows, columns = 5 * (1 << 18), 1024
    source = {"model.embed_tokens.weight": torch.empty(rows, columns, dtype=torch.bfloat16)}
    assert source["model.embed_tokens.weight"].nbytes == 5 << 29
    sink = {"model.embed_tokens.weight": torch.zeros(rows, columns, dtype=torch.bfloat16)}
    # Every row differs from every other one, also from those 2**31 bytes away.
    source["model.embed_tokens.weight"].view(torch.int16).copy_(
        torch.arange(rows, dtype=torch.int32).mul_(40503).view(-1, 1).to(torch.int16)
    )
    with LocalJob() as job:
        job.add_sources([source])
        job.add_replica([StillEngine(sink)])
        job.wait_for_replicas()
        job.publishers[0].wait(job.publish(0), timeout=500)
        words = [t.view(torch.int16) for t in (*source.values(), *sink.values())]  # NaNs compare
        assert torch.equal(*words)


def strange_views(base: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of one float32 storage `[60, 40]`, no two of which share an element but by design."""
    return {
        "layers.0.transposed": base[:10].t(),
        "layers.0.strided": base[10:20:2, ::3],
        "layers.0.expanded": base[20:21, :7].expand(5, 7),
        "layers.1.offset": base.view(-1)[30 * 40 + 13 : 30 * 40 + 13 + 22].view(11, 2),
        "layers.1.permuted": base[32:44].view(3, 4, 40).permute(2, 0, 1),
        "layers.1.scalar": base[50, 3],
        "norm.column": base[52:60, 39],
    }


@transports
def test_any_view_may_be_a_source(transport: str) -> None:
    """Case 23: transposed, strided, expanded (stride 0), offset and permuted views as sources, and
    as sinks where they may be written."""
    base, other = torch.zeros(60, 40), torch.full((60, 40), -1.0)
    source = strange_views(base)
    plain = empty_like(source)
    strided = {**strange_views(other), "layers.0.expanded": torch.full((5, 7), -1.0)}
    with LocalJob(Config(transport=transport, bucket_bytes=100)) as job:
        job.add_sources([source])
        job.add_replica([StillEngine(plain)], name="plain")
        job.add_replica([StillEngine(strided)], name="strided")
        job.wait_for_replicas(2)
        outside = torch.ones_like(other, dtype=torch.bool)
        for name, view in strange_views(outside).items():
            if name != "layers.0.expanded":
                view.fill_(False)
        for step in range(3):
            fill({"base": base}, step)
            before = bits(base)
            job.sync(step)
            assert differing(source, plain) == []
            assert differing(source, strided) == []
            assert (other[outside] == -1).all(), "the sink was touched outside its views"
            assert bits(base) == before, "the source was touched"


@pytest.mark.parametrize("transport", ["memory", "tcp"])
@pytest.mark.parametrize("apply", ["layer", "version"])
def test_nothing_is_a_legal_amount(transport: str, apply: str) -> None:
    """Case 24: shapes (0,), (0, 4) and (); a source rank and a sink rank that hold nothing."""
    source = {
        "layers.0.nothing": torch.empty(0),
        "layers.0.no_rows": torch.empty(0, 4),
        "layers.1.scalar": torch.empty(()),
        "layers.1.weight": torch.empty(3, 4),
    }
    sink = empty_like(source)
    layout = msgspec.structs.replace(bind_tensors(source).layout, entries=())
    empty = Binding(layout=layout, storages=[])
    with LocalJob(Config(transport=transport)) as job:
        job.add_sources([source, bind_tensors({})])
        full, none = job.add_replica([StillEngine(sink), StillEngine(empty)], apply=apply)
        job.wait_for_replicas()
        for step in range(3):
            fill(source, step)
            version = job.sync(step)
            assert differing(source, sink) == []
            assert full.wait(step) == none.wait(step) == version
            assert none.reports[-1].wire_bytes == 0


def test_a_model_of_nothing() -> None:
    """Case 24: a whole job without a byte still commits its versions."""
    with LocalJob(Config(transport="tcp")) as job:
        job.add_sources([{"layers.0.nothing": torch.empty(0, 4)}])
        (subscriber,) = job.add_replica([StillEngine({"layers.0.nothing": torch.empty(0, 4)})])
        job.wait_for_replicas()
        for step in range(3):
            version = job.sync(step)
            assert subscriber.wait(step) == version


@pytest.mark.timeout(180)
def test_twenty_thousand_tiny_tensors() -> None:
    """Case 25: bit for bit, and the work counted by its events, so that four times the tensors make
    four times the work."""
    counts = []
    for num_tensors in (5_000, 20_000):
        source = {
            f"layers.{i // 100}.t{i % 100}": torch.full((3,), float(i)) for i in range(num_tensors)
        }
        sink = empty_like(source)
        probe, events = Probe(), []
        probe.subscribe(events.append)
        with LocalJob(Config(transport="memory")) as job:
            job.add_sources([source], probe=probe)
            job.add_replica([StillEngine(sink)], probe=probe)
            job.wait_for_replicas(timeout=120)
            for step in range(2):
                source["layers.7.t7"].fill_(-step)
                job.sync(step)
                assert differing(source, sink) == []
        counts.append(len(events))
    assert 3.6 * counts[0] < counts[1] < 4.4 * counts[0]


def _footprint(job: LocalJob) -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def _many_syncs(transport: str, num_syncs: int) -> None:
    source = {f"layers.{i}.weight": torch.empty(64, 64) for i in range(4)}
    sink = empty_like(source)
    process = psutil.Process()
    with LocalJob(Config(transport=transport, bucket_bytes=4096, pool_bytes=1 << 20)) as job:
        job.add_sources([source])
        (subscriber,) = job.add_replica([StillEngine(sink)])
        job.wait_for_replicas()
        pools = [job.publishers[0]._rank._pool, subscriber._rank._pool]
        for step in range(num_syncs):
            fill(source, step)
            job.sync(step)
            assert differing(source, sink) == []
            subscriber.wait(step)
            if step == num_syncs // 4:
                before, resident = _footprint(job), process.memory_info().rss
        assert [pool.num_outstanding for pool in pools] == [0, 0]
        assert [pool.used_bytes for pool in pools] == [0, 0]
        after, grown = _footprint(job), process.memory_info().rss - resident
    assert after == before, "file descriptors or threads grew"
    assert grown < 16 << 20, f"resident memory grew by {grown} bytes"


@pytest.mark.parametrize("transport", ["memory", "shm", "tcp"])
def test_many_syncs_leave_nothing(transport: str) -> None:
    """Case 26: leases, file descriptors, threads and memory are flat over 40 syncs."""
    _many_syncs(transport, 40)


@pytest.mark.slow
@pytest.mark.timeout(600)
@transports
def test_two_hundred_syncs_leave_nothing(transport: str) -> None:
    """Case 26: the same over 200 syncs."""
    _many_syncs(transport, 200)


def test_a_job_leaves_no_descriptors() -> None:
    """Case 26: jobs that come and go leave neither descriptors nor files in shared memory."""
    source = {"layers.0.weight": torch.empty(8)}
    counts = []
    for _ in range(4):
        with LocalJob(Config(transport="shm")) as job:
            job.add_sources([source])
            job.add_replica([StillEngine(empty_like(source))])
            job.wait_for_replicas()
            job.sync()
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1:] == counts[1:2] * 3
    assert not [name for name in Path("/dev/shm").iterdir() if "streamsync" in name.name]
