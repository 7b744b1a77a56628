"""A source's session with one sink rank."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streamsync.stages.send import Credits

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamsync.control.messages import Message
    from streamsync.stages.stream import Stream
    from streamsync.transports.base import SendLink


@dataclass(slots=True, eq=False)
class SourcePeer:
    """What a source knows of one subscribed sink rank. `tell` queues a control message to it;
    `has_whole_replica`: it said that every rank of its replica is subscribed. `ended` is set when
    the session is over (the sink may then subscribe again)."""

    sink: str
    replica: str
    control_id: bytes
    stream: Stream
    link: SendLink
    transport: str
    tell: Callable[[Message], None]
    has_whole_replica: bool = False
    credits: Credits = field(default_factory=Credits)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
