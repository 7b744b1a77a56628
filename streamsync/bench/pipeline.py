"""`streamsync bench pipeline`: syncs of a synthetic model from one process to another, each beside
a pass of the roof and one of the bare transport. This is the source's side, which leads."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec
import torch

from streamsync.bench import sink
from streamsync.bench.messages import Answer, Line, Order, Start
from streamsync.bench.model import Shape, hashes, source_tensors, step
from streamsync.bench.result import PipelineResult, Sample, make_result
from streamsync.bench.side import Ends, Side, make_blocks
from streamsync.config import Config
from streamsync.control.hub import Hub
from streamsync.errors import ConfigError, StreamsyncError
from streamsync.publisher import Publisher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from streamsync.bench.options import PipelineOptions
    from streamsync.config import TransportName

_END_SECONDS = 10.0


def main(options: PipelineOptions) -> int:
    """Measures and writes the result; returns 1 when a byte arrived that was not sent."""
    if options.json is not None and not options.json.parent.is_dir():
        raise ConfigError(f"can't write {options.json}: there is no folder {options.json.parent}")
    result = measure(options)
    if options.json is not None:
        encoded = msgspec.json.format(msgspec.json.encode(result), indent=2)
        if str(options.json) == "-":
            print(encoded.decode())
        else:
            options.json.write_bytes(encoded + b"\n")
    if str(options.json) != "-":
        print(describe(result))
    if result.mismatched_tensors:
        text = f"{result.mismatched_tensors} tensors are not as they were published"
        print(f"streamsync: {text}", file=sys.stderr)
    return 1 if result.mismatched_tensors else 0


def describe(result: PipelineResult) -> str:
    """The result for a person."""
    lines = [
        f"{result.transport}, {result.bytes / 1e6:.1f} MB in {result.options.tensors} tensors: "
        f"{result.seconds:.3f} s, {result.gb_per_s:.2f} GB/s (median of {len(result.samples)})",
        f"roof {result.roof_gb_per_s:.2f} GB/s, of which {result.ratio_to_roof:.0%}: {result.roof}",
        f"CPU {result.cpu_seconds_per_gb:.2f} s per GB, the roof's "
        f"{result.roof_cpu_seconds_per_gb:.2f}",
        f"bare {result.bare_gb_per_s:.2f} GB/s: {result.bare}",
    ]
    lines += [
        f"  {name:8}busy {stage.busy_seconds:7.3f} s, blocked {stage.blocked_seconds:7.3f} s"
        for name, stage in result.stages.items()
    ]
    return "\n".join(lines)


def measure(options: PipelineOptions) -> PipelineResult:
    """Starts the sink, warms up with one sync, measures `options.syncs`, ends the sink."""
    shape = Shape.of(options)
    tensors = source_tensors(shape, cast=options.cast)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    secret = secrets.token_hex(16)
    config = Config(
        transport=options.transport,
        bucket_bytes=options.bucket_bytes,
        pool_bytes=options.pool_bytes,
        digest=options.digest,
    )
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(Hub(secret=secret))
        ends = stack.enter_context(_sink(options.transport, options.bucket_bytes + 8))
        publisher = Publisher(tensors, hub=hub.address, secret=secret, config=config)
        stack.enter_context(publisher)
        peer = _Peer(Line(ends.line))
        peer.line.send(
            Start(
                hub=hub.address,
                secret=secret,
                transport=options.transport,
                bytes=options.bytes,
                bucket_bytes=options.bucket_bytes,
                pool_bytes=options.pool_bytes,
                tensors=options.tensors,
                digest=options.digest,
                apply=options.apply,
                cast=options.cast,
            )
        )
        peer.hear()
        publisher.wait_for_replicas(1)
        transport = cast("TransportName", next(iter(publisher.transports().values())))
        publisher.wait(publisher.publish(0))
        peer.line.send(Order(kind="ready", transport=transport))
        side = Side(
            make_blocks(tensors.values(), options.bucket_bytes, torch.bfloat16),
            ends,
            publisher._thread,
            transport,
            is_source=True,
            digest=options.digest,
        )
        stack.callback(side.close)
        peer.hear()
        samples = []
        mismatched = 0
        for number in range(options.syncs + 1):
            step(tensors)
            used, others = time.process_time(), peer.cpu_seconds
            started = time.monotonic()
            version = publisher.publish(number + 1)
            published = time.monotonic()
            publisher.wait(version)
            ended = time.monotonic()
            used = time.process_time() - used
            found = peer.ask(Order(kind="check", step=number + 1))
            used += found.cpu_seconds - others
            mismatched += sum(
                a != b for a, b in zip(hashes(tensors.values()), found.hashes, strict=True)
            )
            assert found.report is not None
            roof = peer.timed(Order(kind="roof"), side.roof)
            bare = peer.timed(Order(kind="bare"), side.bare)
            sample = Sample(
                seconds=ended - started,
                publish_seconds=published - started,
                roof_seconds=roof.seconds,
                bare_seconds=bare.seconds,
                cpu_seconds=used,
                roof_cpu_seconds=roof.cpu_seconds,
                source=publisher.report(version),
                sink=found.report,
            )
            if number:  # the first one warms the roof's memory, too
                samples.append(sample)
        peer.ask(Order(kind="stop"))
    return make_result(options, transport, shape.nbytes, mismatched, samples, date)


class Spent(NamedTuple):
    """Seconds by the clock, and of the processors in both processes."""

    seconds: float
    cpu_seconds: float


class _Peer:
    """The sink, as the source speaks to it."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.cpu_seconds = 0.0

    def hear(self) -> Answer:
        """The answer to the last order; raises the sink's error."""
        answer = self.line.receive(Answer)
        if answer.error:
            raise StreamsyncError(f"the benchmark's sink failed: {answer.error}")
        self.cpu_seconds = answer.cpu_seconds
        return answer

    def ask(self, order: Order) -> Answer:
        """Gives an order and waits until it is done."""
        self.line.send(order)
        return self.hear()

    def timed(self, order: Order, own: Callable[[], None]) -> Spent:
        """What it takes until both sides have done their part."""
        started, used = time.monotonic(), time.process_time() + self.cpu_seconds
        self.line.send(order)
        own()
        self.hear()
        return Spent(time.monotonic() - started, time.process_time() + self.cpu_seconds - used)


@contextlib.contextmanager
def _sink(transport: TransportName, buffer_bytes: int) -> Iterator[Ends]:
    """Runs the sink, in this process for `memory`; when left, closes its line and sees it end."""
    ends, other = Ends.make(buffer_bytes)
    if transport == "memory":
        thread = threading.Thread(target=sink.serve, args=(other,), name="streamsync-bench-sink")
        thread.start()
        try:
            yield ends
        finally:
            ends.close()
            thread.join(_END_SECONDS)
        return
    descriptors = other.descriptors()
    process = subprocess.Popen(
        [sys.executable, "-m", "streamsync.bench.sink", *map(str, descriptors)],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    other.close()
    try:
        yield ends
    finally:
        ends.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
