"""What the hub knows and answers: members, who holds what, slots, and whom a change concerns. Pure.

Nothing here grows with the square of the number of ranks: a join touches its own unit, equal
questions are answered once, and a change is told only to those whose answer it changes.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from streamsync.control import messages as m
from streamsync.control.directory import Directory
from streamsync.control.found import SourceInfo, encode_found
from streamsync.control.protocol.membership import Member, Membership
from streamsync.control.protocol.slots import Slots
from streamsync.errors import ControlError

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_LISTED = 8
_MAX_REFUSALS = 8
"""Refusing replicas that sources hear of at a time: one is enough for a trainer to stop."""


class Registry:
    """Fed by the hub with what members say."""

    def __init__(self) -> None:
        self.membership = Membership()
        self.slots = Slots()
        self._joins: dict[str, m.Join] = {}
        self._directories: dict[str, Directory] = {}
        self._lives = 0  # counts changes of who the sources are and of what they hold
        self._found: dict[str, tuple[str, bytes]] = {}
        self._told: dict[str, object] = {}
        self._refused: set[str] = set()
        self._planned_with: tuple[str, int] | None = None
        self._slots_generation = 0
        self._sources_due = self._sinks_due = False

    def __len__(self) -> int:
        return len(self._joins)

    # --- members ----------------------------------------------------------------------------

    def knows(self, name: str, incarnation: str) -> bool:
        """Whether this life of a member is registered."""
        join = self._joins.get(name)
        return join is not None and join.incarnation == incarnation

    def join(self, join: m.Join, clock: int) -> bool:
        """Registers a member; returns whether its outline is wanted. Raises `ControlError`."""
        if join.protocol != m.PROTOCOL:
            raise ControlError(
                f"{join.name} speaks protocol {join.protocol}, the hub {m.PROTOCOL}: install "
                "the same streamsync version everywhere"
            )
        result = self.membership.join(
            Member(
                join.name,
                join.role,
                join.unit,
                join.rank,
                join.num_ranks,
                join.endpoint,
                join.incarnation,
                join.epoch,
            ),
            clock,
        )
        if isinstance(result, str):
            raise ControlError(f"{join.name} can't join: {result}")
        is_new_life = not self.knows(join.name, join.incarnation)
        self._joins[join.name] = join
        if join.role == "sink":
            self.slots.take_up(join.unit, join.slot)
            if is_new_life:
                self._told.pop(join.name, None)
                self._refused.discard(join.unit)
            return False
        if is_new_life:
            self._told.pop(join.name, None)
            self._sources_changed()
        directory = self._directories.setdefault(join.unit, Directory())
        return not directory.add(join.name, join.rank, join.outline_digest)

    def describe(self, message: m.Describe) -> None:
        """Takes a source's outline; raises `ControlError`."""
        if not self.knows(message.name, message.incarnation):
            raise ControlError(f"{message.name} described itself before it joined")
        self._directories[self._joins[message.name].unit].describe(message.outline)
        self._sources_changed()

    def forget(self, name: str) -> bool:
        """Drops a member; returns whether it was one."""
        join = self._joins.pop(name, None)
        if join is None:
            return False
        self.membership.leave(name, join.incarnation)
        self._told.pop(name, None)
        is_empty = join.unit not in self.membership.units
        if join.role == "sink":
            if is_empty:
                self.slots.leave(join.unit)
                self._refused.discard(join.unit)
        else:
            self._directories[join.unit].remove(name)
            if is_empty:
                del self._directories[join.unit]
            self._sources_changed()
        return True

    def epoch_of(self, name: str) -> int:
        """The epoch of a source's group, 0 while it is not complete."""
        join = self._joins.get(name)
        if join is None or not self.membership.is_complete(join.unit, "source"):
            return 0
        return self.membership.epochs[join.unit]

    def coordinator_of(self, replica: str) -> str:
        """The endpoint of a replica's rank 0, "" while it has not joined."""
        unit = self.membership.units.get(replica)
        if unit is None or unit.role != "sink" or 0 not in unit.names:
            return ""
        return self.membership.members[unit.names[0]].endpoint

    def _sources_changed(self) -> None:
        self._lives += 1
        self._found.clear()
        self._refused.clear()
        self._sources_due = self._sinks_due = True

    # --- what sinks ask ---------------------------------------------------------------------

    def sources(self, ask: m.AskSources) -> m.Sources:
        """Who the sources are and which of them hold what `ask` names. Raises `ControlError`."""
        join = self._joins.get(ask.sink)
        if join is None or join.role != "sink":
            raise ControlError(f"{ask.sink} is no sink that joined: join first")
        unit = self._group()
        if unit is None:
            return m.Sources(request=ask.request, waiting_for=self._why_no_group())
        found = self._find(unit, ask)
        if found is None:
            return m.Sources(request=ask.request, wants_question=True)
        stamp, data = found
        slot = self.slots.of(join.unit)
        self._told[ask.sink] = (self._lives, slot)
        return m.Sources(
            request=ask.request,
            membership_epoch=self.membership.membership_epoch,
            epoch=self.membership.epochs[unit],
            slot=slot,
            stamp=stamp,
            found=b"" if ask.stamp == stamp else data,
        )

    def _find(self, unit: str, ask: m.AskSources) -> tuple[str, bytes] | None:
        found = self._found.get(ask.question_digest)
        if found is None:
            holders = self._directories[unit].answer(ask.question_digest, ask.question)
            if holders is None:
                return None
            data = encode_found(map(self._info, self.membership.of(unit, "source")), holders)
            stamp = hashlib.blake2b(data, digest_size=16).hexdigest()
            found = self._found[ask.question_digest] = stamp, data
        return found

    def _info(self, member: Member) -> SourceInfo:
        return SourceInfo(
            name=member.name,
            endpoint=member.endpoint,
            incarnation=member.incarnation,
            place=self._joins[member.name].place,
        )

    def _group(self) -> str | None:
        """The one source group that is complete and described, if there is one."""
        units = self.membership.source_units()
        if len(units) != 1 or not self.membership.is_complete(units[0], "source"):
            return None
        return units[0] if self._directories[units[0]].is_described else None

    def _why_no_group(self) -> str:
        units = self.membership.source_units()
        if not units:
            return "no source has joined"
        if len(units) > 1:
            return f"several source groups joined: {', '.join(units)}"
        missing = self.membership.units[units[0]].missing
        if not missing:
            return f"source group {units[0]} has not described itself yet"
        listed = ", ".join(map(str, missing[:_MAX_LISTED]))
        more = f" and {len(missing) - _MAX_LISTED} more" if len(missing) > _MAX_LISTED else ""
        return f"source group {units[0]} lacks ranks {listed}{more}"

    # --- whom to tell -----------------------------------------------------------------------

    def due(self) -> Iterator[tuple[str, m.Changed]]:
        """What members are to be told since the last call, each once."""
        if self._sources_due:
            self._sources_due = False
            yield from self._new_epochs()
        unit = self._group()
        if unit is None:
            return
        self._deal(unit)
        if self._sinks_due:
            self._sinks_due = False
            for name, join in self._joins.items():
                if join.role == "sink" and self._is_news(
                    name, (self._lives, self.slots.of(join.unit))
                ):
                    yield name, m.Changed()

    def _new_epochs(self) -> Iterator[tuple[str, m.Changed]]:
        for group in self.membership.source_units():
            if self.membership.is_complete(group, "source"):
                epoch = self.membership.epochs[group]
                for name in self.membership.units[group].names.values():
                    if self._is_news(name, epoch):
                        yield name, m.Changed(epoch=epoch)

    def _deal(self, group: str) -> None:
        """Gives every replica its slot; all of them anew, and evenly, when sinks plan anyway: for
        the first time, unless they brought slots from a hub before, or with another group."""
        were_dealt = self.slots.generation > 0 or not self.slots.indexes
        for name, unit in self.membership.units.items():
            if unit.role == "sink":
                self.slots.of(name)
        planned_with = (group, self._directories[group].generation)
        plans_anyway = self._planned_with != planned_with
        is_first = self._planned_with is None
        if plans_anyway and (were_dealt or not is_first) and not self.slots.are_even:
            self.slots.deal()
        self._planned_with = planned_with
        if self._slots_generation != self.slots.generation:
            self._slots_generation = self.slots.generation
            self._sinks_due = True

    def _is_news(self, name: str, state: object) -> bool:
        is_news = self._told.get(name) != state
        self._told[name] = state
        return is_news

    def refusal(self, message: m.PlanRefused) -> list[str]:
        """The sources that are to hear of a refused plan: all or, of what they know, none."""
        if message.replica in self._refused or len(self._refused) >= _MAX_REFUSALS:
            return []
        self._refused.add(message.replica)
        return [name for name, join in self._joins.items() if join.role == "source"]
