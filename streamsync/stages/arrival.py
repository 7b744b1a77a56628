"""When to arm: as late as possible, yet early enough that loading does not end later. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_ASSUMED_LOAD_BYTES_PER_SECOND = 2e9
"""Before the first load was measured: about one thread's copy and digest. Guessing too low arms a
little early, which costs stall once."""


@dataclass(slots=True)
class Arrival:
    """Follows one sync's bytes as they arrive and predicts the rest.

    `load_bytes_per_second` is what the previous sync's load reached; 0 if there was none.
    """

    total_bytes: int
    load_bytes_per_second: float = 0.0
    arrived_bytes: int = 0
    _first_at: float | None = None

    def add(self, nbytes: int, now: float) -> None:
        """`nbytes` more have arrived at time `now` (seconds)."""
        if self._first_at is None:
            self._first_at = now
        self.arrived_bytes += nbytes

    def may_arm(self, now: float) -> bool:
        """Whether the predicted rest of the arrival is at most the time that loading takes."""
        rest = self.total_bytes - self.arrived_bytes
        if rest <= 0:
            return True
        if self._first_at is None or now <= self._first_at:
            return False
        arrival_seconds = rest * (now - self._first_at) / self.arrived_bytes
        rate = self.load_bytes_per_second or _ASSUMED_LOAD_BYTES_PER_SECOND
        return arrival_seconds <= self.total_bytes / rate
