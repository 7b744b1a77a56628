"""Faults happen where the plan says, the same way each time, and never to the source's bytes."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from streamsync.errors import ConfigError, IntegrityError, PeerLost
from streamsync.runtime.header import BucketHeader
from streamsync.transports.faulty import Fault, FaultPlan, FaultyTransport
from streamsync.types import Version
from tests.transport_rig import Rig, expected, filled, fingerprint, rig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from streamsync.runtime.pool import Lease
    from streamsync.transports.base import ReceiveLink, SendLink

pytestmark = pytest.mark.parametrize("name", ["memory", "tcp", "shm"])

NBYTES = 1000


@asynccontextmanager
async def _faulty(
    name: str, *, source: list[Fault] | None = None, sink: list[Fault] | None = None, seed: int = 0
) -> AsyncIterator[tuple[Rig, FaultPlan, FaultPlan]]:
    plans = FaultPlan(source or [], seed), FaultPlan(sink or [], seed)
    async with rig(name, 100_000) as ends:
        ends.source = FaultyTransport(ends.source, source_plan=plans[0])
        ends.sink = FaultyTransport(ends.sink, sink_plan=plans[1])
        yield ends, *plans
        await ends.sink.close()
        await ends.source.close()


async def _send(ends: Rig, link: SendLink, count: int) -> list[Lease]:
    """Sends and keeps the source's leases, to look at them afterwards."""
    kept = []
    for seed in range(count):
        lease = await filled(ends.source_account, NBYTES, seed)
        kept.append(lease)
        await link.send(lease)
    await link.flush()
    return kept


async def _receive(ends: Rig, link: ReceiveLink, count: int) -> list[str]:
    found = []
    for _ in range(count):
        lease = await ends.sink_account.acquire(NBYTES)
        try:
            async with asyncio.timeout(20):
                await link.receive(lease, NBYTES)
            found.append(fingerprint(lease))
        finally:
            lease.release()
    return found


_WHOLE = [expected(NBYTES, seed) for seed in range(6)]


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        ("drop", [0, 1, 3, 4, 5]),
        ("duplicate", [0, 1, 2, 2, 3, 4, 5]),
        ("reorder", [0, 1, 3, 2, 4, 5]),
        ("delay", [0, 1, 2, 3, 4, 5]),
    ],
)
async def test_frames_arrive_as_the_plan_has_it(name: str, kind: str, order: list[int]) -> None:
    async with _faulty(name, source=[Fault(kind=kind, frame=2)]) as (ends, plan, _):  # type: ignore[arg-type]
        send_link, receive_link, _ = await ends.link()
        kept = await _send(ends, send_link, 6)
        assert await _receive(ends, receive_link, len(order)) == [_WHOLE[k] for k in order]
        assert plan.happened == [(0, 2, kind)]
        for lease in kept:
            lease.release()


@pytest.mark.parametrize("end", ["source", "sink"])
async def test_one_bit_of_one_frame_flips_and_the_source_stays_whole(name: str, end: str) -> None:
    """Case 42: what a checker must find."""
    async with _faulty(name, **{end: [Fault(kind="corrupt", frame=2)]}) as (ends, _, _):  # type: ignore[arg-type]
        send_link, receive_link, _ = await ends.link()
        kept = await _send(ends, send_link, 6)
        found = await _receive(ends, receive_link, 6)
        assert [a == b for a, b in zip(found, _WHOLE, strict=True)] == [1, 1, 0, 1, 1, 1]
        assert [fingerprint(lease) for lease in kept] == _WHOLE
        for lease in kept:
            lease.release()


@pytest.mark.parametrize("seed", range(5))
async def test_a_damaged_header_is_refused_by_its_reader(name: str, seed: int) -> None:
    """Case 42."""
    async with _faulty(name, source=[Fault(kind="corrupt_header", frame=0)], seed=seed) as (
        ends,
        _,
        _,
    ):
        send_link, receive_link, _ = await ends.link()
        lease = await filled(ends.source_account, NBYTES, 0)
        header = BucketHeader(Version(1, 2), 3, 4, 5, NBYTES, 6)
        header.write(lease.header)
        await send_link.send(lease)
        assert BucketHeader.read(lease.header) == header
        lease.release()
        own = await ends.sink_account.acquire(NBYTES)

        async def receive() -> None:
            # tcp itself refuses a damaged length
            BucketHeader.read((await receive_link.receive(own, NBYTES)).header)

        with pytest.raises(IntegrityError):
            await receive()
        await receive_link.abort()
        own.release()


@pytest.mark.parametrize("end", ["source", "sink"])
async def test_a_disconnect_is_lost_at_both_ends(name: str, end: str) -> None:
    async with _faulty(name, **{end: [Fault(kind="disconnect", frame=3)]}) as (ends, _, _):  # type: ignore[arg-type]
        send_link, receive_link, _ = await ends.link()

        async def give() -> None:
            for seed in range(100):
                lease = await filled(ends.source_account, NBYTES, seed)
                try:
                    await send_link.send(lease)
                    await send_link.flush()
                finally:
                    lease.release()
                await asyncio.sleep(0.001)

        async with asyncio.timeout(20):
            giving = asyncio.ensure_future(give())
            with pytest.raises(PeerLost):
                await _receive(ends, receive_link, 100)
            with pytest.raises(PeerLost):
                await giving
        await receive_link.abort()
        await send_link.abort()
        await ends.settled()


@pytest.mark.parametrize("end", ["source", "sink"])
async def test_a_stall_lasts_until_the_callers_deadline(name: str, end: str) -> None:
    async with _faulty(name, **{end: [Fault(kind="stall", frame=0)]}) as (ends, _, _):  # type: ignore[arg-type]
        send_link, receive_link, _ = await ends.link()
        lease = await filled(ends.source_account, NBYTES, 0)
        own = await ends.sink_account.acquire(NBYTES)
        stalled = send_link.send(lease) if end == "source" else receive_link.receive(own, NBYTES)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stalled, 0.05)
        await receive_link.abort()
        await send_link.abort()
        lease.release()
        own.release()


async def test_equal_seeds_make_equal_faults_and_others_make_others(name: str) -> None:
    happened = []
    for seed in (1, 1, 2):
        async with _faulty(name, source=[Fault(kind="drop", probability=0.4)], seed=seed) as (
            ends,
            plan,
            _,
        ):
            send_link, _, _ = await ends.link()
            for lease in [await _one(ends, send_link, k) for k in range(4)]:
                lease.release()
            happened.append(plan.happened)
    assert happened[0] == happened[1]
    assert len({str(x) for x in happened}) == 2


async def _one(ends: Rig, link: SendLink, seed: int) -> Lease:
    lease = await filled(ends.source_account, NBYTES, seed)
    await link.send(lease)
    return lease


async def test_what_only_a_source_can_do_is_refused_at_a_sink(name: str) -> None:
    async with rig(name, 1000) as ends:
        with pytest.raises(ConfigError, match="source_plan"):
            FaultyTransport(ends.sink, sink_plan=FaultPlan([Fault(kind="drop")]))
    with pytest.raises(ConfigError):
        Fault(kind="drop", probability=2)
