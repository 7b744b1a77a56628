"""The state machine of one source rank: the publish queue and each replica's outcome. Pure.

    publish ──> waiting (depth one, newest wins) ──> running: announced to every peer,
    snapshot being taken and sent ──> every peer acknowledged, failed or lagged ──> next

A *peer* is a sink rank; its replica's outcome is the first failure of a rank, else the first
commit (ranks of one replica commit together).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from streamsync.control.protocol.timer import CancelTimer, SetTimer, TimerExpired
from streamsync.types import Outcome, Version

AckState = Literal["committed", "failed", "superseded", "dropped"]


@dataclass(frozen=True, slots=True)
class Publish:
    """The trainer wants `version` out."""

    version: Version


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """A sink rank of `replica` subscribed with a plan; it takes part from the next version on."""

    peer: str
    replica: str


@dataclass(frozen=True, slots=True)
class Include:
    """`version` runs and is not announced yet: a peer that subscribed (again) meanwhile takes part
    in it, whatever became of its session before."""

    version: Version
    peer: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A peer's session ended or its link failed: it takes part in no further version."""

    peer: str
    text: str


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A peer said how `version` ended there."""

    peer: str
    version: Version
    state: AckState
    text: str = ""


@dataclass(frozen=True, slots=True)
class SendFailed:
    """The source itself can't give `version` to `peer` (its link or our stage failed)."""

    peer: str
    version: Version
    text: str


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """The last byte of `version` left the parameters."""

    version: Version


@dataclass(frozen=True, slots=True)
class SnapshotFailed:
    """Taking the snapshot failed or was cancelled: nobody can finish `version`."""

    version: Version
    text: str


Event = (
    Publish
    | PeerJoined
    | Include
    | PeerLost
    | Acknowledged
    | SendFailed
    | SnapshotTaken
    | SnapshotFailed
    | TimerExpired
)


