"""An engine's gates as the session uses them: awaited, in order, and with a deadline."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from streamsync.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamsync.engines.base import Engine
    from streamsync.layout.landing import Landing
    from streamsync.plan.plan import Plan
    from streamsync.types import Apply, Version


class EngineGates:
    """Calls `engine` in one thread, which keeps arm, open, commit and quarantine in the order in
    which they were decided.

    Everything raises what the engine raises, or `EngineError` when the engine does not return
    within `call_seconds`. Its thread can't be stopped then: it is left alone, and later calls get a
    new one, so that a quarantine still reaches the engine.
    """

    def __init__(self, engine: Engine, name: str, gate_seconds: float, call_seconds: float) -> None:
        self._engine = engine
        self._name = name
        self._gate_seconds = gate_seconds
        self._call_seconds = call_seconds
        self._executor = self._new_thread()

    def _new_thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix=f"streamsync-{self._name}-engine")

    async def _call(self, what: str, function: Callable[[], None], seconds: float) -> None:
        """When cancelled it first waits for the engine, which may be writing."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, function)
        try:
            done, _ = await asyncio.wait({future}, timeout=seconds)
        except asyncio.CancelledError:
            done, _ = await asyncio.wait({future}, timeout=seconds)
            if not done:
                self._leave_alone()
            elif not future.cancelled():
                future.exception()
            raise
        if not done:
            self._leave_alone()
            raise EngineError(f"the engine did not return from {what} within {seconds:g} s")
        future.result()

    def _leave_alone(self) -> None:
        self._executor.shutdown(wait=False)
        self._executor = self._new_thread()

    async def arm(self, version: Version, plan: Plan, apply: Apply) -> None:
        """Closes the gates of every group that the plan fills, between two forwards."""
        filled = {share.groups[b.group] for share in plan.shares for b in share.buckets}
        groups = tuple(group for group in plan.groups if group in filled)
        whole, deadline = apply == "version", self._gate_seconds
        await self._call(
            "arm",
            lambda: self._engine.arm(version, groups, whole=whole, deadline=deadline),
            deadline + self._call_seconds,
        )

    async def land(self, _version: Version, landing: Landing) -> None:
        """Makes one landing."""
        what = f"the landing of {', '.join(sorted(landing.groups))}"
        await self._call(what, landing.land, self._call_seconds)

    async def open(self, version: Version, group: str) -> None:
        """Refreshes what derives from a landed group, then opens its gate."""

        def finish() -> None:
            self._engine.post_load(group)
            self._engine.open_gate(version, group)

        await self._call(f"post_load of {group}", finish, self._call_seconds)

    async def disarm(self, version: Version) -> None:
        """ABORT: nothing was written, the old version goes on."""
        await self._call("disarm", lambda: self._engine.disarm(version), self._call_seconds)

    async def commit(self, version: Version) -> None:
        """Lets outputs of `version` leave."""
        await self._call("commit", lambda: self._engine.commit(version), self._call_seconds)

    async def quarantine(self, reason: str) -> None:
        """No output leaves any more."""
        await self._call("quarantine", lambda: self._engine.quarantine(reason), self._call_seconds)

    def close(self) -> None:
        """Ends the thread once it has done what was given to it."""
        self._executor.shutdown(wait=False)
