"""Carries out a machine's SetTimer and CancelTimer on the running loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from streamsync.control.protocol.timer import CancelTimer, SetTimer, TimerExpired, TimerName

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamsync.config import Deadlines
    from streamsync.types import Version


class Timers:
    """Named deadlines; `expired(event)` is called on the loop when one passes."""

    def __init__(self, deadlines: Deadlines, expired: Callable[[TimerExpired], None]) -> None:
        self._seconds: dict[TimerName, float] = {
            "announce": deadlines.progress,
            "total": deadlines.total,
            "arm": deadlines.gate,
            "gate": deadlines.gate,
            "lag": deadlines.lag,
        }
        self._expired = expired
        self._handles: dict[tuple[TimerName, Version], asyncio.TimerHandle] = {}

    def apply(self, action: SetTimer | CancelTimer) -> None:
        """Starts, restarts or forgets a timer."""
        key = (action.name, action.version)
        handle = self._handles.pop(key, None)
        if handle is not None:
            handle.cancel()
        if isinstance(action, SetTimer):
            self._handles[key] = asyncio.get_running_loop().call_later(
                self._seconds[action.name], self._fire, key
            )

    def _fire(self, key: tuple[TimerName, Version]) -> None:
        self._handles.pop(key, None)
        self._expired(TimerExpired(*key))

    def close(self) -> None:
        """Forgets all."""
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()
