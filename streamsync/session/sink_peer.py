"""A sink's session with one source rank."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamsync.control.messages import End, Message
    from streamsync.control.sockets import Dialer
    from streamsync.plan.plan import Share
    from streamsync.runtime.pool import Account
    from streamsync.stages.load import Feed
    from streamsync.transports.base import ReceiveLink


@dataclass(slots=True, eq=False)
class SinkPeer:
    """What a sink knows of one source. `account` is None on an in-place link.

    `has_granted` tells whether frames of the current sync may be under way; `early_end` keeps an
    `End` that overtook the sync's start.
    """

    source: str
    share: Share
    feed: Feed
    dialer: Dialer
    link: ReceiveLink
    transport: str
    account: Account | None
    has_granted: bool = False
    early_end: End | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, message: Message) -> None:
        """Queues a control message to the source."""
        self.dialer.send(message)
