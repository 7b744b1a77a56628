"""The benchmark's sink: a process of its own, or a thread of the source's for `memory`.

`python -m streamsync.bench.sink FD...` with the descriptors of `Ends`.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import torch

from streamsync.bench.messages import Answer, Line, Order, Start
from streamsync.bench.model import Shape, SyntheticModel, hashes
from streamsync.bench.options import PipelineOptions
from streamsync.bench.side import Ends, Side, make_blocks
from streamsync.config import Config
from streamsync.engines.torch_module import TorchEngine
from streamsync.errors import StreamsyncError
from streamsync.plan.plan import CastRule, Rules
from streamsync.subscriber import Subscriber

if TYPE_CHECKING:
    from collections.abc import Iterator


def serve(ends: Ends) -> None:
    """Does what the source's messages say until it says stop or is gone."""
    line = Line(ends.line)
    try:
        start = line.receive(Start)
        for answer in _answers(start, line, ends):
            line.send(answer)
    except StreamsyncError as error:
        _say(line, str(error))
    except Exception as error:
        _say(line, f"{type(error).__name__}: {error}")
        raise
    finally:
        ends.close()


def _say(line: Line, text: str) -> None:
    try:
        line.send(Answer(error=text))
    except StreamsyncError:
        print(f"streamsync bench: the sink failed: {text}", file=sys.stderr)


def _answers(start: Start, line: Line, ends: Ends) -> Iterator[Answer]:
    options = PipelineOptions(
        bytes=start.bytes, tensors=start.tensors, bucket_bytes=start.bucket_bytes
    )
    model = SyntheticModel(Shape.of(options))
    tensors = list(model.parameters())
    rules = Rules(casts=(CastRule(source="float32", sink="bfloat16"),) if start.cast else ())
    config = Config(
        transport=start.transport,
        bucket_bytes=start.bucket_bytes,
        pool_bytes=start.pool_bytes,
        digest=start.digest,
    )

    def cpu_seconds() -> float:
        return 0.0 if start.transport == "memory" else time.process_time()

    engine = TorchEngine(model)
    subscriber = Subscriber(
        engine, hub=start.hub, secret=start.secret, apply=start.apply, rules=rules, config=config
    )
    side: Side | None = None
    with subscriber:
        yield Answer()
        while True:
            order = line.receive(Order)
            match order.kind:
                case "ready":
                    side = Side(
                        make_blocks(tensors, start.bucket_bytes, torch.bfloat16),
                        ends,
                        subscriber._thread,
                        order.transport,
                        is_source=False,
                        digest=start.digest,
                    )
                    yield Answer()
                case "check":
                    subscriber.wait(order.step)
                    used = cpu_seconds()
                    yield Answer(
                        cpu_seconds=used, hashes=hashes(tensors), report=subscriber.reports[-1]
                    )
                case "stop":
                    if side is not None:
                        side.close()
                    break
                case _:
                    assert side is not None, "ready comes first"
                    (side.roof if order.kind == "roof" else side.bare)()
                    yield Answer(cpu_seconds=cpu_seconds())
    engine.close()
    yield Answer()


if __name__ == "__main__":
    serve(Ends.of(int(word) for word in sys.argv[1:]))
