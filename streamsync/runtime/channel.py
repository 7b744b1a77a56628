"""Bounded channels between stages: two halves, capacity in bytes, end of stream, statistics.

The shape follows trio's memory channels. One sender and one receiver task at a time per half.
Cancelling `send` leaves the item with the caller; cancelling `receive` loses nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class EndOfStream(Exception):  # noqa: N818 - a signal, named as in trio and anyio
    """The sender closed the channel and everything sent was received."""


class BrokenChannel(Exception):  # noqa: N818 - a signal, named as in trio and anyio
    """The receiver went away: nobody will take what is sent."""


@dataclass(slots=True, frozen=True)
class ChannelStatistics:
    """Occupancy now, its bound, and what passed so far. `name` is the edge, `convert-pin` say."""

    name: str
    occupancy_bytes: int
    capacity_bytes: int
    num_items: int
    sent_bytes: int
    sent_items: int


class _State(Generic[T]):
    def __init__(self, name: str, capacity_bytes: int) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.items: deque[tuple[T, int]] = deque()
        self.occupancy_bytes = 0
        self.sent_bytes = 0
        self.sent_items = 0
        self.closed = False
        self.broken = False
        self.changed: asyncio.Future[None] | None = None

    def notify(self) -> None:
        if self.changed is not None and not self.changed.done():
            self.changed.set_result(None)
        self.changed = None

    async def wait(self) -> None:
        if self.changed is None:
            self.changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self.changed)

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(
            self.name,
            self.occupancy_bytes,
            self.capacity_bytes,
            len(self.items),
            self.sent_bytes,
            self.sent_items,
        )


class SendHalf(Generic[T]):
    """Where a stage gives its output."""

    def __init__(self, state: _State[T]) -> None:
        self._state = state

    async def send(self, item: T, nbytes: int) -> None:
        """Gives `item`, waiting while it does not fit. An item larger than the whole capacity
        passes when the channel is empty. Raises `BrokenChannel` when the receiver is gone."""
        state = self._state
        while True:
            if state.broken:
                raise BrokenChannel(f"channel {state.name}: the receiving stage ended")
            assert not state.closed, "send after close"
            if not state.items or state.occupancy_bytes + nbytes <= state.capacity_bytes:
                break
            await state.wait()
        state.items.append((item, nbytes))
        state.occupancy_bytes += nbytes
        state.sent_bytes += nbytes
        state.sent_items += 1
        state.notify()

    def close(self) -> None:
        """Ends the stream; the receiver first takes what is still inside."""
        self._state.closed = True
        self._state.notify()

    def statistics(self) -> ChannelStatistics:
        """A snapshot."""
        return self._state.statistics()

    def __enter__(self) -> SendHalf[T]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class ReceiveHalf(Generic[T]):
    """Where a stage takes its input."""

    def __init__(self, state: _State[T]) -> None:
        self._state = state

    async def receive(self) -> T:
        """The next item; raises `EndOfStream` after the last one."""
        state = self._state
        while not state.items:
            if state.closed:
                raise EndOfStream(state.name)
            await state.wait()
        item, nbytes = state.items.popleft()
        state.occupancy_bytes -= nbytes
        state.notify()
        return item

    def close(self) -> list[T]:
        """Refuses further items; returns those never received, which the caller must release."""
        state = self._state
        state.broken = True
        left = [item for item, _ in state.items]
        state.items.clear()
        state.occupancy_bytes = 0
        state.notify()
        return left

    def statistics(self) -> ChannelStatistics:
        """A snapshot."""
        return self._state.statistics()


def open_channel(name: str, capacity_bytes: int) -> tuple[SendHalf[T], ReceiveHalf[T]]:
    """Both halves of a new channel. `name` is the edge it stands for."""
    state: _State[T] = _State(name, capacity_bytes)
    return SendHalf(state), ReceiveHalf(state)
