"""The pool: bounds, reserves, fairness, cancelling, and never the same byte twice."""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamsync.errors import ConfigError
from streamsync.runtime.pool import HEADER_BYTES, Lease, Pool, frame_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

KIB = 1 << 10


@contextmanager
def _pool(capacity_bytes: int) -> Iterator[Pool]:
    """A pool that must be whole again at the end."""
    pool = Pool(capacity_bytes, "test")
    yield pool
    for account in list(pool._accounts):
        account.close()
    assert pool.used_bytes == pool.num_outstanding == 0
    assert pool._free == [(0, pool.capacity_bytes)]
    pool.close()


async def _is_waiting(task: asyncio.Future[Lease]) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return not task.done()


@pytest.mark.parametrize(
    ("nbytes", "size"), [(0, 64), (1, 128), (63, 128), (64, 128), (65, 192), (4096, 4160)]
)
def test_a_frame_is_header_payload_and_padding(nbytes: int, size: int) -> None:
    assert frame_bytes(nbytes) == size


async def test_header_payload_and_frame_are_the_same_memory() -> None:
    with _pool(4 * KIB) as pool:
        lease = pool.open_account("peer", 100).try_acquire(100)
        assert lease is not None
        lease.header[:] = b"h" * 64
        lease.array[:] = 1
        lease.payload[1] = 2
        assert bytes(lease.frame) == b"h" * 64 + b"\x01\x02" + b"\x01" * 98
        assert lease.payload.data_ptr() % 64 == 0
        lease.release()


async def test_the_last_of_several_holders_returns_the_memory() -> None:
    with _pool(4 * KIB) as pool:
        lease = pool.open_account("peer", 100).try_acquire(100)
        assert lease is not None
        assert lease.retain(2) is lease
        lease.release()
        lease.release()
        assert pool.num_outstanding == 1
        lease.release()
        assert pool.num_outstanding == 0
        with pytest.raises(AssertionError):
            lease.release()
        with pytest.raises(AssertionError):
            lease.retain()


async def test_the_reserve_is_safe_from_everybody_else() -> None:
    """Case 43: one that takes all it can leaves every other its reserve."""
    with _pool(64 * KIB) as pool:
        greedy, modest = pool.open_account("greedy", KIB), pool.open_account("modest", 8 * KIB)
        taken = []
        while (lease := greedy.try_acquire(KIB)) is not None:
            taken.append(lease)
        reserve = await modest.acquire(8 * KIB)
        reserve.release()
        for lease in taken:
            lease.release()


async def test_a_pool_too_small_says_how_much_it_needs() -> None:
    """Case 28."""
    with _pool(10 * KIB) as pool:
        pool.open_account("first", 8 * KIB)
        needed = 2 * frame_bytes(8 * KIB)
        with pytest.raises(ConfigError, match=f"need at least {needed}"):
            pool.open_account("second", 8 * KIB)
    with _pool(needed) as pool:
        pool.open_account("first", 8 * KIB)
        pool.open_account("second", 8 * KIB)


async def test_what_can_never_be_granted_is_refused_at_once() -> None:
    with _pool(16 * KIB) as pool:
        account = pool.open_account("peer", KIB)
        with pytest.raises(ConfigError, match="pool_bytes=16384"):
            await account.acquire(16 * KIB)


async def test_waiting_is_first_come_first_served_within_an_account() -> None:
    with _pool(8 * KIB) as pool:
        account = pool.open_account("peer", KIB)
        held = [await account.acquire(KIB), await account.acquire(5 * KIB)]
        large = asyncio.ensure_future(account.acquire(4 * KIB))
        assert await _is_waiting(large)
        small = asyncio.ensure_future(account.acquire(64))  # would fit, but came later
        assert await _is_waiting(small)
        assert account.is_starved
        assert pool.statistics().num_waiting == 2
        held[1].release()
        for lease in (await large, await small, held[0]):
            lease.release()
        assert not account.is_starved


