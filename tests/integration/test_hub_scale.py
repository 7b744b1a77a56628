"""One hub process and the members of a whole cluster, each with a socket and a handshake of its
own: everybody is in and answered, nobody hears more than concerns it."""

from __future__ import annotations

import pytest

from streamsync.bench.cluster import Cluster, Joined, join_cluster
from streamsync.control.found import decode_found
from streamsync.layout.outline import Outline, Record
from streamsync.layout.region import Box

LAYERS, EXPERTS = 61, 256


def tensors(
    layers: tuple[int, int], experts: tuple[int, int], part: int, parts: int
) -> tuple[Record, ...]:
    """A model of 47,000 tensors and more as one rank holds or needs it: its layers, its experts,
    and rows `part` of `parts` of what is no expert's."""
    rows = 7168 // parts
    cut = (Box((part * rows, 0), (rows, 64)),)
    whole = (Box((0,), (7168,)),)
    names = [
        *(f"model.layers.{{}}.self_attn.{name}.weight" for name in ("q_a", "q_b", "kv_a", "o")),
        *(f"model.layers.{{}}.mlp.shared_experts.{name}.weight" for name in ("up", "gate", "down")),
    ]
    norms = [f"model.layers.{{}}.{name}.weight" for name in ("input_norm", "post_norm", "q_norm")]
    each = [f"model.layers.{{}}.mlp.experts.{{}}.{name}.weight" for name in ("up", "gate", "down")]
    return (
        *(Record(name, ((layers,),), (7168, 64), "bfloat16", cut) for name in names),
        *(Record(name, ((layers,),), (7168,), "bfloat16", whole) for name in norms),
        *(
            Record(name, ((layers,), (experts,)), (64, 32), "bfloat16", (Box((0, 0), (64, 32)),))
            for name in each
        ),
    )


def cluster(
    num_sources: int, pp: int, ep: int, num_replicas: int, num_sink_ranks: int
) -> tuple[Cluster, list[Outline], list[tuple[Record, ...]]]:
    """Sources of TP 8, PP and EP with copies of each; sinks of TP and EP in several replicas. Also
    every source rank's outline, and the question of every rank of a replica."""
    outlines = []
    for rank in range(num_sources):
        tp, rest = rank % 8, rank // 8
        stage, part = rest % pp, (rest // pp * 8 + tp) % ep
        layers = (LAYERS * stage // pp, LAYERS * (stage + 1) // pp)
        experts = (EXPERTS * part // ep, EXPERTS * (part + 1) // ep)
        outlines.append(Outline(records=tensors(layers, experts, tp, 8)))
    n = num_sink_ranks
    questions = [
        tensors((0, LAYERS), (EXPERTS * r // n, EXPERTS * (r + 1) // n), r, n) for r in range(n)
    ]
    unique = {content.records: content for content in outlines}
    numbers = {records: number for number, records in enumerate(unique)}
    whole = Cluster(
        sources=[numbers[content.records] for content in outlines],
        sinks=range(n),
        num_replicas=num_replicas,
        outlines=list(unique.values()),
        questions=questions,
    )
    return whole, outlines, questions


def check(joined: Joined, outlines: list[Outline], questions: list[tuple[Record, ...]]) -> int:
    """Whether every sink knows who holds what it needs; returns the bytes of the largest answer."""
    assert set(joined.answers) == set(range(len(questions)))
    for number, data in joined.answers.items():
        question = {record.pattern: record for record in questions[number]}
        sought = decode_found(data)
        names = [source.name for source in sought.sources]
        assert names == [f"trainer/{rank}" for rank in range(len(outlines))]
        listed = sum(record.num_tensors for record in sought.holders.catalogue)
        assert listed == LAYERS * 10 + LAYERS * EXPERTS * 3
        held = {rank for found in sought.holders.classes for rank in found.ranks}
        assert held == set(range(len(outlines))), "each holds norms of its layers"
        found: dict[str, set[str]] = {pattern: set() for pattern in question}
        for one in sought.holders.classes:
            for record in one.records:
                found[record.pattern].update(record.names())
        assert found == {pattern: set(record.names()) for pattern, record in question.items()}
    count = len(joined.slots)
    assert len({index for index, _ in joined.slots}) >= 0.75 * count, "replicas are spread"
    assert len({count for _, count in joined.slots}) == 1
    return max(map(len, joined.answers.values()))


@pytest.mark.timeout(120)
def test_a_small_cluster_joins() -> None:
    whole, outlines, questions = cluster(64, pp=2, ep=8, num_replicas=8, num_sink_ranks=4)
    joined = join_cluster(whole)
    assert check(joined, outlines, questions) < 200_000
    assert joined.num_asked < 8 * 32


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_thousands_join() -> None:
    """4096 sources and 2048 sinks of a model of 47,000 tensors. Hub and members share the cores
    here, so what counts is the hub's own time."""
    whole, outlines, questions = cluster(4096, pp=16, ep=64, num_replicas=128, num_sink_ranks=16)
    joined = join_cluster(whole)
    largest = check(joined, outlines, questions)
    print(
        f"{joined.seconds:.2f} s, hub {joined.hub_cpu_seconds:.2f} CPU s and "
        f"{joined.hub_peak_bytes / 1e6:.0f} MB, largest answer {largest} bytes, "
        f"{joined.num_asked} questions"
    )
    assert largest < 2_000_000
    assert joined.num_asked < 8 * 2048
