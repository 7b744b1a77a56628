"""How a sink rank comes to have a plan and its sessions, and keeps both up to date."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from streamsync.control import messages as m
from streamsync.control.directory import question_digest
from streamsync.control.found import decode_found
from streamsync.errors import ConfigError, ControlError, PlanError, StreamsyncError
from streamsync.plan.planner import make_plan
from streamsync.plan.question import question
from streamsync.runtime.loop import check_cancelled
from streamsync.runtime.pool import frame_bytes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from concurrent.futures import Executor

    from streamsync.config import Config
    from streamsync.control.found import Sought
    from streamsync.control.member import HubMember
    from streamsync.layout.outline import Record
    from streamsync.layout.region import Layout
    from streamsync.plan.plan import Plan, Rules
    from streamsync.runtime.pool import Pool
    from streamsync.session.subscription import Subscriptions
    from streamsync.types import Apply

_log = logging.getLogger("streamsync.sink")

T = TypeVar("T")

_FIRST_PAUSE_SECONDS = 0.5
_LAST_PAUSE_SECONDS = 5.0


class Enrolment:
    """Plans with the sources that the hub knows and subscribes to them, again after every change.

    `at_rest()` returns when no version is under way (a plan is frozen while one is); `enrolled()`
    is called whenever all sessions stand; `failed(error)` when they can't. `again()` asks for
    another look. `slot` is this replica's place among all, (0, 0) before the hub gave one. Loop
    thread only.
    """

    def __init__(
        self,
        sink: str,
        replica: str,
        layout: Layout,
        rules: Rules,
        apply: Apply,
        config: Config,
        pool: Pool,
        member: HubMember,
        subscriptions: Subscriptions,
        executor: Executor,
        *,
        has_coordinator: Callable[[], bool],
        at_rest: Callable[[], Awaitable[None]],
        enrolled: Callable[[Plan], None],
        failed: Callable[[StreamsyncError], None],
    ) -> None:
        self._sink = sink
        self._replica = replica
        self._layout = layout
        self._rules = rules
        self._apply = apply
        self._config = config
        self._pool = pool
        self._member = member
        self._subscriptions = subscriptions
        self._executor = executor
        self._has_coordinator = has_coordinator
        self._at_rest = at_rest
        self._enrolled = enrolled
        self._failed = failed
        self._dirty = asyncio.Event()
        self._dirty.set()
        self._question: tuple[Record, ...] | None = None
        self._question_digest = ""
        self._stamp = ""
        self._sought: Sought | None = None
        self._planned_for: bytes | None = None
        self.slot = (0, 0)
        self.plan: Plan | None = None

    def again(self) -> None:
        """Membership changed, or a session was lost."""
        self._dirty.set()

    async def run(self) -> None:
        """Keeps the rank enrolled until cancelled."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            check_cancelled()
            await self._dirty.wait()
            await self._at_rest()
            self._dirty.clear()
            try:
                await self._enrol()
                pause = _FIRST_PAUSE_SECONDS
            except (PlanError, ConfigError) as error:
                # Trying again would not help: the next change of membership may.
                self._failed(error.at(rank=self._sink))
                self._member.tell(
                    m.PlanRefused(sink=self._sink, replica=self._replica, text=str(error))
                )
            except StreamsyncError as error:
                _log.warning("%s can't subscribe yet: %s", self._sink, error)
                self._failed(error)
                await self._pause(pause)
                pause = min(2 * pause, _LAST_PAUSE_SECONDS)
                self._dirty.set()

    async def _pause(self, seconds: float) -> None:
        """Longer each time, so that thousands who miss one source don't drown the hub; over at once
        when that says that something changed."""
        try:
            async with asyncio.timeout(seconds):
                await self._dirty.wait()
        except TimeoutError:
            pass

    async def _enrol(self) -> None:
        if not self._has_coordinator():
            raise ControlError("this replica's coordinator is not reachable yet", rank=self._sink)
        found = await self._ask()
        if found.waiting_for:
            _log.info("%s waits: %s", self._sink, found.waiting_for)
            self._failed(ControlError(f"no sources yet: {found.waiting_for}", peer="hub"))
            return
        if found.found:
            self._sought = await self._run(partial(decode_found, found.found))
            self._stamp = found.stamp
        if self._sought is None:
            raise ControlError("the hub sent nothing of the sources", peer="hub")
        self.slot = found.slot
        # A slot that moved is no reason to plan: it levels the sources, and giving up sessions for
        # it could meet a version that was just announced. It counts from the next plan on.
        planned_for = self._sought.encoded_holders
        if self.plan is None or self._planned_for != planned_for:
            self._planned_for = None
            self.plan = await self._run(
                partial(
                    make_plan,
                    sink=self._sink,
                    sink_layout=self._layout,
                    holders=self._sought.holders,
                    rules=self._rules,
                    bucket_bytes=self._config.bucket_bytes,
                    slot=found.slot,
                    membership_epoch=found.membership_epoch,
                )
            )
            self._planned_for = planned_for
            for alias, name in self.plan.shadowed.items():
                _log.warning(
                    "%s ties %s, which the sources hold apart: it takes the values of %s",
                    self._sink,
                    alias,
                    name,
                )
        await self._at_rest()  # again: a version may have begun meanwhile
        await self._subscriptions.use_plan(self.plan, self._sought.sources)
        await self._subscriptions.connect()
        self._check_pool()
        self._enrolled(self.plan)

    async def _ask(self) -> m.Sources:
        if self._question is None:
            self._question = await self._run(partial(question, self._layout, self._rules))
            self._question_digest = question_digest(self._question)
        ask = m.AskSources(
            sink=self._sink, question_digest=self._question_digest, stamp=self._stamp
        )
        found = await self._member.ask(ask, m.Sources)
        if found.wants_question:
            ask = msgspec.structs.replace(ask, question=self._question)
            found = await self._member.ask(ask, m.Sources)
        return found

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _check_pool(self) -> None:
        """`apply="version"` holds a whole version in host leases before anything is written."""
        if self._apply != "version":
            return
        needed = sum(
            frame_bytes(bucket.nbytes)
            for peer in self._subscriptions.peers.values()
            if peer.account is not None
            for bucket in peer.share.buckets
        )
        if needed > self._pool.capacity_bytes:
            raise ConfigError(
                f'apply="version" needs the whole share in host memory: pool_bytes must be at '
                f"least {needed}, it is {self._pool.capacity_bytes}",
                rank=self._sink,
            )
