"""Many members of a hub in one process: every rank's own socket and words, none of its work.

`python -m streamsync.bench.troop FD`: orders come and answers go over the unix socket FD, see
`messages.Line`.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import sys
import time
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from streamsync.bench.messages import Line
from streamsync.control import messages as m
from streamsync.control.curve import Curve
from streamsync.errors import StreamsyncError
from streamsync.layout.outline import Outline, Record, outline_digest

_LOOK_SECONDS = 0.05
_WAVE = 128
"""Ranks that connect between two looks."""


class Recruit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One rank: a source, or a sink. `content` indexes the troop's `outlines` or `questions`."""

    role: Literal["source", "sink"]
    unit: str
    rank: int
    num_ranks: int
    content: int

    @property
    def name(self) -> str:
        """As sessions name it."""
        return f"{self.unit}/{self.rank}"


class Troop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first order: who joins which hub."""

    hub: str
    secret: str
    recruits: tuple[Recruit, ...]
    outlines: tuple[Outline, ...]
    questions: tuple[tuple[Record, ...], ...]


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`join`: connect all, and answer once every rank has what it asked for. `settle`: attend to
    what the hub says until it has been silent for so long, and answer with all that was heard."""

    kind: Literal["join", "settle"]
    silent_seconds: float = 0.0


