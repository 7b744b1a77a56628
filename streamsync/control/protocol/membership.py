"""The hub's state machine: who is a member, which epoch a source group is in. Pure.

The hub is asked at start and when membership changes; no sync waits for it. Members outlive it:
after a restart they register again by name and keep their epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Role = Literal["source", "sink"]


@dataclass(frozen=True, slots=True)
class Member:
    """One registered rank. `unit` is its source group or replica; `incarnation` differs in every
    life of the process; `epoch` is the one it already holds (after the hub restarted), else 0."""

    name: str
    role: Role
    unit: str
    rank: int
    num_ranks: int
    endpoint: str
    incarnation: str
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Joined:
    """The member is in; `replaced` when an earlier life of it was pushed out."""

    replaced: bool


@dataclass(slots=True)
class Unit:
    """The registered ranks of one source group or replica. `held` is the epoch that `num_holding`
    of them hold since it was opened; `brought` are those of members that joined since."""

    role: Role
    num_ranks: int
    names: dict[int, str] = field(default_factory=dict)
    held: int = 0
    num_holding: int = 0
    brought: dict[str, int] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether every rank is registered."""
        return len(self.names) == self.num_ranks

    @property
    def missing(self) -> list[int]:
        """The ranks that are not."""
        return [rank for rank in range(self.num_ranks) if rank not in self.names]

    def drop(self, rank: int) -> None:
        """Forgets a rank."""
        if self.brought.pop(self.names.pop(rank), None) is None:
            self.num_holding -= 1

    def epochs(self) -> set[int]:
        """Every epoch that a member holds; 0 stands for none."""
        return set(self.brought.values()) | ({self.held} if self.num_holding else set())

    def open_epoch(self, epoch: int) -> None:
        """All members hold `epoch` now, so that the next one to join again with none (a restart)
        opens a new one."""
        self.held, self.num_holding = epoch, len(self.names)
        self.brought.clear()


@dataclass(slots=True)
class Membership:
    """Members by name; every change raises `membership_epoch`. Costs nothing that grows with the
    number of members, but for a group that becomes complete."""

    membership_epoch: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    units: dict[str, Unit] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)

    def join(self, member: Member, clock: int) -> Joined | str:
        """Registers `member`; returns the reason as text when it is refused.

        When a source group becomes complete it enters a new epoch, max(last + 1, clock), unless all
        its members hold one epoch already (only the hub was restarted).
        """
        problem = self._problem(member)
        if problem:
            return problem
        before = self.members.get(member.name)
        if before is not None and before.incarnation == member.incarnation:
            return Joined(replaced=False)
        if before is not None:
            self._drop(before)
        self.members[member.name] = member
        self.membership_epoch += 1
        unit = self.units.setdefault(member.unit, Unit(member.role, member.num_ranks))
        unit.names[member.rank] = member.name
        unit.brought[member.name] = member.epoch
        if member.role == "source" and unit.is_complete:
            held = unit.epochs()
            last = self.epochs.get(member.unit, 0)
            if len(held) == 1 and 0 not in held and max(held) >= last:
                self.epochs[member.unit] = max(held)
            else:
                self.epochs[member.unit] = max(last + 1, max(held) + 1, clock)
            unit.open_epoch(self.epochs[member.unit])
        return Joined(replaced=before is not None)

    def leave(self, name: str, incarnation: str) -> bool:
        """Forgets a member, if that life of it is still the one registered."""
        member = self.members.get(name)
        if member is None or member.incarnation != incarnation:
            return False
        self._drop(member)
        self.membership_epoch += 1
        return True

    def of(self, unit: str, role: Role) -> list[Member]:
        """Members of a source group or replica, by rank."""
        found = self.units.get(unit)
        if found is None or found.role != role:
            return []
        return [self.members[found.names[rank]] for rank in sorted(found.names)]

    def is_complete(self, unit: str, role: Role) -> bool:
        """Whether every rank of it is registered."""
        found = self.units.get(unit)
        return found is not None and found.role == role and found.is_complete

    def source_units(self) -> list[str]:
        """Source groups with at least one member."""
        return sorted(name for name, unit in self.units.items() if unit.role == "source")

    def _drop(self, member: Member) -> None:
        del self.members[member.name]
        unit = self.units[member.unit]
        unit.drop(member.rank)
        if not unit.names:
            del self.units[member.unit]

    def _problem(self, member: Member) -> str:
        if not 0 <= member.rank < member.num_ranks:
            return f"rank {member.rank} is not below num_ranks {member.num_ranks}"
        unit = self.units.get(member.unit)
        if unit is None:
            return ""
        if unit.role != member.role:
            return f"{member.unit} is already the name of a unit of the other role"
        holder = unit.names.get(member.rank)
        if holder is not None and holder != member.name:
            return f"rank {member.rank} of {member.unit} is taken by {holder}"
        others = (name for name in unit.names.values() if name != member.name)
        if unit.num_ranks != member.num_ranks and (other := next(others, None)) is not None:
            return (
                f"{member.unit} has num_ranks={unit.num_ranks} by {other}, "
                f"but {member.name} says {member.num_ranks}"
            )
        return ""
