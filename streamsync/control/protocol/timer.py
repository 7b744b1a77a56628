"""Deadlines as data: machines ask for timers and are told when one expired."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from streamsync.types import Version

TimerName = Literal["announce", "total", "arm", "gate", "lag"]


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Feed `TimerExpired(name, version)` after the deadline that `name` stands for.

    `announce`: progress deadline, every source must have announced the version. `total`: the whole
    sync. `arm`: gate deadline, every rank must be armed. `gate`: from ARMED to COMMIT. `lag`: a
    source waits for late replicas. Setting a timer again restarts it.
    """

    name: TimerName
    version: Version


@dataclass(frozen=True, slots=True)
class CancelTimer:
    """Forget the timer, if set."""

    name: TimerName
    version: Version


@dataclass(frozen=True, slots=True)
class TimerExpired:
    """The deadline passed."""

    name: TimerName
    version: Version
