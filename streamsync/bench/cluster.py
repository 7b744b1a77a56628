"""A whole cluster joins one hub and asks it: measured over real sockets, in processes of this
machine. The hub is the one that `streamsync hub` runs, and nothing in it knows of this."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import select
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from streamsync.bench.messages import Line
from streamsync.bench.troop import Heard, Order, Recruit, Troop
from streamsync.errors import ConfigError, StreamsyncError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from streamsync.layout.outline import Outline, Record

_SECRET_VARIABLE: Final = "STREAMSYNC_SECRET"  # where the command takes the job's secret from
_NUM_TROOPS: Final = 2
"""Processes that act for all ranks: more would only share the cores that are left to them."""
_SILENT_SECONDS: Final = 1.0
"""Many times as long as the hub collects changes before it tells them."""
_START_SECONDS: Final = 60.0
_END_SECONDS: Final = 10.0
_FILES_PER_RANK: Final = 2
_SPARE_FILES: Final = 256


@dataclass(frozen=True, slots=True)
class Cluster:
    """Who joins: `sources[rank]` indexes `outlines`, `sinks[rank]` of each replica `questions`."""

    sources: Sequence[int]
    sinks: Sequence[int]
    num_replicas: int
    outlines: Sequence[Outline]
    questions: Sequence[Sequence[Record]]

    def recruits(self) -> list[Recruit]:
        """Every rank, sources and sinks mingled as they would come."""
        num_sources, num_sinks = len(self.sources), len(self.sinks) * self.num_replicas
        ranks = [
            Recruit("source", "trainer", rank, num_sources, content)
            for rank, content in enumerate(self.sources)
        ] + [
            Recruit("sink", f"engine-{replica}", rank, len(self.sinks), content)
            for replica in range(self.num_replicas)
            for rank, content in enumerate(self.sinks)
        ]
        places = [(k + 0.5) / num_sources for k in range(num_sources)]
        places += [(k + 0.5) / num_sinks for k in range(num_sinks)]
        return [rank for _, rank in sorted(zip(places, ranks, strict=True), key=lambda p: p[0])]


@dataclass(frozen=True, slots=True)
class Joined:
    """What it took, from the first connect to the last answer: `seconds` by the clock, CPU seconds
    and memory growth of the hub's process, and CPU seconds of those that acted for the ranks.
    `answers[question]` is an encoded `Found`, and `slots[replica]` what the hub dealt; `num_asked`
    counts questions, repeated ones too."""

    seconds: float
    hub_cpu_seconds: float
    hub_peak_bytes: int
    ranks_cpu_seconds: float
    answers: dict[int, bytes]
    slots: list[tuple[int, int]]
    num_asked: int


def join_cluster(cluster: Cluster) -> Joined:
    """Starts a hub, lets every rank of `cluster` join it and ask, and ends all of it.

    Raises `ConfigError` when this process may not open enough files, and `StreamsyncError` when
    ranks with one question got different answers.
    """
    recruits = cluster.recruits()
    allow_files(max(len(recruits), len(recruits) // _NUM_TROOPS * _FILES_PER_RANK) + _SPARE_FILES)
    secret = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(run_hub(secret))
        lines = [stack.enter_context(_troop()) for _ in range(_NUM_TROOPS)]
        for number, line in enumerate(lines):
            line.send(
                Troop(
                    hub=hub.address,
                    secret=secret,
                    recruits=tuple(recruits[number::_NUM_TROOPS]),
                    outlines=tuple(cluster.outlines),
                    questions=tuple(map(tuple, cluster.questions)),
                )
            )
        for line in lines:
            line.receive(Order)
        hub.forget_peak()
        cpu_seconds, resident = hub.cpu_seconds(), hub.memory_bytes("VmRSS")
        for line in lines:
            line.send(Order(kind="join"))
        for line in lines:
            line.receive(Order)
        for line in lines:
            line.send(Order(kind="settle", silent_seconds=_SILENT_SECONDS))
        heard = [line.receive(Heard) for line in lines]
        cpu_seconds = hub.cpu_seconds() - cpu_seconds
        peak = hub.memory_bytes("VmHWM") - resident
    return _joined(cluster, heard, cpu_seconds, peak)


def _joined(cluster: Cluster, heard: Sequence[Heard], cpu_seconds: float, peak: int) -> Joined:
    answers: dict[int, bytes] = {}
    slots: dict[str, tuple[int, int]] = {}
    disagree = any(troop.ranks_disagree for troop in heard)
    for troop in heard:
        for question, found in troop.found.items():
            disagree |= answers.setdefault(question, found) != found
        for replica, slot in troop.slots.items():
            disagree |= slots.setdefault(replica, slot) != slot
    if disagree:
        raise StreamsyncError("the hub answered ranks of one question differently")
    return Joined(
        seconds=max(t.ended_at for t in heard) - min(t.started_at for t in heard),
        hub_cpu_seconds=cpu_seconds,
        hub_peak_bytes=peak,
        ranks_cpu_seconds=sum(troop.cpu_seconds for troop in heard),
        answers=answers,
        slots=[slots[f"engine-{replica}"] for replica in range(cluster.num_replicas)],
        num_asked=sum(troop.num_asked for troop in heard),
    )


def allow_files(number: int) -> None:
    """Lets this process and those it starts open `number` files; `ConfigError` if it may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if number > hard != resource.RLIM_INFINITY:
        raise ConfigError(
            f"so many ranks need {number} open files, and this machine allows {hard}: raise it "
            "(ulimit -n), or choose fewer rows"
        )
    if number > soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))


@dataclass(frozen=True, slots=True)
class HubProcess:
    """A running `streamsync hub`, seen through /proc."""

    pid: int
    address: str

    def cpu_seconds(self) -> float:
        """What its threads have used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self, name: str) -> int:
        """A figure of its memory: `VmRSS` now, `VmHWM` at most since `forget_peak`."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        raise StreamsyncError(f"the hub's process {self.pid} has no {name}")

    def forget_peak(self) -> None:
        """Starts `VmHWM` anew."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


@contextlib.contextmanager
def run_hub(secret: str) -> Iterator[HubProcess]:
    """Runs `streamsync hub` in a process of its own; when left, ends it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "streamsync", "hub"],
        env=os.environ | {_SECRET_VARIABLE: secret},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        select.select([process.stdout], [], [], _START_SECONDS)
        if not select.select([process.stdout], [], [], 0)[0]:
            raise StreamsyncError(f"the hub said nothing for {_START_SECONDS:g} s")
        said = process.stdout.readline().decode()
        if not said.startswith("hub at "):
            raise StreamsyncError(f"the hub did not start: {said.strip() or 'see above'}")
        yield HubProcess(process.pid, said.removeprefix("hub at ").strip())
    finally:
        process.terminate()
        process.stdout.close()
        _end(process)


@contextlib.contextmanager
def _troop() -> Iterator[Line]:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "streamsync.bench.troop", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    try:
        yield Line(ours)
    finally:
        ours.close()
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
