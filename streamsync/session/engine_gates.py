"""An engine's gates as the session uses them: awaited, and in order."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from streamsync.stages.clock import run_timed

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from streamsync.engines.base import Engine
    from streamsync.plan.plan import Plan
    from streamsync.types import Apply, Version


class EngineGates:
    """Calls `engine` in `executor`, whose single thread keeps arm, open, commit and quarantine in
    the order in which they were decided. Everything raises what the engine raises."""

    def __init__(self, engine: Engine, executor: Executor) -> None:
        self._engine = engine
        self._executor = executor

    async def _call(self, function: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._executor, function)

    async def arm(self, version: Version, plan: Plan, apply: Apply, deadline: float) -> None:
        """Closes the gates of every group that the plan fills, between two forwards."""
        filled = {share.groups[b.group] for share in plan.sink_shares for b in share.buckets}
        groups = tuple(group for group in plan.groups if group in filled)
        whole = apply == "version"
        await self._call(lambda: self._engine.arm(version, groups, whole=whole, deadline=deadline))

    async def open(self, version: Version, group: str) -> None:
        """Refreshes what derives from a landed group, then opens its gate. When cancelled it first
        waits for the engine, which may be writing."""

        def finish() -> None:
            self._engine.post_load(group)
            self._engine.open_gate(version, group)

        await run_timed(self._executor, finish)

    async def disarm(self, version: Version) -> None:
        """ABORT: nothing was written, the old version goes on."""
        await self._call(lambda: self._engine.disarm(version))

    async def commit(self, version: Version) -> None:
        """Lets outputs of `version` leave."""
        await self._call(lambda: self._engine.commit(version))

    async def quarantine(self, reason: str) -> None:
        """No output leaves any more."""
        await self._call(lambda: self._engine.quarantine(reason))