async def test_one_account_that_waits_does_not_hold_up_another() -> None:
    """Case 43."""
    with _pool(16 * KIB) as pool:
        slow, quick = pool.open_account("slow", KIB), pool.open_account("quick", KIB)
        held = [await slow.acquire(KIB), await slow.acquire(5 * KIB)]
        waiting = asyncio.ensure_future(slow.acquire(5 * KIB))
        assert await _is_waiting(waiting)
        (await quick.acquire(KIB)).release()
        held.pop().release()
        (await waiting).release()
        held.pop().release()


async def test_a_cancelled_wait_leaves_the_pool_as_it_was() -> None:
    with _pool(8 * KIB) as pool:
        account = pool.open_account("peer", 4 * KIB)
        held = await account.acquire(4 * KIB)
        for granted_meanwhile in (False, True):
            waiting = asyncio.ensure_future(account.acquire(4 * KIB))
            assert await _is_waiting(waiting)
            if granted_meanwhile:
                held.release()  # the lease is granted, but its waiter did not run yet
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert account.num_waiting == 0
        assert pool.num_outstanding == 0


async def test_a_cancelled_wait_no_longer_holds_back_those_behind_it() -> None:
    with _pool(8 * KIB) as pool:
        account = pool.open_account("peer", KIB)
        held = [await account.acquire(KIB), await account.acquire(5 * KIB)]
        large = asyncio.ensure_future(account.acquire(4 * KIB))
        assert await _is_waiting(large)
        small = asyncio.ensure_future(account.acquire(64))
        assert await _is_waiting(small)
        large.cancel()
        async with asyncio.timeout(10):
            (await small).release()
        for lease in held:
            lease.release()


async def test_a_lease_that_outlives_its_account_still_comes_back() -> None:
    with _pool(8 * KIB) as pool:
        account = pool.open_account("peer", KIB)
        leases = [await account.acquire(KIB), await account.acquire(KIB)]
        account.close()
        account.close()
        other = pool.open_account("other", KIB)
        for lease in leases:
            lease.release()
        assert pool.statistics().accounts == {"other": 0}
        other.close()


async def test_closing_with_leases_out_warns() -> None:
    pool = Pool(4 * KIB, "test")
    lease = await pool.open_account("peer", KIB).acquire(KIB)
    with pytest.warns(ResourceWarning, match="1 leases out"):
        pool.close()
    lease.array[:] = 1  # still mapped


async def test_many_rounds_end_where_they_began() -> None:
    """Case 26: whatever order leases come back in, the pool is whole afterwards."""
    dice = random.Random(0)
    with _pool(64 * KIB) as pool:
        account = pool.open_account("peer", 4 * KIB)
        for _ in range(200):
            held = []
            while (lease := account.try_acquire(dice.randrange(4 * KIB))) is not None:
                held.append(lease)
            dice.shuffle(held)
            for lease in held:
                lease.release()
            assert pool.used_bytes == 0
        assert pool.peak_bytes <= pool.capacity_bytes


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3000), st.integers(0, 1 << 30)), max_size=60
    )
)
def test_no_byte_is_ever_lent_twice(steps: list[tuple[int, int, int]]) -> None:
    with _pool(16 * KIB) as pool:
        accounts = [pool.open_account(f"peer {k}", 1000 * k) for k in range(3)]
        held: list[Lease] = []
        for who, nbytes, pick in steps:
            if pick % 3 == 0 and held:
                held.pop(pick % len(held)).release()
                continue
            lease = accounts[who].try_acquire(nbytes)
            if lease is None:
                assert nbytes > 1000 * who or not accounts[who].reserve_free
                continue
            assert lease.offset % HEADER_BYTES == 0
            assert lease.offset + frame_bytes(nbytes) <= pool.capacity_bytes
            held.append(lease)
            spans = sorted((x.offset, x.offset + frame_bytes(x.nbytes)) for x in held)
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        for lease in held:
            lease.release()
