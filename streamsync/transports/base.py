"""What every transport is: it carries frames (header + payload) in order from source to sink.

Set-up, over the control session: the sink sends its `address()`; the source makes an `offer()`
(address and a one-use token) and waits in `accept()` while the sink is in `connect()`. After that
frames flow one way. Transports know nothing of versions, plans, credits or digests. The caller
bounds every await with a deadline; each may be cancelled, and after `abort()` returns no buffer is
touched by the transport any more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import msgspec

if TYPE_CHECKING:
    from streamsync.runtime.pool import Lease, Pool


class Offer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a sink reaches one link of a source: opaque `address`, and the `token` that admits it."""

    address: bytes
    token: bytes


class SendLink(ABC):
    """The source's end of one link."""

    wire_bytes: int = 0
    """Payload bytes handed to the transport so far."""

    @abstractmethod
    async def send(self, lease: Lease) -> None:
        """Offers `lease.frame`; frames arrive in the order of the calls.

        The link retains the lease itself and releases it when its memory is no longer read (tcp:
        taken by the kernel; shm, memory: the sink released it; ucx: request done). Returns when the
        next frame may be offered. Raises `PeerLost`; an error of an earlier frame may surface here.
        """

    @abstractmethod
    async def flush(self) -> None:
        """Returns when every frame sent so far has left; raises `PeerLost`."""

    @abstractmethod
    async def abort(self) -> None:
        """Closes the link now. Afterwards every lease it retained is released, or, if the transport
        can't prove that it no longer touches one, kept for ever and counted in
        `Transport.num_withheld`. Idempotent."""


class ReceiveLink(ABC):
    """The sink's end of one link."""

    in_place: bool = False
    """Whether `receive` brings its own lease (the source's memory) when given None."""
    wire_bytes: int = 0
    """Payload bytes that have arrived so far."""
    waiting_seconds: float = 0.0
    """Time inside `receive` before the first byte of a frame was there: the peer's, not ours."""

    @abstractmethod
    async def receive(self, lease: Lease | None, nbytes: int) -> Lease:
        """The next frame, whose payload must have `nbytes` bytes.

        Fills `lease` and returns it, or, with None (`in_place` links only), returns a lease of the
        source's own memory that must be released. Raises `PeerLost`, or `IntegrityError` for a
        frame of another length. On any error or cancel `lease` stays the caller's, who may release
        it only after `abort()`.
        """

    @abstractmethod
    async def abort(self) -> None:
        """Closes the link now; afterwards no lease given to `receive` is written. Idempotent."""


class Transport(ABC):
    """One per process and kind. `start` before use, `close` after; both on the loop's thread."""

    name: ClassVar[str]
    num_withheld: int = 0
    """Leases kept for ever because draining failed."""

    @abstractmethod
    async def start(self) -> None:
        """Opens listeners; raises `ConfigError` (a port in use) or `MissingExtraError`."""

    @abstractmethod
    def address(self) -> bytes:
        """What the sink must tell the source before `accept` (empty for most)."""

    @abstractmethod
    def offer(self, pool: Pool) -> Offer:
        """Source: prepares one link for leases of `pool`."""

    @abstractmethod
    async def accept(self, offer: Offer, sink_address: bytes) -> SendLink:
        """Source: waits until the sink of this offer connected. A cancel withdraws the offer."""

    @abstractmethod
    async def connect(self, offer: Offer) -> ReceiveLink:
        """Sink: opens the link; raises `TransportError` when refused or unreachable."""

    @abstractmethod
    async def close(self) -> None:
        """Aborts every link and closes listeners; nothing is left behind."""
