"""The hub's index of what the ranks of one source group hold, and its answers to sinks. Pure.

Ranks of equal outline (data parallel replicas) are stored once. So are equal records, however many
outlines list them: a question costs as many comparisons as there are different records of its
patterns. Sinks of equal need (one rank of each replica) ask the same question, which is answered
once per generation.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from streamsync.errors import ControlError
from streamsync.layout.outline import (
    Outline,
    Record,
    common_numbers,
    outline_digest,
)
from streamsync.plan.holders import HolderClass, Holders, catalogue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


_MAX_QUESTIONS = 4096
"""Different questions that are kept: as many as a replica has ranks, a few times over."""

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def question_digest(question: tuple[Record, ...]) -> str:
    """128 bits of a question, in hex."""
    return outline_digest(Outline(records=question))


class Directory:
    """`generation` counts changes of who holds what; answers from before one are forgotten.

    Ranks are ordered by number, so that equal groups give equal answers, byte for byte.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._digests: dict[str, str] = {}
        self._numbers: dict[str, int] = {}
        self._names: dict[str, set[str]] = {}
        self._outlines: dict[str, Outline] = {}
        self._records: dict[Record, Record] = {}
        self._questions: dict[str, tuple[Record, ...]] = {}
        self._answers: dict[str, bytes] = {}
        self._common: Holders | None = None
        self._ranks_of: dict[str, list[int]] = {}
        self._undescribed: set[str] = set()

    # --- who is listed ----------------------------------------------------------------------

    def add(self, name: str, number: int, digest: str) -> bool:
        """Lists rank `number` of the group; returns whether its outline is known."""
        if self._digests.get(name) != digest:
            self.remove(name)
            self._digests[name] = digest
            self._numbers[name] = number
            self._names.setdefault(digest, set()).add(name)
            if digest not in self._outlines:
                self._undescribed.add(name)
            self._move_on()
        return digest in self._outlines

    def describe(self, content: Outline) -> None:
        """Takes an outline; raises `ControlError` unless a listed rank named its digest."""
        digest = outline_digest(content)
        if digest not in self._names:
            raise ControlError("an outline that no source named when it joined: join again")
        if digest not in self._outlines:
            keep = self._records.setdefault
            self._outlines[digest] = Outline(
                records=tuple(keep(record, record) for record in content.records),
                ties=content.ties,
            )
            self._undescribed -= self._names[digest]
            self._move_on()

    def remove(self, name: str) -> None:
        """Forgets a rank, and its outline if no other one has the same."""
        digest = self._digests.pop(name, None)
        if digest is None:
            return
        del self._numbers[name]
        self._undescribed.discard(name)
        self._names[digest].remove(name)
        if not self._names[digest]:
            del self._names[digest]
            self._outlines.pop(digest, None)
            if not self._outlines:
                self._records.clear()
        self._move_on()

    @property
    def is_described(self) -> bool:
        """Whether every listed rank's outline is known."""
        return not self._undescribed

    def _move_on(self) -> None:
        self.generation += 1
        self._answers.clear()
        self._common = None

    # --- what sinks ask ---------------------------------------------------------------------

    def answer(self, digest: str, question: tuple[Record, ...] | None) -> bytes | None:
        """The encoded `Holders` for the question that `digest` names; None: it must be told.

        One object until the generation changes. Raises `ControlError` for a question of another
        digest.
        """
        if question is not None:
            self._keep(digest, question)
        found = self._answers.get(digest)
        if found is None and digest in self._questions:
            found = self._answers[digest] = _encode(self.holders(self._questions[digest]))
        return found

    def _keep(self, digest: str, question: tuple[Record, ...]) -> None:
        if question_digest(question) != digest:
            raise ControlError("the question's digest is not that of its content")
        if digest not in self._questions and len(self._questions) >= _MAX_QUESTIONS:
            oldest = next(iter(self._questions))
            del self._questions[oldest]
            self._answers.pop(oldest, None)
        self._questions[digest] = question

    def holders(self, question: tuple[Record, ...]) -> Holders:
        """Who holds what of `question`, and all that anybody lists. Every rank must be described.

        Ranks that hold the same of it are one class, also where their outlines differ elsewhere.
        """
        if self._common is None:
            self._common = self._make_common()
        asked: dict[str, list[Record]] = {}
        for need in question:
            asked.setdefault(need.pattern, []).append(need)
        cut: dict[int, list[Record]] = {}
        equal: dict[Record, Record] = {}
        classes: dict[tuple[int, ...], tuple[list[str], list[Record]]] = {}
        for digest in self._ranks_of:
            held: list[Record] = []
            for record in self._outlines[digest].records:
                if record.pattern not in asked:
                    continue
                part = cut.get(id(record))
                if part is None:
                    found = _overlapping(asked[record.pattern], record)
                    part = cut[id(record)] = [equal.setdefault(p, p) for p in found]
                held += part
            if held:
                alike, _ = classes.setdefault(tuple(map(id, held)), ([], held))
                alike.append(digest)
        return msgspec.structs.replace(
            self._common,
            classes=tuple(
                HolderClass(
                    tuple(sorted(rank for digest in alike for rank in self._ranks_of[digest])),
                    _digest_of(alike),
                    tuple(held),
                )
                for alike, held in classes.values()
            ),
        )

    def _make_common(self) -> Holders:
        ranks = sorted(self._digests, key=lambda name: (self._numbers[name], name))
        self._ranks_of = {}
        for number, name in enumerate(ranks):
            self._ranks_of.setdefault(self._digests[name], []).append(number)
        ties: dict[str, str] = {}
        for digest in self._ranks_of:
            ties |= self._outlines[digest].ties
        return Holders(
            ranks=tuple(ranks),
            classes=(),
            catalogue=catalogue(record for o in self._outlines.values() for record in o.records),
            ties=ties,
        )


def _overlapping(needs: Iterable[Record], record: Record) -> Iterator[Record]:
    """The parts of `record` that overlap some of `needs`, of the same pattern."""
    for need in needs:
        numbers = common_numbers(need.numbers, record.numbers)
        if numbers is None:
            continue
        boxes = record.boxes
        if need.shape == record.shape:
            boxes = tuple(box for box in boxes if any(box.intersect(other) for other in need.boxes))
        if boxes:
            yield Record(record.pattern, numbers, record.shape, record.dtype, boxes)


def _digest_of(digests: list[str]) -> str:
    if len(digests) == 1:
        return digests[0]
    return hashlib.blake2b("".join(sorted(digests)).encode(), digest_size=16).hexdigest()
