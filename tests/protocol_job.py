"""A whole job of pure machines: sources, replicas, sessions, engines, timers. No IO, no clock.

It does with each action what the sessions do with it, and checks the protocol's promises as it
goes: a broken one is an AssertionError. Every choice (what is delivered, which timer expires, who
dies) is an index that the test draws, so that it finds orders that nobody thought of.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streamsync.control.protocol import coordinator as c
from streamsync.control.protocol import rank as r
from streamsync.control.protocol import source as p
from streamsync.control.protocol.rank import RankState
from streamsync.control.protocol.rank_machine import RankMachine
from streamsync.control.protocol.timer import CancelTimer, SetTimer, TimerExpired
from streamsync.types import Version

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamsync.types import Outcome

NUM_GROUPS = 2
AT_REST = {RankState.JOINING, RankState.SERVING, RankState.QUARANTINED}

Key = tuple[str, int]
"""Replica and rank."""


@dataclass(slots=True, eq=False)
class Wire:
    """A control session: two queues of events for the machines at its ends."""

    to_sink: deque[Any] = field(default_factory=deque)
    to_far: deque[Any] = field(default_factory=deque)
    sink_up: bool = True
    far_up: bool = True
    started: set[Version] = field(default_factory=set)
    """Versions of which bytes may be under way on the data link."""


@dataclass(slots=True, eq=False)
class Engine:
    """What an engine's memory holds, and whether tokens leave it. Calls run in order, later."""

    memory: list[Version | None] = field(default_factory=lambda: [None] * NUM_GROUPS)
    armed: Version | None = None
    quarantined: bool = False
    serving: Version | None = None
    calls: deque[tuple[str, Version]] = field(default_factory=deque)

    @property
    def is_visible(self) -> bool:
        """Whether a token made now would leave."""
        return self.armed is None and not self.quarantined


@dataclass(slots=True, eq=False)
class Pipeline:
    version: Version
    told_ready: bool = False
    go: bool = False
    failed: bool = False
    landed: bool = False


@dataclass(slots=True, eq=False)
class Sink:
    key: Key
    machine: RankMachine
    engine: Engine = field(default_factory=Engine)
    pipeline: Pipeline | None = None
    wire: Wire | None = None
    """To the coordinator; None at rank 0, which shares its process."""