@dataclass(frozen=True, slots=True)
class StartSync:
    """Announce `version` to `peers` and start taking and sending its snapshot."""

    version: Version
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Tell every peer that this source will never send `version`, whose turn had not come;
    `superseded`: because a newer one comes. Its `publish` fails with the text."""

    version: Version
    text: str
    superseded: bool


@dataclass(frozen=True, slots=True)
class Refuse:
    """`publish` of `version` fails with this text (`VersionError`)."""

    version: Version
    text: str


@dataclass(frozen=True, slots=True)
class AskToDrop:
    """Tell a late peer to give `version` up unless it is past GO."""

    peer: str
    version: Version


@dataclass(frozen=True, slots=True)
class StopSending:
    """Send `peer` nothing more of `version` and take its leases back; `text` goes to the peer when
    the failure is ours."""

    peer: str
    version: Version
    text: str


@dataclass(frozen=True, slots=True)
class StopSnapshot:
    """Read the parameters no more for `version`; its `publish` fails with the text."""

    version: Version
    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """`version` is over at this source: its outcomes are final."""

    version: Version
    outcomes: tuple[Outcome, ...]


Action = (
    StartSync | Withdraw | Refuse | AskToDrop | StopSending | StopSnapshot | Finish | SetTimer
    | CancelTimer
)  # fmt: skip


@dataclass(slots=True)
class _Running:
    version: Version
    replicas: dict[str, str]
    pending: set[str]
    snapshot_pending: bool = True
    acks: dict[str, tuple[AckState, str]] = field(default_factory=dict)


@dataclass(slots=True)
class SourceMachine:
    """Feed events with `feed`, carry out the returned actions in order."""

    policy: Literal["supersede", "queue"] = "supersede"
    newest: Version | None = None
    peers: dict[str, str] = field(default_factory=dict)
    waiting: deque[Version] = field(default_factory=deque)
    running: _Running | None = None

    def feed(self, event: Event) -> list[Action]:
        """Applies one event; never raises for what a peer may send late, twice or out of order."""
        match event:
            case Publish(version):
                return self._publish(version)
            case PeerJoined(peer, replica):
                self.peers[peer] = replica
                return []
            case Include(version, peer):
                running = self.running
                if running is not None and running.version == version and peer in self.peers:
                    running.replicas[peer] = self.peers[peer]
                    running.acks.pop(peer, None)
                    running.pending.add(peer)
                return []
            case PeerLost(peer, text):
                self.peers.pop(peer, None)
                return self._settle(peer, None, "failed", text, stop=True)
            case Acknowledged(peer, version, state, text):
                return self._settle(peer, version, state, text, stop=state != "committed")
            case SendFailed(peer, version, text):
                return self._settle(peer, version, "failed", text, stop=True)
            case SnapshotTaken(version):
                return self._snapshot_over(version, None)
            case SnapshotFailed(version, text):
                return self._snapshot_over(version, text)
            case TimerExpired(name, version):
                return self._expired(name, version)

    def _publish(self, version: Version) -> list[Action]:
        if self.newest is not None and version <= self.newest:
            return [
                Refuse(
                    version,
                    f"version {version} is not above {self.newest}, the newest one published: "
                    "versions only grow and are never used twice",
                )
            ]
        self.newest = version
        actions: list[Action] = []
        if self.running is not None and self.policy == "supersede":
            while self.waiting:
                old = self.waiting.popleft()
                text = f"superseded by {version} while it waited"
                actions += self._never_run(old, "superseded", text)
        self.waiting.append(version)
        return actions + self._start_next()

    def _never_run(
        self, version: Version, state: Literal["superseded", "failed"], text: str
    ) -> list[Action]:
        replicas = sorted(set(self.peers.values()))
        outcomes = (Outcome(replica=r, version=version, state=state, text=text) for r in replicas)
        return [Withdraw(version, text, state == "superseded"), Finish(version, tuple(outcomes))]

    def _start_next(self) -> list[Action]:
        if self.running is not None or not self.waiting:
            return []
        version = self.waiting.popleft()
        self.running = _Running(version, dict(self.peers), set(self.peers))
        return [StartSync(version, tuple(self.peers)), SetTimer("total", version)]

    def _settle(
        self, peer: str, version: Version | None, state: AckState, text: str, *, stop: bool
    ) -> list[Action]:
        running = self.running
        if running is None or peer not in running.pending:
            return []
        if version is not None and version != running.version:
            return []
        running.pending.discard(peer)
        running.acks[peer] = (state, text)
        actions: list[Action] = []
        if stop:
            actions.append(StopSending(peer, running.version, text))
        if state == "committed" and running.pending:
            actions.append(SetTimer("lag", running.version))
        return actions + self._maybe_finish()

    def _snapshot_over(self, version: Version, error: str | None) -> list[Action]:
        running = self.running
        if error is not None and version in self.waiting:
            # The trainer took it back: when its turn came, the parameters would be others.
            self.waiting.remove(version)
            return self._never_run(version, "failed", error)
        if running is None or running.version != version or not running.snapshot_pending:
            return []
        running.snapshot_pending = False
        actions: list[Action] = []
        if error is not None:
            for peer in sorted(running.pending):
                running.acks[peer] = ("failed", error)
                actions.append(StopSending(peer, version, error))
            running.pending.clear()
        return actions + self._maybe_finish()

    def _expired(self, name: str, version: Version) -> list[Action]:
        running = self.running
        if running is None or running.version != version:
            return []
        if name == "lag":
            return [AskToDrop(peer, version) for peer in sorted(running.pending)]
        if name == "total":
            text = f"no outcome of version {version} within the total deadline"
            actions: list[Action] = []
            for peer in sorted(running.pending):
                actions += self._settle(peer, version, "failed", text, stop=True)
            if self.running is running:
                text = f"the snapshot of version {version} was not taken within the total deadline"
                actions += [StopSnapshot(version, text), *self._snapshot_over(version, text)]
            return actions
        return []

    def _maybe_finish(self) -> list[Action]:
        running = self.running
        if running is None or running.pending or running.snapshot_pending:
            return []
        self.running = None
        version = running.version
        return [
            CancelTimer("lag", version),
            CancelTimer("total", version),
            Finish(version, _outcomes(running, is_newest=not self.waiting)),
            *self._start_next(),
        ]


def _outcomes(running: _Running, *, is_newest: bool) -> tuple[Outcome, ...]:
    """One outcome per replica: a rank's failure outweighs another's commit."""
    rank = {"committed": 0, "superseded": 1, "dropped": 2, "failed": 3}
    by_replica: dict[str, tuple[AckState, str]] = {}
    for peer, (state, text) in sorted(running.acks.items()):
        replica = running.replicas[peer]
        if replica not in by_replica or rank[state] > rank[by_replica[replica][0]]:
            by_replica[replica] = (state, text)
    return tuple(
        Outcome(
            replica=replica,
            version=running.version,
            state=state,
            text=text,
            needs_republish=is_newest and state != "committed",
        )
        for replica, (state, text) in sorted(by_replica.items())
    )