class Heard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a troop heard. Times are the machine's monotonic clock's: of the first connect, and of
    the last answer that a sink had not seen; `cpu_seconds` are those used since the first. `found`
    is the newest answer to each question, `slots` each replica's. `ranks_disagree`: sinks of one
    question were not answered alike."""

    started_at: float
    ended_at: float
    cpu_seconds: float
    found: dict[int, bytes]
    slots: dict[str, tuple[int, int]]
    ranks_disagree: bool
    num_asked: int


class _Rank:
    """One member: its connection, and what it heard."""

    __slots__ = ("found", "incarnation", "joined", "owner", "recruit", "slot", "socket", "stamp")

    def __init__(self, recruit: Recruit, owner: zmq.asyncio.Socket, incarnation: str) -> None:
        self.recruit = recruit
        # The settings of a real member's socket, without asyncio's part: it would cost as much
        # again, on cores that are the hub's here.
        self.owner = owner
        self.socket: zmq.Socket[bytes] = zmq.Socket.shadow(owner)
        self.incarnation = incarnation
        self.joined = False
        self.stamp = ""
        self.slot = (0, 0)
        self.found = b""

    @property
    def is_answered(self) -> bool:
        """Whether it has all that it joined for."""
        return bool(self.stamp) or (self.joined and self.recruit.role == "source")

    def say(self, message: m.Message) -> None:
        self.socket.send(m.encode(message), zmq.NOBLOCK)


class _Ranks:
    """All members of this process, served by one loop."""

    def __init__(self, troop: Troop) -> None:
        self._troop = troop
        self._outline_digests = [outline_digest(content) for content in troop.outlines]
        self._question_digests = [
            outline_digest(Outline(records=content)) for content in troop.questions
        ]
        self._curve = Curve(troop.secret)
        self._curve.context.max_sockets = len(troop.recruits) + 16
        self._epoll = select.epoll()
        self._ranks: dict[int, _Rank] = {}
        self._unanswered = 0
        self._alive_seconds = 2.0
        self._alive_at = 0.0
        self._num_asked = 0
        self._used_before = 0.0
        self.started_at = self.ended_at = 0.0

    def join(self) -> None:
        """Connects every rank, each as a real one would, and attends until all have answers."""
        self.started_at, self._used_before = time.monotonic(), time.process_time()
        self._unanswered = len(self._troop.recruits)
        for number, recruit in enumerate(self._troop.recruits):
            owner = self._curve.client(zmq.DEALER, self._troop.hub)
            rank = _Rank(recruit, owner, f"{number + 1:05}-{os.urandom(6).hex()}")
            rank.socket.identity = os.urandom(16)
            rank.socket.connect(self._troop.hub)
            descriptor = int(rank.socket.get(zmq.FD))
            self._ranks[descriptor] = rank
            self._epoll.register(descriptor, select.EPOLLIN)
            rank.say(self._join(rank))
            self._drain(rank)
            if number % _WAVE == _WAVE - 1:
                self._attend()
        while self._unanswered:
            self._attend()

    def attend_until_told(self, line: Line) -> None:
        """Attends until the next order is there: a rank that fell silent would be forgotten."""
        while not select.select([line.socket], [], [], 0)[0]:
            self._attend()

    def settle(self, silent_seconds: float) -> Heard:
        """Attends until no answer has come for so long; what was heard in all."""
        while time.monotonic() < self.ended_at + silent_seconds:
            self._attend()
        found: dict[int, bytes] = {}
        slots: dict[str, tuple[int, int]] = {}
        disagree = False
        for rank in self._ranks.values():
            recruit = rank.recruit
            if recruit.role == "sink":
                disagree |= found.setdefault(recruit.content, rank.found) != rank.found
                disagree |= slots.setdefault(recruit.unit, rank.slot) != rank.slot
        return Heard(
            started_at=self.started_at,
            ended_at=self.ended_at,
            cpu_seconds=time.process_time() - self._used_before,
            found=found,
            slots=slots,
            ranks_disagree=disagree,
            num_asked=self._num_asked,
        )

    def close(self) -> None:
        """Ends all connections."""
        self._epoll.close()
        self._curve.context.destroy(linger=0)

    def _join(self, rank: _Rank) -> m.Join:
        recruit = rank.recruit
        is_source = recruit.role == "source"
        host = recruit.rank // 8
        return m.Join(
            request=1,
            protocol=m.PROTOCOL,
            name=recruit.name,
            role=recruit.role,
            unit=recruit.unit,
            rank=recruit.rank,
            num_ranks=recruit.num_ranks,
            endpoint=f"tcp://10.{host >> 8}.{host & 255}.1:{40000 + recruit.rank % 8}",
            incarnation=rank.incarnation,
            place=m.Place(
                host_id=f"{recruit.unit}-{host:032x} pid:[4026531836] net:[4026531840]",
                process_id=rank.incarnation,
                pid=40000 + recruit.rank % 8,
            ),
            outline_digest=self._outline_digests[recruit.content] if is_source else "",
        )

    def _attend(self) -> None:
        for descriptor, _ in self._epoll.poll(_LOOK_SECONDS):
            self._drain(self._ranks[descriptor])
        now = time.monotonic()
        if now > self._alive_at + self._alive_seconds:
            self._alive_at = now
            for rank in self._ranks.values():
                if rank.joined:
                    rank.say(m.Alive(name=rank.recruit.name, incarnation=rank.incarnation))
                    self._drain(rank)

    def _drain(self, rank: _Rank) -> None:
        """Hears all that is there. Done after every word, too: a socket's descriptor tells of what
        is new, once, and sending swallows that."""
        try:
            while True:
                head, *tail = rank.socket.recv_multipart(zmq.NOBLOCK)
                self._hear(rank, m.decode(head), *tail)
        except zmq.Again:
            pass

    def _hear(self, rank: _Rank, message: m.AnyMessage, found: bytes = b"") -> None:
        recruit = rank.recruit
        match message:
            case m.Welcome():
                self._alive_seconds = message.alive_seconds
                if message.wants_outline:
                    rank.say(
                        m.Describe(
                            request=2,
                            name=recruit.name,
                            incarnation=rank.incarnation,
                            outline=self._troop.outlines[recruit.content],
                        )
                    )
                    return
                rank.joined = True
                rank.say(m.Alive(name=recruit.name, incarnation=rank.incarnation))
                if recruit.role == "source":
                    self._unanswered -= 1
                    self.ended_at = time.monotonic()
                    return
                if recruit.rank:
                    rank.say(m.AskReplica(replica=recruit.unit, request=3))
                self._ask(rank)
            case m.Sources():
                if message.wants_question:
                    self._ask(rank, self._troop.questions[recruit.content])
                elif message.stamp:
                    self._unanswered -= not rank.is_answered
                    if (rank.stamp, rank.slot) != (message.stamp, message.slot):
                        self.ended_at = time.monotonic()
                    rank.stamp, rank.slot = message.stamp, message.slot
                    rank.found = found or rank.found
            case m.Changed() if recruit.role == "sink" and rank.joined:
                self._ask(rank)
            case m.Error():
                raise StreamsyncError("the hub refused a rank", peer_text=message.text)
            case _:
                pass

    def _ask(self, rank: _Rank, question: tuple[Record, ...] | None = None) -> None:
        self._num_asked += 1
        rank.say(
            m.AskSources(
                request=4,
                sink=rank.recruit.name,
                question_digest=self._question_digests[rank.recruit.content],
                question=question,
                stamp=rank.stamp,
            )
        )


async def _serve(line: Line) -> None:
    """Does as it is told until the line closes. Blocking: the loop is there for sockets that want
    to be made in one."""
    ranks = _Ranks(line.receive(Troop))
    try:
        line.send(Order(kind="settle"))  # ready
        line.receive(Order)
        ranks.join()
        line.send(Order(kind="settle"))
        ranks.attend_until_told(line)
        order = line.receive(Order)
        line.send(ranks.settle(order.silent_seconds))
    finally:
        ranks.close()


if __name__ == "__main__":
    asyncio.run(_serve(Line(socket.socket(fileno=int(sys.argv[1])))))
