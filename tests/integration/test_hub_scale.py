"""One hub process and the members of a whole cluster, each with a socket and a handshake of its
own: everybody is in and answered, nobody hears more than concerns it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from streamsync.bench.messages import Line
from streamsync.bench.troop import Heard, Order, Recruit, Troop
from streamsync.control.found import decode_found
from streamsync.layout.outline import Outline, Record
from streamsync.layout.region import Box

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = "the secret of a test"
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


class Cluster(NamedTuple):
    """Sources of TP 8, PP and EP with copies of each; sinks of TP and EP in several replicas."""

    num_sources: int
    pp: int
    ep: int
    num_replicas: int
    sink_ranks: int

    def outlines(self) -> list[Outline]:
        """Of every source rank."""
        found = []
        for rank in range(self.num_sources):
            tp, rest = rank % 8, rank // 8
            stage, ep = rest % self.pp, (rest // self.pp * 8 + tp) % self.ep
            layers = (LAYERS * stage // self.pp, LAYERS * (stage + 1) // self.pp)
            experts = (EXPERTS * ep // self.ep, EXPERTS * (ep + 1) // self.ep)
            found.append(Outline(records=tensors(layers, experts, tp, 8)))
        return found

    def questions(self) -> list[tuple[Record, ...]]:
        """Of every rank of one replica."""
        n = self.sink_ranks
        return [
            tensors((0, LAYERS), (EXPERTS * r // n, EXPERTS * (r + 1) // n), r, n)
            for r in range(n)
        ]

    def troops(self, hub: str, num_processes: int) -> list[Troop]:
        """All members, dealt to processes."""
        outlines, questions = self.outlines(), self.questions()
        unique = list(dict.fromkeys(map(repr, outlines)))
        recruits = [
            Recruit("source", "trainer", rank, self.num_sources, unique.index(repr(content)))
            for rank, content in enumerate(outlines)
        ] + [
            Recruit("sink", f"engine{replica}", rank, self.sink_ranks, rank)
            for replica in range(self.num_replicas)
            for rank in range(self.sink_ranks)
        ]
        first = {repr(content): content for content in outlines}
        return [
            Troop(
                hub=hub,
                secret=SECRET,
                recruits=tuple(recruits[number::num_processes]),
                outlines=tuple(first[text] for text in unique),
                questions=tuple(questions),
            )
            for number in range(num_processes)
        ]


class HubProcess:
    """`streamsync hub` as users start it."""

    def __init__(self, port: int = 0) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "streamsync", "hub", "--port", str(port)],
            env=os.environ | {"STREAMSYNC_SECRET": SECRET},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        found = re.search(r"tcp://\S+", line)
        assert found, line
        self.address = found.group()
        self.port = int(self.address.rpartition(":")[2])
        self._used_before = self.cpu_seconds

    @property
    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def used_seconds(self) -> float:
        """CPU seconds since it began to listen."""
        return self.cpu_seconds - self._used_before

    @property
    def peak_bytes(self) -> int:
        status = Path(f"/proc/{self.child.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status).group(1)) << 10  # type: ignore[union-attr]

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()
        assert self.child.stdout is not None
        self.child.stdout.close()


@contextlib.contextmanager
def troops(orders: list[Troop]) -> Iterator[list[Line]]:
    """A process each, ready to join."""
    children, lines = [], []
    try:
        for order in orders:
            ours, theirs = socket.socketpair()
            with theirs:
                children.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "streamsync.bench.troop", str(theirs.fileno())],
                        pass_fds=[theirs.fileno()],
                    )
                )
            lines.append(Line(ours))
            lines[-1].send(order)
        for line in lines:
            line.receive(Order)
        yield lines
    finally:
        for child in children:
            child.kill()
            child.wait()
        for line in lines:
            line.socket.close()


def join(cluster: Cluster, num_processes: int) -> tuple[list[Heard], float, float, int]:
    """Everybody joins; what was heard, the seconds from the first connect to the last answer, and
    the hub's CPU seconds and peak memory."""
    hub = HubProcess()
    try:
        with troops(cluster.troops(hub.address, num_processes)) as lines:
            for line in lines:
                line.send(Order(kind="join"))
            for line in lines:
                line.receive(Order)
            for line in lines:
                line.send(Order(kind="settle", silent_seconds=1.0))
            heard = [line.receive(Heard) for line in lines]
            used, peak = hub.used_seconds, hub.peak_bytes
    finally:
        hub.kill()
    seconds = max(h.ended_at for h in heard) - min(h.started_at for h in heard)
    return heard, seconds, used, peak


def check(cluster: Cluster, heard: list[Heard]) -> int:
    """Whether every sink knows who holds what it needs; returns the bytes of the largest answer."""
    outlines = cluster.outlines()
    largest = 0
    assert not any(troop.ranks_disagree for troop in heard)
    questions = cluster.questions()
    assert {number for troop in heard for number in troop.found} == set(range(len(questions)))
    for troop in heard:
        for number, data in troop.found.items():
            question = questions[number]
            largest = max(largest, len(data))
            sought = decode_found(data)
            assert [s.name for s in sought.sources] == [
                f"trainer/{rank}" for rank in range(cluster.num_sources)
            ]
            assert sum(record.num_tensors for record in sought.holders.catalogue) == (
                LAYERS * 10 + LAYERS * EXPERTS * 3
            )
            held = {rank for found in sought.holders.classes for rank in found.ranks}
            assert held == {
                rank
                for rank, content in enumerate(outlines)
                if any(r.pattern == q.pattern for r in content.records for q in question)
            }
            for pattern in {q.pattern for q in question}:
                wanted = {n for q in question if q.pattern == pattern for n in q.names()}
                got = {
                    name
                    for found in sought.holders.classes
                    for record in found.records
                    if record.pattern == pattern
                    for name in record.names()
                }
                assert got == wanted
    slots = {unit: slot for troop in heard for unit, slot in troop.slots.items()}
    count = {count for _, count in slots.values()}
    assert len(count) == 1
    assert len({index for index, _ in slots.values()}) >= 0.75 * cluster.num_replicas
    return largest


@pytest.mark.timeout(120)
def test_a_small_cluster_joins() -> None:
    cluster = Cluster(num_sources=64, pp=2, ep=8, num_replicas=8, sink_ranks=4)
    heard, _, _, _ = join(cluster, 1)
    assert check(cluster, heard) < 200_000
    assert sum(troop.num_asked for troop in heard) < 6 * 32


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_thousands_join() -> None:
    """4096 sources and 2048 sinks of a model of 47,000 tensors: 10 s where hub and members have
    cores of their own; here they share them, so the time is told and the hub's own is checked."""
    cluster = Cluster(num_sources=4096, pp=16, ep=64, num_replicas=128, sink_ranks=16)
    heard, seconds, used, peak = join(cluster, 2)
    largest = check(cluster, heard)
    print(f"{seconds:.2f} s, hub {used:.2f} CPU s, {peak / 1e6:.0f} MB, answer {largest} bytes")
    assert largest < 2_000_000
    assert sum(troop.num_asked for troop in heard) < 6 * 2048
