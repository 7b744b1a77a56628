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
class Membership:
    """Members by name; every change raises `membership_epoch`."""

    membership_epoch: int = 0
    members: dict[str, Member] = field(default_factory=dict)
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
        self.members[member.name] = member
        self.membership_epoch += 1
        if member.role == "source" and self.is_complete(member.unit, "source"):
            held = {m.epoch for m in self.of(member.unit, "source")}
            last = self.epochs.get(member.unit, 0)
            if len(held) == 1 and 0 not in held and max(held) >= last:
                self.epochs[member.unit] = max(held)
            else:
                self.epochs[member.unit] = max(last + 1, max(held) + 1, clock)
            self._hold(member.unit)
        return Joined(replaced=before is not None)

    def leave(self, name: str, incarnation: str) -> bool:
        """Forgets a member, if that life of it is still the one registered."""
        member = self.members.get(name)
        if member is None or member.incarnation != incarnation:
            return False
        del self.members[name]
        self.membership_epoch += 1
        return True

    def of(self, unit: str, role: Role) -> list[Member]:
        """Members of a source group or replica, by rank."""
        found = [m for m in self.members.values() if m.unit == unit and m.role == role]
        return sorted(found, key=lambda m: m.rank)

    def is_complete(self, unit: str, role: Role) -> bool:
        """Whether every rank of it is registered."""
        members = self.of(unit, role)
        return bool(members) and len(members) == members[0].num_ranks

    def source_units(self) -> list[str]:
        """Source groups with at least one member."""
        return sorted({m.unit for m in self.members.values() if m.role == "source"})

    def _hold(self, unit: str) -> None:
        """All members of a complete group now hold its epoch, so that the next one to join again
        with none (a restart) opens a new one."""
        epoch = self.epochs[unit]
        for m in self.of(unit, "source"):
            self.members[m.name] = Member(
                m.name, m.role, m.unit, m.rank, m.num_ranks, m.endpoint, m.incarnation, epoch
            )

    def _problem(self, member: Member) -> str:
        if not 0 <= member.rank < member.num_ranks:
            return f"rank {member.rank} is not below num_ranks {member.num_ranks}"
        for other in self.of(member.unit, member.role):
            if other.num_ranks != member.num_ranks:
                return (
                    f"{member.unit} has num_ranks={other.num_ranks} by {other.name}, "
                    f"but {member.name} says {member.num_ranks}"
                )
            if other.rank == member.rank and other.name != member.name:
                return f"rank {member.rank} of {member.unit} is taken by {other.name}"
        if any(m.unit == member.unit and m.role != member.role for m in self.members.values()):
            return f"{member.unit} is already the name of a unit of the other role"
        return ""
