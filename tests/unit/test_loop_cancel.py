"""Tasks that try again after errors end when cancelled, also at the very moment of an error."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from streamsync.control.curve import Curve
from streamsync.control.member import HubMember
from streamsync.errors import PeerLost

if TYPE_CHECKING:
    import pytest


async def failing_group(started: asyncio.Event, may_fail: asyncio.Event) -> None:
    """A TaskGroup whose body has failed and which waits for a child: then a cancel is lost."""

    async def child() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            started.set()
            await may_fail.wait()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(child())
        await asyncio.sleep(0)
        raise PeerLost("the hub went away")


async def test_a_member_that_is_cancelled_while_it_loses_its_hub(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, may_fail = asyncio.Event(), asyncio.Event()
    attempts = 0

    async def attend(_self: HubMember, _first: bool) -> None:
        nonlocal attempts
        attempts += 1
        _self._joined.set()
        try:
            await failing_group(started, may_fail)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    monkeypatch.setattr(HubMember, "_attend", attend)
    curve = Curve("a secret of this job")
    member = HubMember(curve, "tcp://127.0.0.1:9", lambda _: None, 1.0)  # type: ignore[arg-type,return-value]
    task = asyncio.create_task(member.run())
    await started.wait()
    task.cancel()
    await asyncio.sleep(0)
    may_fail.set()
    done, _ = await asyncio.wait({task}, timeout=5)
    task.cancel()
    assert done, "the cancel was lost and the member tries again for ever"
    assert task.cancelled()
    assert attempts == 1
    curve.context.destroy()
