"""One rank's whole planning, timed: what a sink does with the hub's answer, and what a source does
with the shares that sinks then ask of it. Copies and digest tables are made later, by the stages.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from streamsync.control import messages as m
from streamsync.control.directory import question_digest
from streamsync.control.found import decode_found
from streamsync.layout.outline import outline, outline_digest
from streamsync.plan.check import check_layout, check_share
from streamsync.plan.plan import Rules
from streamsync.plan.planner import make_plan
from streamsync.plan.question import question
from streamsync.plan.refusal import Findings
from streamsync.plan.resolve import Places

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from streamsync.layout.region import Layout
    from streamsync.plan.plan import Plan

T = TypeVar("T")

REPEATS: Final = 3
"""How often each rank plans: the quickest counts, since anything that is slower was kept waiting by
something else."""

_PLACE: Final = m.Place(host_id="0" * 36, process_id="40000-0123456789ab", pid=40000)


class Planned(NamedTuple):
    """A rank that planned: how long it took by the clock and of its processor, the bytes that it
    sent and received for it, and the pieces that it then moves in every sync."""

    seconds: float
    cpu_seconds: float
    metadata_bytes: int
    num_pieces: int


def plan_sink(
    sink: str, layout: Layout, answer: bytes, slot: tuple[int, int], bucket_bytes: int
) -> tuple[Plan, list[bytes]]:
    """All that a sink does between joining and being ready: its plan, and what it tells each of its
    sources. `answer` is the hub's encoded `Found`."""
    rules = Rules()
    asked = question(layout, rules)
    m.encode(m.AskSources(sink=sink, question_digest=question_digest(asked), question=asked))
    sought = decode_found(answer)
    plan = make_plan(
        sink=sink,
        sink_layout=layout,
        holders=sought.holders,
        rules=rules,
        bucket_bytes=bucket_bytes,
        slot=slot,
        membership_epoch=1,
    )
    places = Places(layout)
    told = []
    for share in plan.shares:
        places.resolve(share, at_source=False)
        message = m.Subscribe(
            protocol=m.PROTOCOL,
            sink=sink,
            replica=sink.partition("/")[0],
            incarnation=_PLACE.process_id,
            share=share,
            transport="tcp",
            transport_address=bytes(16),
            place=_PLACE,
            expected_incarnation=_PLACE.process_id,
            digest=True,
        )
        told.append(m.encode(message))
    return plan, told


def plan_source(source: str, layout: Layout, asked: Sequence[bytes]) -> bytes:
    """All that a source does: describes itself, and takes what its sinks ask of it. The encoded
    description."""
    check_layout(source, layout, Findings(source))
    content = outline(layout)
    outline_digest(content)
    described = m.encode(m.Describe(name=source, incarnation=_PLACE.process_id, outline=content))
    places = Places(layout)
    for data in asked:
        message = m.decode(data)
        assert isinstance(message, m.Subscribe)
        check_share(message.share)
        places.resolve(message.share, at_source=True)
    return described


def quickest(work: Callable[[], T]) -> tuple[float, float, T]:
    """The seconds by the clock and the CPU seconds that the quickest of `REPEATS` runs of `work`
    took, and its result."""
    seconds, cpu_seconds = [], []
    for _ in range(REPEATS):
        gc.collect()
        gc.freeze()  # what the benchmark itself keeps is no rank's to look after
        started, used = time.perf_counter(), time.thread_time()
        result = work()
        cpu_seconds.append(time.thread_time() - used)
        seconds.append(time.perf_counter() - started)
        gc.unfreeze()
    return min(seconds), min(cpu_seconds), result