@dataclass(slots=True, eq=False)
class Source:
    name: str
    machine: p.SourceMachine
    step: int
    snapshot: Version | None = None
    owed: set[Version] = field(default_factory=set)
    outcomes: dict[Version, tuple[Outcome, ...]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Office:
    machine: c.CoordinatorMachine
    wires: dict[int, Wire] = field(default_factory=dict)


class Job:
    """N sources and R replicas of K ranks. `links_break`: a version given up on the way costs the
    session, as when frames are under way; `in_order` False: a session may delay and repeat."""

    def __init__(
        self,
        num_sources: int,
        num_replicas: int,
        num_ranks: int,
        *,
        policy: Any = "supersede",
        links_break: bool = True,
        in_order: bool = True,
        rank: Callable[[], RankMachine] = RankMachine,
        coordinator: Callable[[int], c.CoordinatorMachine] = c.CoordinatorMachine,
        source: Callable[[Any], p.SourceMachine] = p.SourceMachine,
    ) -> None:
        self.num_ranks = num_ranks
        self.policy = policy
        self.links_break = links_break
        self.in_order = in_order
        self.make_rank, self.make_coordinator, self.make_source = rank, coordinator, source
        self.sources = {
            f"s{n}": Source(f"s{n}", source(policy), step=0) for n in range(num_sources)
        }
        self.replicas = [f"r{n}" for n in range(num_replicas)]
        self.sinks = {
            key: Sink(key, rank())
            for key in ((name, k) for name in self.replicas for k in range(num_ranks))
        }
        self.offices = {name: Office(coordinator(num_ranks)) for name in self.replicas}
        self.sessions: dict[tuple[str, Key], Wire] = {}
        self.timers: dict[tuple[Any, str, Version], None] = {}
        self.said_armed: set[tuple[Key, Version]] = set()
        self.said_installed: set[tuple[Key, Version]] = set()
        self.newborn: set[Key] = set()
        self.went: set[tuple[str, Version]] = set()
        self.committed: set[tuple[str, Version]] = set()
        self.served: dict[Key, Version] = {}
        self.reconnect()
        self.newborn.clear()

    # --- what happens -----------------------------------------------------------------------

    def deliver(self, index: int, place: int = 0) -> None:
        """One event of one session reaches its machine."""
        queues = [q for q, _ in self._queues() if q]
        if not queues:
            return
        chosen = queues[index % len(queues)]
        place = 0 if self.in_order else place % len(chosen)
        event = chosen[place]
        del chosen[place]
        next(take for q, take in self._queues() if q is chosen)(event)

    def repeat(self, index: int, place: int) -> None:
        """A session delivers something twice."""
        queues = [q for q, _ in self._queues() if q]
        if queues and not self.in_order:
            chosen = queues[index % len(queues)]
            chosen.append(chosen[place % len(chosen)])

    def call_engine(self, index: int, *, ok: bool = True) -> None:
        """An engine does what it was asked next."""
        sinks = [s for s in self.sinks.values() if s.engine.calls]
        if sinks:
            self._call_engine(sinks[index % len(sinks)], ok=ok)

    def progress(self, index: int, kind: str) -> None:
        """A pipeline gets on: `starved`, `verified` or plain ready, lands a group, or fails."""
        sinks = [s for s in self.sinks.values() if s.pipeline is not None]
        if sinks:
            self._progress(sinks[index % len(sinks)], kind)

    def publish(self, index: int) -> None:
        """A trainer rank publishes its next version."""
        source = list(self.sources.values())[index % len(self.sources)]
        source.step += 1
        version = Version(1, source.step)
        source.owed.add(version)
        self._feed_source(source, p.Publish(version))

    def publish_again(self, index: int) -> None:
        """A version is never used twice."""
        source = list(self.sources.values())[index % len(self.sources)]
        if source.machine.newest is not None:
            version = source.machine.newest
            assert [type(a) for a in source.machine.feed(p.Publish(version))] == [p.Refuse]

    def take_snapshot(self, index: int, *, ok: bool = True) -> None:
        """The last byte left the parameters, or never will."""
        sources = [s for s in self.sources.values() if s.snapshot is not None]
        if sources:
            source = sources[index % len(sources)]
            version, source.snapshot = source.snapshot, None
            assert version is not None
            event = p.SnapshotTaken(version) if ok else p.SnapshotFailed(version, "out of memory")
            self._feed_source(source, event)

    def cancel_waiting(self, index: int) -> None:
        """A trainer takes a version back whose turn has not come."""
        sources = [s for s in self.sources.values() if s.machine.waiting]
        if sources:
            source = sources[index % len(sources)]
            version = source.machine.waiting[0]
            self._feed_source(source, p.SnapshotFailed(version, "cancelled"))
            assert version in source.outcomes

    def expire(self, index: int) -> None:
        """Any deadline that was set may pass at any moment."""
        if self.timers:
            owner, name, version = list(self.timers)[index % len(self.timers)]
            del self.timers[owner, name, version]
            self._feed(owner, TimerExpired(name, version))  # type: ignore[arg-type]

    def fail_link(self, index: int) -> None:
        """A source can't send to one peer any more."""
        running = [s for s in self.sources.values() if s.machine.running is not None]
        if running:
            source = running[index % len(running)]
            assert source.machine.running is not None
            peers = sorted(source.machine.running.pending)
            if peers:
                peer, version = peers[index % len(peers)], source.machine.running.version
                self._feed_source(source, p.SendFailed(peer, version, "broken pipe"))

    def cut(self, index: int) -> None:
        """A control session breaks; both ends learn it, each in its own time."""
        wires: list[Callable[[], None]] = [
            *(lambda k=k: self._cut_session(*k) for k in self.sessions),  # type: ignore[misc]
            *(lambda s=s: self._cut_wire(s) for s in self.sinks.values() if s.wire),  # type: ignore[misc]
        ]
        wires[index % len(wires)]()

    def kill_source(self, index: int) -> None:
        """A trainer rank dies and comes back; nobody waits any more for what it had published."""
        name = list(self.sources)[index % len(self.sources)]
        step = max(s.step for s in self.sources.values())
        self.sources[name] = Source(name, self.make_source(self.policy), step)
        self._forget_timers(name)
        for (source, key), wire in self.sessions.items():
            if source == name:
                wire.far_up = False
                wire.to_far.clear()
                wire.to_sink.append(r.SourceLost(source, f"{key} saw it die"))

    def kill_sink(self, index: int) -> None:
        """An engine rank dies and comes back with nothing; with rank 0 dies the coordinator."""
        key = list(self.sinks)[index % len(self.sinks)]
        replica, k = key
        old = self.sinks[key]
        self.sinks[key] = Sink(key, self.make_rank())
        self.newborn.add(key)
        self.served.pop(key, None)
        self._forget_timers(key)
        for (_, other), wire in self.sessions.items():
            if other == key:
                wire.sink_up = False
                wire.to_sink.clear()
                wire.to_far.append(p.PeerLost(_name(key), "died"))
        if k:
            if old.wire is not None:
                old.wire.sink_up = False
                old.wire.to_sink.clear()
                old.wire.to_far.append(c.RankLost(k, "died"))
            return
        self._forget_timers(replica)
        for wire in self.offices[replica].wires.values():
            wire.far_up = False
            wire.to_far.clear()
            wire.to_sink.append(r.CoordinatorLost("died"))
        self.offices[replica] = Office(self.make_coordinator(self.num_ranks))

    def reconnect(self) -> None:
        """Whoever lost a session, and is at rest, opens it again."""
        for sink in self.sinks.values():
            replica, k = sink.key
            if k and (sink.wire is None or not sink.wire.sink_up):
                office = self.offices[replica]
                old = office.wires.pop(k, None)
                sink.wire = office.wires[k] = Wire()
                if old is not None:
                    self._feed(replica, c.RankLost(k, "it enlisted again"))
        for sink in self.sinks.values():
            if sink.machine.target is None and (
                sink.key[1] == 0 or (sink.wire is not None and sink.wire.sink_up)
            ):
                self._subscribe(sink)

    def _subscribe(self, sink: Sink) -> None:
        missed: list[r.Withdrawn] = []
        for source in self.sources.values():
            old = self.sessions.get((source.name, sink.key))
            if old is not None and old.sink_up:
                continue
            if old is not None and old.far_up:
                old.far_up = False
                self._feed_source(source, p.PeerLost(_name(sink.key), "it subscribed again"))
            self.sessions[source.name, sink.key] = Wire()
            self._feed_source(source, p.PeerJoined(_name(sink.key), sink.key[0]))
            if source.machine.running is not None:
                version = source.machine.running.version
                missed.append(r.Withdrawn(source.name, version, "subscribed too late"))
        if sink.machine.sources != frozenset(self.sources):
            self._feed(sink.key, r.SourcesChanged(frozenset(self.sources)))
        for event in missed:
            self._feed(sink.key, event)

    # --- what it does to the machines -------------------------------------------------------

    def _queues(self) -> list[tuple[deque[Any], Callable[[Any], None]]]:
        found: list[tuple[deque[Any], Callable[[Any], None]]] = []
        for (name, key), wire in self.sessions.items():
            found.append((wire.to_sink, lambda e, w=wire, k=key: self._to_sink(w, k, e)))  # type: ignore[misc]
            found.append((wire.to_far, lambda e, w=wire, n=name: self._to_source(w, n, e)))  # type: ignore[misc]
        for key, sink in self.sinks.items():
            if sink.wire is not None:
                wire = sink.wire
                found.append((wire.to_sink, lambda e, w=wire, k=key: self._to_sink(w, k, e)))  # type: ignore[misc]
        for replica, office in self.offices.items():
            for k, wire in office.wires.items():
                found.append(
                    (wire.to_far, lambda e, w=wire, n=replica, k=k: self._to_office(w, n, k, e))  # type: ignore[misc]
                )
        return found

    def _to_sink(self, wire: Wire, key: Key, event: Any) -> None:
        if wire.sink_up:
            if isinstance(event, r.SourceLost | r.CoordinatorLost):
                wire.sink_up = False
                wire.to_sink.clear()
            self._feed(key, event)

    def _to_source(self, wire: Wire, name: str, event: Any) -> None:
        if wire.far_up:
            if isinstance(event, p.PeerLost):
                wire.far_up = False
                wire.to_far.clear()
            self._feed_source(self.sources[name], event)

    def _to_office(self, wire: Wire, replica: str, k: int, event: Any) -> None:
        if isinstance(event, c.RankLost) and self.offices[replica].wires.get(k) is wire:
            del self.offices[replica].wires[k]
        if wire.far_up:
            wire.far_up = not isinstance(event, c.RankLost)
            self._feed(replica, event)

    def _feed(self, owner: Any, event: Any) -> None:
        """Rank, coordinator or source; actions are carried out in order, depth first."""
        if owner in self.sinks:
            sink = self.sinks[owner]
            before, target = sink.machine.state, sink.machine.target
            actions = sink.machine.feed(event)
            if before is RankState.ARMED and not isinstance(event, r.Abort | r.Go):
                kept = sink.machine.state is before and sink.machine.target == target
                left = "left ARMED alone"
                assert kept or sink.machine.state is RankState.QUARANTINED, f"{owner} {left}"
            for action in actions:
                self._do_sink(sink, action)
            if self.links_break and any(isinstance(a, r.DropReceived) for a in actions):
                for name in self.sources:
                    self._cut_session(name, sink.key)
        elif owner in self.offices:
            office = self.offices[owner]
            for action in office.machine.feed(event):
                self._do_office(owner, office, action)
        else:
            self._feed_source(self.sources[owner], event)

    def _feed_source(self, source: Source, event: Any) -> None:
        for action in source.machine.feed(event):
            self._do_source(source, action)

    def _timer(self, owner: Any, action: SetTimer | CancelTimer) -> None:
        key = (owner, action.name, action.version)
        self.timers.pop(key, None)
        if isinstance(action, SetTimer):
            self.timers[key] = None

    def _forget_timers(self, owner: Any) -> None:
        self.timers = {key: None for key in self.timers if key[0] != owner}

    def _do_sink(self, sink: Sink, action: Any) -> None:
        match action:
            case SetTimer() | CancelTimer():
                self._timer(sink.key, action)
            case r.TellCoordinator(kind, version, text, state):
                if kind == "armed":
                    self.said_armed.add((sink.key, version))
                elif kind == "installed":
                    self.said_installed.add((sink.key, version))
                word = c.RankSays(sink.key[1], kind, version, text, state)
                if sink.key[1] == 0:
                    self._feed(sink.key[0], word)
                elif sink.wire is not None and sink.wire.sink_up:
                    sink.wire.to_far.append(word)
            case r.StartReceiving(version):
                sink.pipeline = Pipeline(version)
                for (_, key), wire in self.sessions.items():
                    if key == sink.key:
                        wire.started.add(version)
            case r.ArmGates(version):
                sink.engine.calls.append(("arm", version))
            case r.StartLoading(version):
                if sink.pipeline is not None:
                    assert sink.pipeline.version == version
                    sink.pipeline.go = True
            case r.DropReceived(version, disarm):
                sink.pipeline = None
                if disarm:
                    sink.engine.calls.append(("disarm", version))
            case r.CommitEngine(version):
                sink.pipeline = None
                sink.engine.calls.append(("commit", version))
            case r.QuarantineEngine(version, _):
                sink.engine.calls.append(("quarantine", version))
            case r.AckSources(version, state, text):
                for (_, key), wire in self.sessions.items():
                    if key == sink.key and wire.sink_up:
                        wire.to_far.append(p.Acknowledged(_name(key), version, state, text))

    def _do_office(self, replica: str, office: Office, action: Any) -> None:
        match action:
            case SetTimer() | CancelTimer():
                self._timer(replica, action)
            case c.Broadcast(order):
                if isinstance(order, r.Go):
                    self._check_go(replica, order.version)
                elif isinstance(order, r.Commit):
                    self._check_commit(replica, order.version)
                elif isinstance(order, r.Abort) and self.in_order:
                    assert (replica, order.version) not in self.went, "ABORT after GO"
                for k, wire in list(office.wires.items()):
                    if wire.sink_up:
                        wire.to_sink.append(order)
                    elif office.wires.pop(k, None) is not None:  # sending tells that it is gone
                        wire.far_up = False
                        self._feed(replica, c.RankLost(k, "its control session is gone"))
                self._feed((replica, 0), order)

    def _do_source(self, source: Source, action: Any) -> None:
        match action:
            case SetTimer() | CancelTimer():
                self._timer(source.name, action)
            case p.StartSync(version, peers):
                assert source.snapshot is None, "two snapshots at once"
                source.snapshot = version
                for peer in peers:
                    self._say(source, peer, r.Announced(source.name, version))
            case p.Withdraw(version, text, superseded):
                for peer in list(source.machine.peers):
                    self._say(source, peer, r.Withdrawn(source.name, version, text, superseded))
            case p.Refuse(version, _):
                source.owed.discard(version)
            case p.AskToDrop(peer, version):
                self._say(source, peer, r.AskedToDrop(source.name, version))
            case p.StopSending(peer, version, text):
                self._say(source, peer, r.Withdrawn(source.name, version, text))
                wire = self.sessions.get((source.name, _key(peer)))
                if wire is not None and version in wire.started and self.links_break:
                    self._cut_session(source.name, _key(peer))
            case p.StopSnapshot():
                source.snapshot = None
            case p.Finish(version, outcomes):
                self._check_outcomes(source, version, outcomes)

    def _say(self, source: Source, peer: str, event: Any) -> None:
        wire = self.sessions.get((source.name, _key(peer)))
        if wire is not None and wire.far_up:
            wire.to_sink.append(event)

    def _cut_session(self, name: str, key: Key) -> None:
        wire = self.sessions[name, key]
        if wire.sink_up:
            wire.to_sink.append(r.SourceLost(name, "session cut"))
        if wire.far_up:
            wire.to_far.append(p.PeerLost(_name(key), "session cut"))

    def _cut_wire(self, sink: Sink) -> None:
        wire = sink.wire
        if wire is not None and wire.sink_up:
            wire.to_sink.append(r.CoordinatorLost("session cut"))
        if wire is not None and wire.far_up:
            wire.to_far.append(c.RankLost(sink.key[1], "session cut"))

    def _call_engine(self, sink: Sink, *, ok: bool) -> None:
        engine = sink.engine
        call, version = engine.calls.popleft()
        match call:
            case "arm" if not ok:
                if sink.machine.target is not None:
                    self._feed(sink.key, r.Failed(sink.machine.target, "the engine can't arm"))
            case "arm":
                engine.armed = version
                self._feed(sink.key, r.GatesArmed(version))
            case "disarm":
                assert version not in engine.memory, f"{sink.key} disarmed after a write"
                engine.armed = None
            case "commit":
                assert engine.memory == [version] * NUM_GROUPS, f"{sink.key} commits a torn model"
                before = self.served.get(sink.key)
                assert before is None or version > before, f"{sink.key} served {before} before"
                assert (sink.key[0], version) in self.committed, f"{sink.key} commits alone"
                self.served[sink.key] = engine.serving = version
                engine.armed, engine.quarantined = None, False
            case "quarantine":
                engine.quarantined = True

    def _progress(self, sink: Sink, kind: str) -> None:
        pipeline = sink.pipeline
        assert pipeline is not None
        version = pipeline.version
        if pipeline.failed:
            return
        if kind == "fail":
            pipeline.failed = True
            self._feed(sink.key, r.Failed(version, "digest mismatch"))
        elif kind != "land":
            if not pipeline.told_ready:
                pipeline.told_ready = True
                event = r.Ready(version, starved=kind == "starved", verified=kind == "verified")
                self._feed(sink.key, event)
        elif pipeline.go and not pipeline.landed:
            self._check_write(sink, version)
            memory = sink.engine.memory
            if version in memory:
                memory[:] = [version] * NUM_GROUPS
                pipeline.landed = True
                self._feed(sink.key, r.AllLanded(version))
            else:
                memory[0] = version

    # --- what must always be true -----------------------------------------------------------

    def _check_go(self, replica: str, version: Version) -> None:
        for k in range(self.num_ranks):
            key = (replica, k)
            assert (key, version) in self.said_armed, f"GO of {version}, but {key} never armed"
            engine = self.sinks[key].engine
            held = engine.armed == version or not engine.is_visible
            assert held or key in self.newborn, f"GO of {version} while {key} serves"
        self.went.add((replica, version))

    def _check_commit(self, replica: str, version: Version) -> None:
        assert (replica, version) in self.went
        assert (replica, version) not in self.committed
        for k in range(self.num_ranks):
            key = (replica, k)
            assert (key, version) in self.said_installed, f"COMMIT, but {key} lacks {version}"
            whole = self.sinks[key].engine.memory == [version] * NUM_GROUPS
            assert whole or key in self.newborn, f"COMMIT of {version}, but {key} is torn"
        self.committed.add((replica, version))

    def _check_write(self, sink: Sink, version: Version) -> None:
        assert (sink.key[0], version) in self.went, f"{sink.key} writes {version} before GO"
        assert sink.engine.armed == version, f"{sink.key} writes while its gates are open"
        assert sink.machine.state is RankState.INSTALLING

    def _check_outcomes(
        self, source: Source, version: Version, outcomes: tuple[Outcome, ...]
    ) -> None:
        assert version in source.owed
        assert version not in source.outcomes, "two outcomes of one version"
        assert len({o.replica for o in outcomes}) == len(outcomes)
        for outcome in outcomes:
            if outcome.state == "committed":
                assert (outcome.replica, version) in self.committed, "said committed, is not"
            else:
                assert outcome.text, "no reason given"
        source.outcomes[version] = outcomes

    def check(self) -> None:
        """After every step: no engine from which tokens leave holds two versions."""
        for sink in self.sinks.values():
            engine, state = sink.engine, sink.machine.state
            if engine.is_visible and engine.serving is not None:
                assert engine.memory == [engine.serving] * NUM_GROUPS, f"{sink.key} is torn"
            if state in {RankState.INSTALLING, RankState.ARMED}:
                assert not engine.is_visible, f"{sink.key} is {state.value} with open gates"

    # --- how it ends ------------------------------------------------------------------------

    def drain(self) -> None:
        """Everything on its way arrives; engines do what they were asked."""
        for _ in range(10_000):
            if any(q for q, _ in self._queues()):
                self.in_order, kept = True, self.in_order
                self.deliver(0)
                self.in_order = kept
            elif any(s.engine.calls for s in self.sinks.values()):
                self.call_engine(0)
            else:
                return
            self.check()
        raise AssertionError("messages never end")

    def settle(self) -> None:
        """Everything hangs but the messages: deadlines alone must end every sync."""
        for _ in range(1_000):
            self.drain()
            if not self.timers:
                break
            self.expire(0)
        assert not self.timers, "deadlines never end"
        for source in self.sources.values():
            left = source.owed - set(source.outcomes)
            assert not left, f"{source.name} never told the outcome of {sorted(left)}"
        for sink in self.sinks.values():
            state = sink.machine.state
            assert state in AT_REST, f"{sink.key} stays {state.value}"
            assert sink.engine.armed is None or sink.engine.quarantined, f"{sink.key} stays armed"
            assert sink.engine.quarantined == (state is RankState.QUARANTINED)
        for replica, office in self.offices.items():
            assert office.machine.phase is c.Phase.IDLE
            served = {
                s.engine.serving
                for s in self.sinks.values()
                if s.key[0] == replica and s.machine.state is RankState.SERVING
            }
            assert len(served) <= 1, f"{replica} serves {served}"

    def heal(self) -> None:
        """After any trouble, the next version published by all reaches every rank, and no deadline
        is needed for it."""
        self.settle()
        for _ in range(3):
            self.reconnect()
            self.settle()
        step = max(s.step for s in self.sources.values())
        for n, source in enumerate(self.sources.values()):
            source.step = step
            self.publish(n)
        version = Version(1, step + 1)
        self.run_well()
        for source in self.sources.values():
            outcomes = source.outcomes.get(version)
            assert outcomes is not None, f"{version} does not end at {source.name}"
            states = {o.replica: o.state for o in outcomes}
            assert states == dict.fromkeys(self.replicas, "committed"), f"{version}: {outcomes}"
        for sink in self.sinks.values():
            assert sink.machine.state is RankState.SERVING
            assert sink.engine.serving == version
            assert sink.engine.is_visible

    def run_well(self) -> None:
        """Nothing fails any more, until nothing is left to do."""
        for _ in range(40):
            self.advance()

    def advance(self) -> None:
        """What is on its way arrives, and every pipeline gets one step on."""
        self.drain()
        for source in self.sources.values():
            if source.snapshot is not None:
                version, source.snapshot = source.snapshot, None
                self._feed_source(source, p.SnapshotTaken(version))
        for sink in self.sinks.values():
            if sink.pipeline is not None:
                self._progress(sink, "ready" if not sink.pipeline.told_ready else "land")
                self.check()


def _name(key: Key) -> str:
    return f"{key[0]}/{key[1]}"


def _key(name: str) -> Key:
    replica, _, k = name.partition("/")
    return replica, int(k)
