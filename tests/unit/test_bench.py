from __future__ import annotations

import socket
import threading

import msgspec
import pytest
import torch

from streamsync.bench.messages import Answer, Line, Order
from streamsync.bench.model import Shape, SyntheticModel, hashes, source_tensors, step
from streamsync.bench.options import PipelineOptions, parse_bytes
from streamsync.bench.side import Ends, Side, make_blocks
from streamsync.errors import ConfigError, StreamsyncError
from streamsync.runtime.loop import LoopThread


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("7", 7), (7, 7), ("256MiB", 256 << 20), ("1 GiB", 1 << 30), ("1.5kB", 1500)],
)  # fmt: skip
def test_sizes_with_units(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "3 apples", "-", "1e999"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="no number of bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(("nbytes", "num"), [(1 << 20, 64), (1 << 20, 1), (99_999, 7), (2 * 9, 9)])
def test_the_model_has_the_bytes_and_tensors_asked_for(nbytes: int, num: int) -> None:
    shape = Shape.of(PipelineOptions(bytes=nbytes, tensors=num))
    source = source_tensors(shape, cast=False)
    sink = SyntheticModel(shape).state_dict()
    assert list(source) == list(sink)
    assert len(source) == num
    assert sum(tensor.nbytes for tensor in source.values()) == shape.nbytes
    assert nbytes - 128 * num < shape.nbytes <= nbytes


def test_more_tensors_than_elements() -> None:
    with pytest.raises(ConfigError, match="--tensors"):
        PipelineOptions(bytes=3, tensors=2)


@pytest.mark.parametrize("cast", [False, True])
def test_a_step_changes_every_value_in_bfloat16(cast: bool) -> None:
    tensors = source_tensors(Shape.of(PipelineOptions(bytes=4096, tensors=2)), cast=cast)
    before = [tensor.to(torch.bfloat16, copy=True) for tensor in tensors.values()]
    seen = hashes(tensors.values())
    step(tensors)
    after = [tensor.to(torch.bfloat16) for tensor in tensors.values()]
    assert all(bool((a != b).all()) for a, b in zip(before, after, strict=True))
    assert not set(seen) & set(hashes(tensors.values()))


def test_blocks_hold_every_tensor_in_order() -> None:
    tensors = [torch.arange(n, dtype=torch.bfloat16) for n in (5, 1, 12, 3)]
    blocks = make_blocks(tensors, 8 * 2, torch.bfloat16)
    assert all(0 < block.nbytes <= 16 for block in blocks)
    assert torch.equal(torch.cat([t for b in blocks for t in b.live]), torch.cat(tensors))


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_the_roof_does_the_whole_job(transport: str) -> None:
    """A roof that copied less than the sync would be no roof."""
    source = [torch.randn(50, 7) for _ in range(5)]
    sink = [torch.zeros(50, 7, dtype=torch.bfloat16) for _ in range(5)]
    threads = [LoopThread(f"side-{k}", 2) for k in range(2)]
    stops = [threading.Event() for _ in range(2)]
    ends = Ends.make(264)
    for thread, stop in zip(threads, stops, strict=True):
        thread.start(lambda ready, stop=stop: _until(ready, stop))  # type: ignore[misc]
    try:
        sides = [
            Side(make_blocks(tensors, 256, torch.bfloat16), end, thread, transport,  # type: ignore[arg-type]
                 is_source=is_source, digest=True)
            for tensors, end, thread, is_source in zip(
                (source, sink), ends, threads, (True, False), strict=True)
        ]  # fmt: skip
        for _ in range(2):
            source[3].add_(1)
            for run in ("roof", "bare"):
                other = threading.Thread(target=getattr(sides[1], run))
                other.start()
                getattr(sides[0], run)()
                other.join()
            for a, b in zip(source, sink, strict=True):
                assert torch.equal(a.to(torch.bfloat16), b)
    finally:
        for thread, stop in zip(threads, stops, strict=True):
            stop.set()
            thread.join()
        for end in ends:
            end.close()


async def _until(ready: object, stop: threading.Event) -> None:
    import asyncio

    ready()  # type: ignore[operator]
    await asyncio.to_thread(stop.wait)


def test_the_line_carries_messages_and_says_when_the_other_side_is_gone() -> None:
    a, b = (Line(end) for end in socket.socketpair())
    a.send(Order(kind="roof"))
    a.send(Order(kind="stop"))
    assert b.receive(Order).kind == "roof"
    assert b.receive(Order).kind == "stop"
    b.send(Answer(hashes=[2**64 - 1]))
    assert a.receive(Answer).hashes == [2**64 - 1]
    b.socket.close()
    with pytest.raises(StreamsyncError, match="without a word"):
        a.receive(Answer)
    a.socket.close()


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"kind":"format"}', type=Order)
