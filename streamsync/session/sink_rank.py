"""A sink rank's life: it plans, subscribes to its sources, takes one version after the other."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import torch

from streamsync.control import messages as m
from streamsync.control.curve import Curve
from streamsync.control.member import HubMember
from streamsync.control.protocol import rank as r
from streamsync.control.protocol.rank_machine import RankMachine
from streamsync.control.protocol.timer import CancelTimer, SetTimer
from streamsync.errors import (
    ConfigError,
    ControlError,
    EngineError,
    PlanError,
    StreamsyncError,
    TransportError,
    root_error,
)
from streamsync.runtime.pool import Pool
from streamsync.session.engine_gates import EngineGates
from streamsync.session.enrolment import Enrolment
from streamsync.session.links import OpenTransports
from streamsync.session.replica import Coordinator, Orders, RemoteCoordinator
from streamsync.session.sink_sync import SinkSync
from streamsync.session.subscription import Subscriptions
from streamsync.session.timers import Timers
from streamsync.types import Version

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from concurrent.futures import Executor

    from streamsync.config import Config
    from streamsync.engines.base import Engine
    from streamsync.layout.binding import Binding
    from streamsync.observability.probe import Probe
    from streamsync.plan.plan import Plan, Rules
    from streamsync.session.sink_peer import SinkPeer
    from streamsync.types import Apply, Arm, SyncReport

_log = logging.getLogger("streamsync.sink")

_KEPT_REPORTS = 64
NO_VERSION = Version(0, 0)
"""Before the first commit; epochs begin far above."""


class SinkRank:
    """Everything a sink does on its loop's thread. `Subscriber` is its face."""

    def __init__(
        self,
        engine: Engine,
        *,
        hub: str,
        secret: str,
        replica: str,
        rank: int,
        num_ranks: int,
        apply: Apply,
        arm: Arm,
        rules: Rules,
        place: m.Place,
        config: Config,
        probe: Probe,
        executor: Executor,
    ) -> None:
        self.name = f"{replica}/{rank}"
        self._binding: Binding = engine.binding()
        self._binding.check_memory()
        self._hub = hub
        self._secret = secret
        self._replica = replica
        self._rank = rank
        self._num_ranks = num_ranks
        self._apply: Apply = apply
        self._arm: Arm = arm
        self._rules = rules
        self._place = place
        self._config = config
        self._probe = probe
        self._executor = executor
        deadlines = config.deadlines
        self._gates = EngineGates(engine, self.name, deadlines.gate, deadlines.progress)
        self._machine = RankMachine()
        self._sync: SinkSync | None = None
        self._sync_task: asyncio.Task[None] | None = None
        self._load_bytes_per_second = 0.0
        self._scratch = torch.empty(config.copy_threads, 0, dtype=torch.uint8)
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._closing = False
        self._committed: Version | None = None
        self.plan: Plan | None = None
        self.error: StreamsyncError | None = None
        self.reports: tuple[SyncReport, ...] = ()
        self._pool: Pool
        self._timers: Timers
        self._member: HubMember
        self._coordinator: Coordinator | RemoteCoordinator
        self._subscriptions: Subscriptions
        self._enrolment: Enrolment
        self._tasks: asyncio.TaskGroup

    async def main(self, ready: Callable[[], None]) -> None:
        """Lives until `stop`; raises what makes the rank unusable."""
        curve = Curve(self._secret, self._config.deadlines.progress)
        try:
            curve.start()
            self._pool = Pool(self._config.pool_bytes, self.name.replace("/", "-"))
            transports = OpenTransports(self._config, self._executor)
            self._timers = Timers(self._config.deadlines, self._feed)
            self._member = HubMember(
                curve,
                self._hub,
                self._join,
                self._config.deadlines.connect,
                changed=self._look_again,
            )
            self._subscriptions = Subscriptions(
                curve,
                self._replica,
                self._rank,
                self._num_ranks,
                self._place,
                self._binding,
                self._config,
                self._pool,
                transports,
                self._executor,
                lambda session: self._tasks.create_task(session),
                message=self._on_source_message,
                lost=self._on_source_lost,
            )
            self._coordinator = (
                Coordinator(
                    curve,
                    self._replica,
                    self._num_ranks,
                    self._config,
                    self._feed,
                    self._tell_replica_ready,
                )
                if self._rank == 0
                else RemoteCoordinator(
                    curve,
                    self._member,
                    self._replica,
                    self._rank,
                    self._num_ranks,
                    self._config,
                    self._feed,
                    self._tell_replica_ready,
                    lambda text: self._feed(r.CoordinatorLost(text)),
                )
            )
            self._enrolment = Enrolment(
                self.name,
                self._replica,
                self._binding.layout,
                self._rules,
                self._apply,
                self._config,
                self._pool,
                self._member,
                self._subscriptions,
                self._executor,
                has_coordinator=lambda: self._coordinator.is_reachable,
                at_rest=self._at_rest,
                enrolled=self._enrolled,
                failed=self._not_enrolled,
            )
            try:
                async with asyncio.TaskGroup() as self._tasks:
                    running = [
                        self._tasks.create_task(self._member.run()),
                        self._tasks.create_task(self._coordinator.run()),
                    ]
                    try:
                        await self._member.wait_joined()
                        running.append(self._tasks.create_task(self._enrolment.run()))
                        ready()
                        await self._stop.wait()
                    finally:
                        self._closing = True
                        await self._close(running)
            finally:
                self._timers.close()
                self._coordinator.close()
                await transports.close()
                self._pool.close()
        finally:
            curve.close()
            self._gates.close()

    async def _close(self, running: list[asyncio.Task[None]]) -> None:
        if self._machine.target is not None:
            self._feed(r.Failed(self._machine.target, "the subscriber closes"))
        if self._machine.state is r.RankState.ARMED:  # no ABORT came: it can't go back alone
            self._feed(r.CoordinatorLost("the subscriber closes"))
        if isinstance(self._coordinator, RemoteCoordinator):
            self._coordinator.close()
        self._member.leave()
        await asyncio.sleep(0)
        if self._sync_task is not None:
            self._sync_task.cancel()
            await asyncio.wait({self._sync_task})
        for task in running:
            task.cancel()
        await self._subscriptions.drop_all("the subscriber closes")
        self._changed.set()

    def stop(self) -> None:
        """Ends `main`."""
        self._stop.set()

    def _join(self, epoch: int) -> m.Join:
        endpoint = self._coordinator.endpoint if isinstance(self._coordinator, Coordinator) else ""
        return m.Join(
            protocol=m.PROTOCOL,
            name=self.name,
            role="sink",
            unit=self._replica,
            rank=self._rank,
            num_ranks=self._num_ranks,
            endpoint=endpoint,
            incarnation=self._place.process_id,
            place=self._place,
            epoch=epoch,
            slot=self._enrolment.slot,
        )

    # --- the user's side --------------------------------------------------------------------

    @property
    def version(self) -> Version | None:
        """The version that the engine committed; None before the first one and in quarantine."""
        return None if self.state is r.RankState.QUARANTINED else self._committed

    @property
    def state(self) -> r.RankState:
        """Where this rank stands."""
        return self._machine.state

    async def wait(self, step: int, deadline: float) -> Version:
        """See `Subscriber.wait`."""
        try:
            async with asyncio.timeout(deadline):
                while True:
                    version = self.version
                    if version is not None and version.step >= step:
                        return version
                    if isinstance(self.error, PlanError | ConfigError):
                        raise self.error
                    if self._closing:
                        raise ControlError("the subscriber was closed", rank=self.name)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            why = f"; last trouble: {self.error}" if self.error else ""
            raise TransportError(
                f"step {step} was not committed within {deadline:g} s{why}", rank=self.name
            ) from None

    # --- the sources' side ------------------------------------------------------------------

    async def _at_rest(self) -> None:
        while True:
            if self._machine.target is not None or self._is_announced:
                self._changed.clear()
                await self._changed.wait()
            elif self._sync_task is not None and not self._sync_task.done():
                await asyncio.wait({self._sync_task})  # it may still hold leases, or write
            else:
                return

    @property
    def _is_announced(self) -> bool:
        """Whether a version is under way that a changed session would fail. One that a missing
        session fails anyhow does not count."""
        return bool(self._machine.announced) and self._subscriptions.are_whole

    def _enrolled(self, plan: Plan) -> None:
        self.plan = plan
        largest = max((s.max_bucket_bytes for s in plan.shares), default=0)
        if self._scratch.shape[1] < largest:
            self._scratch = torch.empty(self._scratch.shape[0], largest, dtype=torch.uint8)
        self.error = None
        sources = frozenset(self._subscriptions.peers)
        if self._machine.sources != sources:
            self._feed(r.SourcesChanged(sources))
        for source, missed in self._subscriptions.take_missed():
            self._feed(r.Withdrawn(source, missed, "this sink subscribed after it had begun"))
        self._coordinator.tell(
            m.Word(rank=self._rank, kind="subscribed", version=self._machine.serving or NO_VERSION)
        )
        self._changed.set()

    def _not_enrolled(self, error: StreamsyncError) -> None:
        self.error = error
        if isinstance(error, PlanError | ConfigError):
            _log.error("%s: %s", self.name, error)
            self._changed.set()

    def _look_again(self) -> None:
        self._enrolment.again()

    def _tell_replica_ready(self) -> None:
        for peer in self._subscriptions.peers.values():
            peer.tell(m.ReplicaReady())

    def _on_source_message(self, peer: SinkPeer, message: m.AnyMessage) -> None:
        match message:
            case m.Begin():
                self._feed(r.Announced(peer.source, message.version))
            case m.End():
                if self._sync is not None and self._sync.version == message.version:
                    self._sync.end(peer.source, message)
                else:
                    peer.early_end = message
            case m.Withdrawn():
                self._feed(
                    r.Withdrawn(peer.source, message.version, message.text, message.superseded)
                )
            case m.DropRequest():
                self._feed(r.AskedToDrop(peer.source, message.version))
            case m.Goodbye():
                peer.dialer.fail(message.text or "it said goodbye")
            case m.Error():
                peer.dialer.fail(message.text)
            case _:
                raise ControlError(f"a sink takes no {type(message).__name__}")

    def _on_source_lost(self, source: str, text: str) -> None:
        if self._closing:
            return
        _log.warning("%s lost source %s: %s", self.name, source, text)
        self._feed(r.SourceLost(source, text))
        self._look_again()

    # --- the machine's actions --------------------------------------------------------------

    def _feed(self, event: r.Event | Orders) -> None:
        before = self._machine.state, len(self._machine.announced)
        for action in self._machine.feed(event):
            self._perform(action)
        if (self._machine.state, len(self._machine.announced)) != before:
            self._changed.set()

    def _perform(self, action: r.Action) -> None:
        match action:
            case SetTimer() | CancelTimer():
                self._timers.apply(action)
            case r.TellCoordinator(kind, version, text, state):
                if kind == "failed":
                    self.error = EngineError(text, rank=self.name, version=version)
                self._coordinator.tell(
                    m.Word(rank=self._rank, kind=kind, version=version, text=text, state=state)
                )
            case r.StartReceiving(version):
                self._probe.moment("prepared", version=version)
                self._start_sync(version)
            case r.ArmGates(version):
                self._tasks.create_task(self._arm_gates(version))
            case r.StartLoading(version):
                self._probe.moment("go", version=version)
                if self._sync is not None:
                    self._sync.go()
            case r.DropReceived(version, disarm):
                self._probe.moment("aborted", version=version)
                if self._sync_task is not None:
                    self._sync_task.cancel()
                if disarm:
                    self._tasks.create_task(self._call_engine(self._gates.disarm(version)))
            case r.CommitEngine(version):
                assert self._sync is not None
                self._load_bytes_per_second = self._sync.load_bytes_per_second()
                self._tasks.create_task(self._commit(version, self._sync))
            case r.QuarantineEngine(version, text):
                _log.error("%s is quarantined at version %s: %s", self.name, version, text)
                self._probe.moment("quarantined", version=version, text=text)
                self._tasks.create_task(self._call_engine(self._gates.quarantine(text)))
            case r.AckSources(version, "committed"):
                pass  # `_commit` says it when the engine has taken the version
            case r.AckSources(version, state, text):
                self._ack(m.Ack(version=version, state=state, text=text))

    def _start_sync(self, version: Version) -> None:
        assert self.plan is not None
        peers = list(self._subscriptions.peers.values())
        sync = SinkSync(
            version,
            peers,
            self.plan.groups,
            self._subscriptions.landings,
            self._gates,
            self._scratch,
            self._pool,
            self._probe,
            self._executor,
            apply=self._apply,
            arm=self._arm,
            load_bytes_per_second=self._load_bytes_per_second,
            progress_seconds=self._config.deadlines.progress,
            ready=lambda starved, verified: self._feed(r.Ready(version, starved, verified)),
        )
        for peer in peers:
            peer.has_granted = False
        self._sync = sync
        self._sync_task = self._tasks.create_task(self._run_sync(sync, self._sync_task))

    async def _run_sync(self, sync: SinkSync, previous: asyncio.Task[None] | None) -> None:
        try:
            if previous is not None:  # one that was given up may still write its last bucket
                await asyncio.wait({previous})
            await sync.run()
        except BaseException as error:
            if isinstance(error, Exception):
                self._feed(r.Failed(sync.version, self._text_of(error)))
            await sync.abort_links()
            for peer in sync.peers:
                if peer.has_granted:
                    peer.dialer.fail("its data link was given up with the version")
            if not isinstance(error, Exception):
                raise
        else:
            self._feed(r.AllLanded(sync.version))

    def _text_of(self, error: BaseException) -> str:
        error = root_error(error)
        if isinstance(error, StreamsyncError):
            return f"{type(error).__name__}: {error.at(rank=self.name)}"
        return f"{type(error).__name__}: {error} [rank={self.name}]"

    async def _arm_gates(self, version: Version) -> None:
        assert self.plan is not None
        try:
            await self._gates.arm(version, self.plan, self._apply)
        except Exception as error:
            self._feed(r.Failed(version, self._text_of(error)))
            return
        self._probe.moment("armed", version=version)
        self._feed(r.GatesArmed(version))

    async def _call_engine(self, call: Awaitable[None]) -> None:
        """For what must not fail: an engine that does is as good as lost, and its log says so."""
        try:
            await call
        except Exception:
            _log.exception("%s: the engine failed", self.name)

    def _ack(self, message: m.Ack) -> None:
        for peer in self._subscriptions.peers.values():
            peer.tell(message)

    async def _commit(self, version: Version, sync: SinkSync) -> None:
        try:
            await self._gates.commit(version)
        except Exception as error:
            text = f"the engine failed to commit: {self._text_of(error)}"
            self.error = EngineError(text, version=version)
            self._feed(r.CommitFailed(version, text))
            return
        report = sync.report(time.monotonic())
        self.reports = (*self.reports[1 - _KEPT_REPORTS :], report)
        self._committed = version  # after its report: who sees the version finds that
        self._probe.moment("committed", version=version)
        self._ack(m.Ack(version=version, state="committed"))
        self._changed.set()
        _log.info(
            "version %s: %.1f MB in %.2f s (%.2f GB/s), first layer after %.2f s, install %.2f s",
            version,
            report.wire_bytes / 1e6,
            report.seconds,
            report.wire_bytes / max(report.seconds, 1e-9) / 1e9,
            report.first_layer_seconds,
            report.install_seconds,
        )
