"""The state machine of one sink rank. Pure.

    JOINING / SERVING(v) / QUARANTINED            (at rest)
       │ every source announced v+1, coordinator: PREPARE
       v
    RECEIVING ──> VERIFIED (apply="version") ──> ARMED ──GO──> INSTALLING ──COMMIT──> SERVING(v+1)
       │ ABORT, or own failure       │ ABORT        │ ABORT          │ any failure
       v                             v              v                v
    at rest again, nothing written ─────────────────┘            QUARANTINED

A rank that said ARMED never goes back alone: only ABORT opens its gates on the old version;
without one it is quarantined at the gate deadline or when its coordinator is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from streamsync.control.protocol.rank import (
    Abort,
    AckSources,
    Action,
    AllLanded,
    Announced,
    Arm,
    ArmGates,
    AskedToDrop,
    Commit,
    CommitEngine,
    CommitFailed,
    CoordinatorLost,
    DropReceived,
    Event,
    Failed,
    GatesArmed,
    Go,
    Prepare,
    Quarantine,
    QuarantineEngine,
    RankState,
    Ready,
    SourceLost,
    SourcesChanged,
    StartLoading,
    StartReceiving,
    TellCoordinator,
    Withdrawn,
)
from streamsync.control.protocol.timer import CancelTimer, SetTimer, TimerExpired

if TYPE_CHECKING:
    from streamsync.types import Version

_KEPT_DEAD = 64

_AT_REST = {RankState.JOINING, RankState.SERVING, RankState.QUARANTINED}
_GATED = {RankState.ARMING, RankState.ARMED, RankState.INSTALLING}


@dataclass(slots=True)
class RankMachine:
    """Feed events with `feed`, carry out the returned actions in order."""

    state: RankState = RankState.JOINING
    serving: Version | None = None
    target: Version | None = None
    sources: frozenset[str] = frozenset()
    announced: dict[Version, set[str]] = field(default_factory=dict)
    over: Version | None = None
    """The newest version that ended here, well or badly: nothing up to it competes again."""
    dead: dict[Version, tuple[Literal["failed", "superseded", "dropped"], str]] = field(
        default_factory=dict
    )
    """Newer ones that failed before PREPARE, and why: a source may still announce them."""
    _rest: RankState = RankState.JOINING

    def feed(self, event: Event) -> list[Action]:
        """Applies one event; late, repeated and unknown ones change nothing."""
        match event:
            case SourcesChanged(sources):
                return self._sources_changed(sources)
            case Announced(source, version):
                return self._announced(source, version)
            case Withdrawn(source, version, text, superseded):
                return self._withdrawn(source, version, text, superseded)
            case SourceLost(source, text):
                return self._source_lost(source, text)
            case AskedToDrop(source, version):
                if version == self.target and self.state in _GATED:
                    return []
                return self._fail(version, f"{source} asked a lagging sink to drop it", "dropped")
            case Prepare(version):
                return self._prepare(version)
            case Ready(version, starved, verified):
                return self._ready(version, starved, verified)
            case Arm(version):
                return self._arm(version)
            case GatesArmed(version):
                return self._gates_armed(version)
            case Go(version):
                return self._go(version)
            case AllLanded(version):
                if self.target != version or self.state is not RankState.INSTALLING:
                    return []
                return [TellCoordinator("installed", version)]
            case Commit(version):
                return self._commit(version)
            case Abort(version, text, outcome):
                return self._abort(version, text, outcome)
            case Quarantine(version, text):
                return self._quarantine(version, text, tell=False)
            case CommitFailed(version, text):
                return self._commit_failed(version, text)
            case CoordinatorLost(text):
                return self._coordinator_lost(f"coordinator lost: {text}")
            case Failed(version, text):
                return self._fail(version, text, "failed")
            case TimerExpired(name, version):
                return self._expired(name, version)

    def _sources_changed(self, sources: frozenset[str]) -> list[Action]:
        actions: list[Action] = []
        if self.target is not None:
            actions += self._fail(self.target, "the plan changed", "failed")
        for version in sorted(self.announced):
            actions += self._fail(version, "the plan changed", "failed")
        self.sources = sources
        return actions

    def _announced(self, source: str, version: Version) -> list[Action]:
        if version == self.target:
            return []
        if version in self.dead:
            return [AckSources(version, *self.dead[version])]
        newest = max((v for v in (self.over, self.target) if v is not None), default=None)
        if newest is not None and version <= newest:
            state: Literal["failed", "superseded"] = (
                "failed" if version == newest and version != self.serving else "superseded"
            )
            return [AckSources(version, state, f"version {newest} is newer or over here")]
        first = version not in self.announced
        by = self.announced.setdefault(version, set())
        if source not in self.sources:
            text = f"{source} began it before this sink had a session with every source"
            return self._fail(version, text, "failed")
        if source in by:
            return []
        by.add(source)
        actions: list[Action] = [SetTimer("announce", version)] if first else []
        if by == self.sources:
            actions += [CancelTimer("announce", version), TellCoordinator("announced", version)]
        return actions

    def _withdrawn(
        self, source: str, version: Version, text: str, superseded: bool
    ) -> list[Action]:
        """Sources announce in order: what this one has not announced below `version` can't complete
        any more. What it has may still run there while `version` only waited its turn."""
        if source not in self.sources:
            return []
        state: Literal["superseded", "failed"] = "superseded" if superseded else "failed"
        text = f"{source}: {text}"
        actions: list[Action] = []
        for old, by in sorted(self.announced.items()):
            if old < version and source not in by:
                actions += self._fail(old, text, state)
        if version == self.target or version in self.announced:
            return actions + self._fail(version, text, state)
        if self._is_over(version) or version in self.dead:
            return actions
        self._bury(version, text, state)
        return [*actions, TellCoordinator("failed", version, text, state)]

    def _source_lost(self, source: str, text: str) -> list[Action]:
        if source not in self.sources:
            return []
        actions: list[Action] = []
        for version in sorted(self.announced):
            actions += self._fail(version, f"source {source} lost: {text}", "failed")
        if self.target is not None:
            actions += self._fail(self.target, f"source {source} lost: {text}", "failed")
        return actions

    def _prepare(self, version: Version) -> list[Action]:
        if self.state not in _AT_REST or self._is_over(version):
            return []
        if version not in self.announced or self.announced[version] != self.sources:
            return []
        actions: list[Action] = []
        for old in sorted(v for v in self.announced if v < version):
            actions += self._forget(old)
            actions.append(AckSources(old, "superseded", f"superseded by {version}"))
        self.announced.pop(version)
        self._rest, self.state, self.target = self.state, RankState.RECEIVING, version
        return [*actions, SetTimer("total", version), StartReceiving(version)]

    def _ready(self, version: Version, starved: bool, verified: bool) -> list[Action]:
        if self.target != version or self.state is not RankState.RECEIVING:
            return []
        if verified:
            self.state = RankState.VERIFIED
        return [TellCoordinator("starved" if starved else "ready", version)]

    def _arm(self, version: Version) -> list[Action]:
        if self.target != version or self.state not in {RankState.RECEIVING, RankState.VERIFIED}:
            return []
        self.state = RankState.ARMING
        return [ArmGates(version)]

    def _gates_armed(self, version: Version) -> list[Action]:
        if self.target != version or self.state is not RankState.ARMING:
            return []
        self.state = RankState.ARMED
        return [SetTimer("gate", version), TellCoordinator("armed", version)]

    def _go(self, version: Version) -> list[Action]:
        if self.target != version or self.state is not RankState.ARMED:
            return []
        self.state = RankState.INSTALLING
        return [StartLoading(version)]

    def _commit(self, version: Version) -> list[Action]:
        if self.target != version or self.state is not RankState.INSTALLING:
            return []
        self.state, self._rest = RankState.SERVING, RankState.SERVING
        self.serving, self.target = version, None
        self._end(version)
        return [*_cancel(version), CommitEngine(version), AckSources(version, "committed")]

    def _commit_failed(self, version: Version, text: str) -> list[Action]:
        if self.serving != version:
            return []
        self._rest = RankState.QUARANTINED
        if self.target is None:
            self.state = RankState.QUARANTINED
        return [
            QuarantineEngine(version, text),
            AckSources(version, "failed", text),
            TellCoordinator("quarantined", version, text),
        ]

    def _abort(
        self, version: Version, text: str, outcome: Literal["failed", "superseded", "dropped"]
    ) -> list[Action]:
        if self.target != version:
            if version not in self.announced:
                return []
            self._bury(version, text, outcome)
            return [*self._forget(version), AckSources(version, outcome, text)]
        if self.state is RankState.INSTALLING:  # ABORT after GO never comes from a sane coordinator
            return self._quarantine(version, f"ABORT after GO: {text}", tell=True)
        return self._back_to_rest(version, text, outcome)

    def _back_to_rest(
        self, version: Version, text: str, outcome: Literal["failed", "superseded", "dropped"]
    ) -> list[Action]:
        disarm = self.state in {RankState.ARMING, RankState.ARMED}
        self.state, self.target = self._rest, None
        self._end(version)
        return [
            *_cancel(version),
            DropReceived(version, disarm),
            AckSources(version, outcome, text),
        ]

    def _fail(
        self, version: Version, text: str, outcome: Literal["failed", "superseded", "dropped"]
    ) -> list[Action]:
        if version == self.target:
            if self.state is RankState.INSTALLING:
                return self._quarantine(version, text, tell=True)
            if self.state is RankState.ARMED:
                # Gates stay closed: the coordinator may have decided GO, so only it can end this.
                return [TellCoordinator("failed", version, text, outcome)]
            tell = TellCoordinator("failed", version, text, outcome)
            return [*self._back_to_rest(version, text, outcome), tell]
        if version not in self.announced:
            return []
        self._bury(version, text, outcome)
        return [
            *self._forget(version),
            AckSources(version, outcome, text),
            TellCoordinator("failed", version, text, outcome),
        ]

    def _quarantine(self, version: Version, text: str, *, tell: bool) -> list[Action]:
        if self.target != version:
            return []
        if self.state in {RankState.RECEIVING, RankState.VERIFIED, RankState.ARMING}:
            return self._back_to_rest(version, text, "failed")
        self.state, self._rest, self.target = RankState.QUARANTINED, RankState.QUARANTINED, None
        self._end(version)
        actions: list[Action] = [
            *_cancel(version),
            QuarantineEngine(version, text),
            DropReceived(version, disarm=False),
            AckSources(version, "failed", text),
        ]
        if tell:
            actions.append(TellCoordinator("quarantined", version, text))
        return actions

    def _coordinator_lost(self, text: str) -> list[Action]:
        """The next coordinator has not heard what was announced: no version of now can go on."""
        actions: list[Action] = []
        for version in sorted(self.announced):
            actions += self._fail(version, text, "failed")
        if self.target is not None:
            actions += self._coordinator_gone(self.target, text)
        return actions

    def _coordinator_gone(self, version: Version, text: str) -> list[Action]:
        if self.state in {RankState.ARMED, RankState.INSTALLING}:
            return self._quarantine(version, text, tell=True)
        return self._back_to_rest(version, text, "failed")

    def _expired(self, name: str, version: Version) -> list[Action]:
        if name == "announce":
            missing = ", ".join(sorted(self.sources - self.announced.get(version, self.sources)))
            return self._fail(version, f"never announced by {missing}", "failed") if missing else []
        if self.target != version:
            return []
        text = f"the {name} deadline passed in state {self.state.value}"
        if name in {"gate", "total"} and self.state in {RankState.ARMED, RankState.INSTALLING}:
            return self._coordinator_gone(version, text)
        return self._fail(version, text, "failed")

    def _is_over(self, version: Version) -> bool:
        return self.over is not None and version <= self.over

    def _end(self, version: Version) -> None:
        if not self._is_over(version):
            self.over = version
            self.dead = {v: why for v, why in self.dead.items() if v > version}

    def _bury(
        self, version: Version, text: str, outcome: Literal["failed", "superseded", "dropped"]
    ) -> None:
        self.dead[version] = (outcome, text)
        if len(self.dead) > _KEPT_DEAD:
            del self.dead[min(self.dead)]

    def _forget(self, version: Version) -> list[Action]:
        self.announced.pop(version, None)
        return [CancelTimer("announce", version)]


def _cancel(version: Version) -> list[Action]:
    return [CancelTimer("total", version), CancelTimer("gate", version)]
