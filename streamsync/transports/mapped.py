"""What `memory` and `shm` share: the sink reads the source's own memory and gives it back."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from streamsync.errors import IntegrityError, PeerLost
from streamsync.runtime.pool import HEADER_BYTES, Lease
from streamsync.transports.base import ReceiveLink

if TYPE_CHECKING:
    from concurrent.futures import Executor

DRAIN_SECONDS = 2.0
"""How long an aborting source waits for its sink to let go of leases; a sink that is well needs one
bucket's load for that."""

_INLINE_BYTES = 64 << 10  # below this, a hop to a thread costs more than the copy


def copy_frame(target: Lease, source: Lease) -> None:
    """Copies header and payload, without the GIL; `target` is at least as large as `source`."""
    nbytes = HEADER_BYTES + source.nbytes
    np.copyto(
        target.region.array[target.offset : target.offset + nbytes],
        source.region.array[source.offset : source.offset + nbytes],
    )


class HeldLeases:
    """A source's leases that a sink may still read, by frame number. On the source's loop only."""

    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}
        self._next = 0
        self._emptied = asyncio.Event()
        self._emptied.set()

    def __len__(self) -> int:
        return len(self._leases)

    def keep(self, lease: Lease) -> int:
        """Retains `lease`; returns the number under which the sink gives it back."""
        number = self._next
        self._next += 1
        self._leases[number] = lease.retain()
        self._emptied.clear()
        return number

    def give_back(self, number: int) -> bool:
        """Releases one; False when it isn't out (never sent, or given back before)."""
        lease = self._leases.pop(number, None)
        if lease is None:
            return False
        lease.release()
        if not self._leases:
            self._emptied.set()
        return True

    def give_back_all(self) -> None:
        """Releases the rest: the sink reads no more."""
        for number in list(self._leases):
            self.give_back(number)

    async def drain(self, seconds: float) -> int:
        """Waits until all came back, at most `seconds`; returns how many are still out."""
        try:
            async with asyncio.timeout(seconds):
                await self._emptied.wait()
        except TimeoutError:
            pass
        return len(self._leases)


class MappedReceiveLink(ReceiveLink):
    """A sink's end whose frames arrive as leases of the source's memory.

    `receive(None, n)` hands such a lease on; `receive(lease, n)` copies it out in `executor` (None:
    the loop's default one) and gives the source's memory back at once. A copy can't be cancelled:
    `abort` waits for it. Leases handed on stay valid after `abort` until they are released.
    """

    in_place = True

    def __init__(self, executor: Executor | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._executor = executor
        self._arrived: deque[Lease] = deque()
        self._lost = ""
        self._aborted = False
        self._wake: asyncio.Future[None] | None = None
        self._copying: asyncio.Future[None] | None = None

    def _arrive(self, frame: Lease) -> None:
        if self._aborted:
            frame.release()
            return
        self._arrived.append(frame)
        self._notify()

    def _lose(self, text: str) -> None:
        self._lost = self._lost or text
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def receive(self, lease: Lease | None, nbytes: int) -> Lease:
        """See `ReceiveLink.receive`. Frames that arrived before the peer went are still given."""
        started = time.monotonic()
        try:
            while not self._arrived:
                if self._lost:
                    raise PeerLost(f"{self._lost}; the frame of {nbytes} bytes never came")
                self._wake = self._loop.create_future()
                await self._wake
        finally:
            self._wake = None
            self.waiting_seconds += time.monotonic() - started
        frame = self._arrived.popleft()
        if frame.nbytes != nbytes:
            frame.release()
            raise IntegrityError(
                f"a frame of {frame.nbytes} bytes came where {nbytes} were planned"
            )
        if lease is None:
            self.wire_bytes += nbytes
            return frame
        assert lease.nbytes >= nbytes, "the lease is smaller than the frame"
        if nbytes <= _INLINE_BYTES:
            copy_frame(lease, frame)
            frame.release()
        else:
            copying = self._loop.run_in_executor(self._executor, copy_frame, lease, frame)
            copying.add_done_callback(lambda _: frame.release())
            self._copying = copying
            await asyncio.shield(copying)
        self.wire_bytes += nbytes
        return lease

    async def abort(self) -> None:
        """See `ReceiveLink.abort`."""
        if not self._aborted:
            self._aborted = True
            while self._arrived:
                self._arrived.popleft().release()
            self._lose("this end aborted the link")
        if self._copying is not None and not self._copying.done():
            await asyncio.wait([self._copying])
