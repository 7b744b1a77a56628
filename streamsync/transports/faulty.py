"""`faulty`: any transport, with faults that happen the same way each time.

For tests of streamsync and of set-ups that use it: wrap the source's transport, the sink's or both.
A frame is damaged in a copy, so the source's lease and the other sinks that share it stay whole.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from streamsync.errors import ConfigError, PeerLost
from streamsync.runtime.pool import HEADER_BYTES, Lease, Pool
from streamsync.transports.base import Offer, ReceiveLink, SendLink, Transport

if TYPE_CHECKING:
    from collections.abc import Sequence

FaultKind = Literal[
    "delay", "drop", "corrupt", "corrupt_header", "disconnect", "stall", "duplicate", "reorder"
]
_DAMAGE: tuple[FaultKind, ...] = ("corrupt", "corrupt_header")
_AT_THE_SINK: tuple[FaultKind, ...] = ("delay", "corrupt", "corrupt_header", "disconnect", "stall")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong, and when: at frame `frame` of every link (counted from 0, over all syncs),
    or, with None, at each frame with `probability`."""

    kind: FaultKind
    """`corrupt` flips one bit of the payload (of the header if it is empty), `reorder` swaps a
    frame with the next one, `stall` never returns, `disconnect` aborts the link instead."""
    frame: int | None = None
    probability: float = 1.0
    seconds: float = 0.05
    """How long a `delay` takes."""

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1 or self.seconds < 0 or (self.frame or 0) < 0:
            raise ConfigError(f"a fault that can't be: {self}")


@dataclass(slots=True)
class FaultPlan:
    """Faults of both ends. Equal seeds give equal faults at equal frames of the n-th link."""

    faults: Sequence[Fault]
    seed: int = 0
    happened: list[tuple[int, int, FaultKind]] = field(default_factory=list)
    """What happened so far: number of the link, number of the frame, kind."""
    num_links: int = 0

    def open_link(self) -> _Dice:
        """The faults of one more link."""
        self.num_links += 1
        return _Dice(self, self.num_links - 1)


class _Dice:
    """Decides for the frames of one link, in order."""

    def __init__(self, plan: FaultPlan, link: int) -> None:
        self._plan = plan
        self._link = link
        self._random = random.Random(f"{plan.seed}/{link}")
        self._frame = -1

    def next_frame(self) -> list[Fault]:
        self._frame += 1
        # Every fault is rolled for every frame, so that one more fault changes none of the others.
        rolled = [(fault, self._random.random()) for fault in self._plan.faults]
        struck = [
            fault
            for fault, roll in rolled
            if fault.frame in (None, self._frame) and roll < fault.probability
        ]
        self._plan.happened += [(self._link, self._frame, fault.kind) for fault in struck]
        return struck

    def flip(self, frame: memoryview, *, header: bool) -> None:
        """Flips one bit of the payload or, if that is empty or `header`, of the header."""
        if header or len(frame) == HEADER_BYTES:
            byte = self._random.randrange(HEADER_BYTES - 4)  # the last four bytes mean nothing
        else:
            byte = self._random.randrange(HEADER_BYTES, len(frame))
        frame[byte] ^= 1 << self._random.randrange(8)


class FaultySendLink(SendLink):
    """The source's end."""

    def __init__(self, inner: SendLink, dice: _Dice, pool: Pool, *, damages: bool) -> None:
        self._inner = inner
        self._dice = dice
        self._account = pool.open_account("faulty", 0, 0) if damages else None
        self._held_back: Lease | None = None

    @property
    def wire_bytes(self) -> int:  # type: ignore[override]
        """What the wrapped link counts: dropped frames don't, duplicates do."""
        return self._inner.wire_bytes

    async def send(self, lease: Lease) -> None:
        """See `SendLink.send`, with what the plan has for this frame."""
        kinds = set()
        for fault in self._dice.next_frame():
            kinds.add(fault.kind)
            await _common(fault, self._inner)
        if "drop" in kinds:
            return
        frame = lease.retain()
        if kinds.intersection(_DAMAGE):
            frame = await self._damaged(frame, header="corrupt_header" in kinds)
        if "reorder" in kinds and self._held_back is None:
            self._held_back = frame
            return
        try:
            await self._inner.send(frame)
            if "duplicate" in kinds:
                await self._inner.send(frame)
        finally:
            frame.release()
        await self._let_go()

    async def _damaged(self, lease: Lease, *, header: bool) -> Lease:
        """A damaged copy in memory of the same pool, since shm can hand out no other. Waits for
        room; takes over the reference to `lease`."""
        assert self._account is not None, "a plan that damages has an account"
        try:
            copy = await self._account.acquire(lease.nbytes)
            copy.frame[:] = lease.frame
        finally:
            lease.release()
        self._dice.flip(copy.frame, header=header)
        return copy

    async def _let_go(self) -> None:
        frame, self._held_back = self._held_back, None
        if frame is not None:
            try:
                await self._inner.send(frame)
            finally:
                frame.release()

    async def flush(self) -> None:
        """See `SendLink.flush`; a frame held back with no successor leaves now."""
        await self._let_go()
        await self._inner.flush()

    async def abort(self) -> None:
        """See `SendLink.abort`."""
        if self._account is not None:
            self._account.close()
        if self._held_back is not None:
            self._held_back.release()
            self._held_back = None
        await self._inner.abort()


