"""The state machine of a replica's coordinator (its rank 0): PREPARE, ARM, GO, COMMIT. Pure.

It sees only what the ranks tell. ABORT is possible until it has decided GO; a failure after that
quarantines the replica. Replicas commit independently of each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal

from streamsync.control.protocol.rank import Abort, Arm, Commit, Go, Prepare, Quarantine
from streamsync.control.protocol.timer import CancelTimer, SetTimer, TimerExpired

if TYPE_CHECKING:
    from streamsync.types import Version


_KEPT_DEAD = 64


class Phase(Enum):
    """What the coordinator waits for."""

    IDLE = "idle"
    RECEIVING = "receiving"
    ARMING = "arming"
    INSTALLING = "installing"


@dataclass(frozen=True, slots=True)
class RankSays:
    """A rank's word on `version`; `text` and `state` explain a failure."""

    rank: int
    kind: Literal["announced", "ready", "starved", "armed", "installed", "failed", "quarantined"]
    version: Version
    text: str = ""
    state: Literal["failed", "superseded", "dropped"] = "failed"


@dataclass(frozen=True, slots=True)
class RankLost:
    """A rank's session ended."""

    rank: int
    text: str


Event = RankSays | RankLost | TimerExpired


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send `order` to every rank, the own one included."""

    order: Prepare | Arm | Go | Commit | Abort | Quarantine


Action = Broadcast | SetTimer | CancelTimer


@dataclass(slots=True)
class CoordinatorMachine:
    """Feed events with `feed`, carry out the returned actions in order."""

    num_ranks: int
    phase: Phase = Phase.IDLE
    target: Version | None = None
    over: Version | None = None
    announced: dict[Version, set[int]] = field(default_factory=dict)
    dead: dict[Version, Abort] = field(default_factory=dict)
    """Versions that failed at a rank before PREPARE: other ranks may still announce them."""
    heard: set[int] = field(default_factory=set)
    """Ranks that gave the answer which the current phase waits for."""

    def feed(self, event: Event) -> list[Action]:
        """Applies one event; late and repeated ones change nothing."""
        match event:
            case RankSays(rank) | RankLost(rank) if not 0 <= rank < self.num_ranks:
                return []
            case RankSays(rank, "announced", version):
                return self._announced(rank, version)
            case RankSays(rank, "failed" | "quarantined", version, text, state):
                return self._failed(version, f"rank {rank}: {text}", state)
            case RankSays(rank, kind, version):
                return self._progress(rank, kind, version)
            case RankLost(rank, text):
                text = f"rank {rank} lost: {text}"
                actions: list[Action] = []
                for version in sorted(v for v, ranks in self.announced.items() if rank in ranks):
                    actions += self._failed(version, text, "failed")
                if self.target is not None:
                    actions += self._failed(self.target, text, "failed")
                return actions
            case TimerExpired(name, version):
                return self._expired(name, version)

    def _announced(self, rank: int, version: Version) -> list[Action]:
        if version == self.target:
            return []
        if version in self.dead:
            return [Broadcast(self.dead[version])]
        newest = max((v for v in (self.over, self.target) if v is not None), default=None)
        if newest is not None and version <= newest:
            return [Broadcast(Abort(version, f"version {newest} is newer here", "superseded"))]
        actions: list[Action] = []
        if version not in self.announced:
            actions.append(SetTimer("announce", version))
        self.announced.setdefault(version, set()).add(rank)
        if len(self.announced[version]) == self.num_ranks:
            actions.append(CancelTimer("announce", version))
        return actions + self._prepare_newest()

    def _prepare_newest(self) -> list[Action]:
        if self.phase is not Phase.IDLE:
            return []
        ready = [v for v, ranks in self.announced.items() if len(ranks) == self.num_ranks]
        if not ready:
            return []
        version = max(ready)
        older = sorted(v for v in self.announced if v < version)
        self.announced = {v: ranks for v, ranks in self.announced.items() if v > version}
        self.phase, self.target, self.heard = Phase.RECEIVING, version, set()
        return [
            *(CancelTimer("announce", v) for v in older),
            SetTimer("total", version),
            Broadcast(Prepare(version)),
        ]

    def _progress(self, rank: int, kind: str, version: Version) -> list[Action]:
        if version != self.target:
            return []
        match self.phase, kind:
            case Phase.RECEIVING, "ready" | "starved":
                self.heard.add(rank)
                if kind == "ready" and len(self.heard) < self.num_ranks:
                    return []
                self.phase, self.heard = Phase.ARMING, set()
                return [SetTimer("arm", version), Broadcast(Arm(version))]
            case Phase.ARMING, "armed":
                self.heard.add(rank)
                if len(self.heard) < self.num_ranks:
                    return []
                self.phase, self.heard = Phase.INSTALLING, set()
                return [CancelTimer("arm", version), Broadcast(Go(version))]
            case Phase.INSTALLING, "installed":
                self.heard.add(rank)
                if len(self.heard) < self.num_ranks:
                    return []
                return [*self._finish(version), Broadcast(Commit(version)), *self._prepare_newest()]
        return []

    def _failed(
        self, version: Version, text: str, state: Literal["failed", "superseded", "dropped"]
    ) -> list[Action]:
        if version != self.target:
            if version in self.dead or (self.over is not None and version <= self.over):
                return []
            if self.target is not None and version < self.target:
                return []
            abort = self.dead[version] = Abort(version, text, state)
            if len(self.dead) > _KEPT_DEAD:
                del self.dead[min(self.dead)]
            self.announced.pop(version, None)
            return [CancelTimer("announce", version), Broadcast(abort)]
        order = (
            Quarantine(version, text)
            if self.phase is Phase.INSTALLING
            else Abort(version, text, state)
        )
        return [*self._finish(version), Broadcast(order), *self._prepare_newest()]

    def _expired(self, name: str, version: Version) -> list[Action]:
        if name == "announce":
            ranks = self.announced.get(version)
            if ranks is None or len(ranks) == self.num_ranks:
                return []
            missing = sorted(set(range(self.num_ranks)) - ranks)
            return self._failed(version, f"never announced by ranks {missing}", "failed")
        if version != self.target or (name == "arm" and self.phase is not Phase.ARMING):
            return []
        missing = sorted(set(range(self.num_ranks)) - self.heard)
        text = f"the {name} deadline passed while {self.phase.value}: no word of ranks {missing}"
        return self._failed(version, text, "failed")

    def _finish(self, version: Version) -> list[Action]:
        self.phase, self.target, self.heard = Phase.IDLE, None, set()
        if self.over is None or version > self.over:
            self.over = version
            self.dead = {v: abort for v, abort in self.dead.items() if v > version}
        return [CancelTimer("total", version), CancelTimer("arm", version)]
