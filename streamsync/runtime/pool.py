"""The pool of leases: the bounded host memory whose scarcity is the pipeline's backpressure.

A frame is what travels: 64 header bytes, then the payload. Memory comes from one `Region`, first
fit in address order. Each account (a peer, or a set of peers that share buckets) owns a reserve
carved out for it alone, as large as its largest bucket, so that no other account can starve it;
beyond the reserve it takes from the common space up to its maximum.

Everything here runs on the loop's thread; nothing blocks. Cancelling a waiting `acquire` leaves
the pool as it was.
"""

from __future__ import annotations

import asyncio
import bisect
import warnings
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streamsync.errors import ConfigError, TransportError
from streamsync.runtime.region import Region

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch

HEADER_BYTES = 64
"""Room for a bucket's header in front of every payload; also the alignment of frames."""


def frame_bytes(nbytes: int) -> int:
    """Pool bytes that a payload of `nbytes` takes: header, payload, padding to 64."""
    return HEADER_BYTES + -(-nbytes // HEADER_BYTES) * HEADER_BYTES


class Lease:
    """A frame on loan: reference-counted memory of `nbytes` payload bytes behind a header.

    Starts with one reference. Each holder calls `release` once; `retain` adds a holder. When the
    last one releases, `on_release` returns the memory to its owner.
    """

    __slots__ = ("_on_release", "_references", "nbytes", "offset", "region")

    def __init__(
        self, region: Region, offset: int, nbytes: int, on_release: Callable[[Lease], None]
    ) -> None:
        self.region = region
        self.offset = offset
        self.nbytes = nbytes
        self._on_release = on_release
        self._references = 1

    @property
    def frame(self) -> memoryview:
        """Header and payload, writable, in one run."""
        return self.region.memory[self.offset : self.offset + HEADER_BYTES + self.nbytes]

    @property
    def header(self) -> memoryview:
        """The 64 header bytes, writable."""
        return self.region.memory[self.offset : self.offset + HEADER_BYTES]

    @property
    def payload(self) -> torch.Tensor:
        """The payload as a uint8 tensor `[nbytes]`, 64-byte aligned."""
        start = self.offset + HEADER_BYTES
        return self.region.tensor[start : start + self.nbytes]

    @property
    def array(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """The payload as a uint8 array `[nbytes]`."""
        start = self.offset + HEADER_BYTES
        return self.region.array[start : start + self.nbytes]

    def retain(self, num_holders: int = 1) -> Lease:
        """Adds holders; returns the lease."""
        assert self._references > 0, "retained after its last release"
        self._references += num_holders
        return self

    def release(self) -> None:
        """Gives one reference back."""
        assert self._references > 0, "released more often than held"
        self._references -= 1
        if self._references == 0:
            self._on_release(self)


@dataclass(slots=True)
class _Waiter:
    account: Account
    nbytes: int
    future: asyncio.Future[Lease]


@dataclass(slots=True, eq=False)
class Account:
    """One peer's (or peer set's) right to memory of a pool. Made by `Pool.open_account`."""

    pool: Pool
    name: str
    minimum_bytes: int
    demand_bytes: int
    reserve_offset: int
    reserve_free: bool = True
    used_bytes: int = 0
    num_waiting: int = 0

    async def acquire(self, nbytes: int) -> Lease:
        """A lease for `nbytes` payload bytes; waits for one, first come first served.

        Raises `ConfigError` at once when the pool could never grant it.
        """
        return await self.pool.acquire(self, nbytes)

    def try_acquire(self, nbytes: int) -> Lease | None:
        """A lease now, or None when this account would have to wait."""
        return self.pool.try_acquire(self, nbytes)

    @property
    def is_starved(self) -> bool:
        """Whether someone waits for a lease of this account."""
        return self.num_waiting > 0

    def close(self) -> None:
        """Returns the reserve; leases still out return to the common space."""
        self.pool.close_account(self)


@dataclass(slots=True)
class PoolStatistics:
    """`frame` bytes in use now, at most so far, in all; and how many acquires wait."""

    used_bytes: int
    peak_bytes: int
    capacity_bytes: int
    num_waiting: int
    accounts: dict[str, int] = field(default_factory=dict)


class Pool:
    """`capacity_bytes` of host memory in one shared-memory region, handed out as leases."""

    def __init__(self, capacity_bytes: int, name: str) -> None:
        self.name = name
        self.capacity_bytes = -(-capacity_bytes // HEADER_BYTES) * HEADER_BYTES
        self.region = Region.create(self.capacity_bytes, name)
        self._free: list[tuple[int, int]] = [(0, self.capacity_bytes)]
        self._accounts: list[Account] = []
        self._waiters: deque[_Waiter] = deque()
        self.used_bytes = 0
        self.peak_bytes = 0
        self.num_outstanding = 0

    def open_account(
        self, name: str, minimum_bytes: int, demand_bytes: int | None = None
    ) -> Account:
        """Reserves room for one payload of `minimum_bytes`; raises `ConfigError` with the number
        needed when the pool never can, `TransportError` while leases are in the way.

        `demand_bytes` is what the account could use at most, in frame bytes; None means all it can
        get. An account may hold an equal part of the pool, and beyond that what the others could
        never claim.
        """
        size = frame_bytes(minimum_bytes)
        offset = self._carve(size)
        if offset is None:
            needed = size + sum(frame_bytes(a.minimum_bytes) for a in self._accounts)
            if needed <= self.capacity_bytes:
                raise TransportError(
                    f"no room for a bucket of {minimum_bytes} bytes while {self.num_outstanding} "
                    "leases are out: try again after the sync that runs",
                    peer=name,
                )
            raise ConfigError(
                f"pool_bytes={self.capacity_bytes} is too small: {len(self._accounts) + 1} peers "
                f"with buckets of {minimum_bytes} bytes need at least {needed}; raise pool_bytes "
                "or lower bucket_bytes",
                peer=name,
            )
        demand = self.capacity_bytes if demand_bytes is None else demand_bytes
        account = Account(self, name, minimum_bytes, demand, offset)
        self._accounts.append(account)
        return account

    def close_account(self, account: Account) -> None:
        """See `Account.close`."""
        if account not in self._accounts:
            return
        self._accounts.remove(account)
        if account.reserve_free:
            self._give_back(account.reserve_offset, frame_bytes(account.minimum_bytes))
        account.reserve_offset = -1
        self._serve()

    def limit_bytes(self, account: Account) -> int:
        """How many frame bytes `account` may hold at once."""
        equal = self.capacity_bytes // max(1, len(self._accounts))
        others = sum(min(a.demand_bytes, equal) for a in self._accounts if a is not account)
        return max(equal, self.capacity_bytes - others)

    def try_acquire(self, account: Account, nbytes: int) -> Lease | None:
        """See `Account.try_acquire`."""
        size = frame_bytes(nbytes)
        if nbytes <= account.minimum_bytes and account.reserve_free and account.reserve_offset >= 0:
            account.reserve_free = False
            return self._lend(account, account.reserve_offset, nbytes, from_reserve=True)
        if account.used_bytes + size > self.limit_bytes(account):
            return None
        offset = self._carve(size)
        return None if offset is None else self._lend(account, offset, nbytes, from_reserve=False)

    async def acquire(self, account: Account, nbytes: int) -> Lease:
        """See `Account.acquire`."""
        if frame_bytes(nbytes) > self.capacity_bytes or (
            nbytes > account.minimum_bytes and frame_bytes(nbytes) > self.limit_bytes(account)
        ):
            raise ConfigError(
                f"a lease of {nbytes} bytes can never fit: pool_bytes={self.capacity_bytes}, "
                f"its account's limit is {self.limit_bytes(account)}",
                peer=account.name,
            )
        if not any(w.account is account for w in self._waiters):
            lease = self.try_acquire(account, nbytes)
            if lease is not None:
                return lease
        waiter = _Waiter(account, nbytes, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        account.num_waiting += 1
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled():
                waiter.future.result().release()
            raise
        finally:
            account.num_waiting -= 1
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._serve()  # those that waited behind it may fit

    def _lend(self, account: Account, offset: int, nbytes: int, *, from_reserve: bool) -> Lease:
        size = frame_bytes(nbytes)
        account.used_bytes += size
        self.used_bytes += size
        self.num_outstanding += 1
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

        def back(lease: Lease) -> None:
            account.used_bytes -= size
            self.used_bytes -= size
            self.num_outstanding -= 1
            if not from_reserve:
                self._give_back(offset, size)
            elif account.reserve_offset == offset:
                account.reserve_free = True
            else:  # the account was closed meanwhile
                self._give_back(offset, frame_bytes(account.minimum_bytes))
            self._serve()

        return Lease(self.region, offset, nbytes, back)

    def _serve(self) -> None:
        """Grants waiting acquires in order; one that does not fit holds back only those of its own
        account. It can't starve for that: its reserve is large enough and nobody else's."""
        blocked: set[int] = set()
        for waiter in list(self._waiters):
            if waiter.future.done() or id(waiter.account) in blocked:
                continue
            lease = self.try_acquire(waiter.account, waiter.nbytes)
            if lease is None:
                blocked.add(id(waiter.account))
                continue
            self._waiters.remove(waiter)
            waiter.future.set_result(lease)

    def _carve(self, size: int) -> int | None:
        for index, (offset, length) in enumerate(self._free):
            if length >= size:
                if length == size:
                    del self._free[index]
                else:
                    self._free[index] = (offset + size, length - size)
                return offset
        return None

    def _give_back(self, offset: int, size: int) -> None:
        index = bisect.bisect_left(self._free, (offset, 0))
        if index < len(self._free) and offset + size == self._free[index][0]:
            size += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == offset:
            index -= 1
            previous = self._free.pop(index)
            offset, size = previous[0], previous[1] + size
        self._free.insert(index, (offset, size))

    def statistics(self) -> PoolStatistics:
        """A snapshot for metrics."""
        return PoolStatistics(
            self.used_bytes,
            self.peak_bytes,
            self.capacity_bytes,
            len(self._waiters),
            {a.name: a.used_bytes for a in self._accounts},
        )

    def close(self) -> None:
        """Closes the region. Leases still out are a bug of the caller, reported as a warning."""
        if self.num_outstanding:
            warnings.warn(
                f"pool {self.name} closed with {self.num_outstanding} leases out",
                ResourceWarning,
                stacklevel=2,
            )
        self.region.close()
