"""How a sink rank comes to have a plan and its sessions, and keeps both up to date."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from streamsync.control import messages as m
from streamsync.errors import ConfigError, ControlError, PlanError, StreamsyncError
from streamsync.plan.planner import make_plan
from streamsync.runtime.loop import check_cancelled
from streamsync.runtime.pool import frame_bytes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from concurrent.futures import Executor

    from streamsync.config import Config
    from streamsync.control.member import HubMember
    from streamsync.layout.region import Layout
    from streamsync.plan.plan import Plan, Rules
    from streamsync.runtime.pool import Pool
    from streamsync.session.subscription import Subscriptions
    from streamsync.types import Apply

_log = logging.getLogger("streamsync.sink")

_AGAIN_SECONDS = 0.5


class Enrolment:
    """Plans with the sources that the hub knows and subscribes to them, again after every change.

    `at_rest()` returns when no sync runs (a plan is frozen while one does); `enrolled()` is called
    whenever all sessions stand; `failed(error)` when they can't. `again()` asks for another look.
    Loop thread only.
    """

    def __init__(
        self,
        sink: str,
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
        self._found: tuple[m.SourceInfo, ...] = ()
        self.plan: Plan | None = None

    def again(self) -> None:
        """Membership changed, or a session was lost."""
        self._dirty.set()

    async def run(self) -> None:
        """Keeps the rank enrolled until cancelled."""
        while True:
            check_cancelled()
            await self._dirty.wait()
            await self._at_rest()
            self._dirty.clear()
            try:
                await self._enrol()
            except (PlanError, ConfigError) as error:
                # Trying again would not help: the next change of membership may.
                self._failed(error.at(rank=self._sink))
                await self._subscriptions.refuse(self._found, str(error))
            except StreamsyncError as error:
                _log.warning("%s can't subscribe yet: %s", self._sink, error)
                self._failed(error)
                await asyncio.sleep(_AGAIN_SECONDS)
                self._dirty.set()

    async def _enrol(self) -> None:
        if not self._has_coordinator():
            raise ControlError("this replica's coordinator is not reachable yet", rank=self._sink)
        found = await self._member.ask(m.AskSources(sink=self._sink), m.Sources)
        self._found = found.sources
        if not found.sources:
            _log.info("%s waits: %s", self._sink, found.waiting_for)
            self._failed(ControlError(f"no sources yet: {found.waiting_for}", peer="hub"))
            return
        if self.plan is None or not self._subscriptions.is_planned_for(found.sources):
            await self._subscriptions.drop_all("the plan changes")
            self.plan = await self._make_plan(found)
            for alias, name in self.plan.shadowed.items():
                _log.warning(
                    "%s ties %s, which the sources hold apart: it takes the values of %s",
                    self._sink,
                    alias,
                    name,
                )
            self._subscriptions.use_plan(self.plan, found.sources)
        await self._subscriptions.connect()
        self._check_pool()
        self._enrolled(self.plan)

    async def _make_plan(self, found: m.Sources) -> Plan:
        return await asyncio.get_running_loop().run_in_executor(
            self._executor,
            partial(
                make_plan,
                sink=self._sink,
                sink_layout=self._layout,
                sources={source.name: source.layout for source in found.sources},
                rules=self._rules,
                bucket_bytes=self._config.bucket_bytes,
                membership_epoch=found.membership_epoch,
            ),
        )

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