class FaultyReceiveLink(ReceiveLink):
    """The sink's end. Frames can't be dropped, doubled or swapped here: those are the source's."""

    def __init__(self, inner: ReceiveLink, dice: _Dice) -> None:
        self._inner = inner
        self._dice = dice
        # A frame that is the source's own memory must not be damaged there.
        self.in_place = False

    @property
    def wire_bytes(self) -> int:  # type: ignore[override]
        """What the wrapped link counts."""
        return self._inner.wire_bytes

    @property
    def waiting_seconds(self) -> float:  # type: ignore[override]
        """What the wrapped link counts."""
        return self._inner.waiting_seconds

    async def receive(self, lease: Lease | None, nbytes: int) -> Lease:
        """See `ReceiveLink.receive`, with what the plan has for this frame."""
        assert lease is not None, "faulty receives into the sink's own leases"
        faults = self._dice.next_frame()
        for fault in faults:
            await _common(fault, self._inner)
        await self._inner.receive(lease, nbytes)
        for fault in faults:
            if fault.kind in _DAMAGE:
                self._dice.flip(
                    lease.frame[: HEADER_BYTES + nbytes], header=fault.kind == "corrupt_header"
                )
        return lease

    async def abort(self) -> None:
        """See `ReceiveLink.abort`."""
        await self._inner.abort()


async def _common(fault: Fault, link: SendLink | ReceiveLink) -> None:
    """The faults that are the same at both ends."""
    if fault.kind == "delay":
        await asyncio.sleep(fault.seconds)
    elif fault.kind == "stall":
        await asyncio.get_running_loop().create_future()
    elif fault.kind == "disconnect":
        await link.abort()
        raise PeerLost("disconnected on purpose by a fault plan")


class FaultyTransport(Transport):
    """`inner` with the faults of `source_plan` on its send links and of `sink_plan` on its receive
    links. Calls itself by the name of `inner`, so that nothing else changes."""

    name: ClassVar[str] = "faulty"

    def __init__(
        self,
        inner: Transport,
        *,
        source_plan: FaultPlan | None = None,
        sink_plan: FaultPlan | None = None,
    ) -> None:
        for fault in sink_plan.faults if sink_plan is not None else ():
            if fault.kind not in _AT_THE_SINK:
                raise ConfigError(f"a {fault.kind} is a fault of the source: put it in source_plan")
        self.name = inner.name  # type: ignore[misc]
        self._inner = inner
        self._source_plan = source_plan
        self._sink_plan = sink_plan
        self._pools: dict[bytes, Pool] = {}
        self._send_links: list[FaultySendLink] = []

    @property
    def num_withheld(self) -> int:  # type: ignore[override]
        """What the wrapped transport withholds."""
        return self._inner.num_withheld

    async def start(self) -> None:
        """See `Transport.start`."""
        await self._inner.start()

    def address(self) -> bytes:
        """See `Transport.address`."""
        return self._inner.address()

    def offer(self, pool: Pool) -> Offer:
        """See `Transport.offer`."""
        offer = self._inner.offer(pool)
        self._pools[offer.token] = pool
        return offer

    async def accept(self, offer: Offer, sink_address: bytes) -> SendLink:
        """See `Transport.accept`."""
        try:
            link = await self._inner.accept(offer, sink_address)
        finally:
            pool = self._pools.pop(offer.token, None)
        if self._source_plan is None or pool is None:
            return link
        damages = any(fault.kind in _DAMAGE for fault in self._source_plan.faults)
        faulty = FaultySendLink(link, self._source_plan.open_link(), pool, damages=damages)
        self._send_links.append(faulty)
        return faulty

    async def connect(self, offer: Offer) -> ReceiveLink:
        """See `Transport.connect`."""
        link = await self._inner.connect(offer)
        if self._sink_plan is None:
            return link
        return FaultyReceiveLink(link, self._sink_plan.open_link())

    async def close(self) -> None:
        """See `Transport.close`."""
        for link in self._send_links:
            await link.abort()
        await self._inner.close()
        self._pools.clear()
