"""What streamsync asks of an engine rank: its layout, and gates that it can close and open."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamsync.layout.binding import Binding
    from streamsync.types import Version


class Engine(ABC):
    """One rank of a replica. Methods may block and are called from the executor's threads, never
    from the event loop; all may be called from any thread."""

    @abstractmethod
    def binding(self) -> Binding:
        """The recorded sink layout and the live memory behind it."""

    @abstractmethod
    def arm(
        self, version: Version, groups: tuple[str, ...], *, whole: bool, deadline: float
    ) -> None:
        """Between two forwards, closes the gate of every group in `groups` for `version`.

        Returns when no forward of the old version runs any more and none can start: from then on
        parameters may be written. With `whole` every gate stays closed until all groups landed
        (`apply="version"`). Raises `EngineError` when no such point came within `deadline` seconds;
        then nothing is armed.
        """

    @abstractmethod
    def disarm(self, version: Version) -> None:
        """ABORT after `arm`, nothing was written: opens the gates, the old version goes on."""

    @abstractmethod
    def open_gate(self, version: Version, group: str) -> None:
        """`group` has landed and its digest matched: forwards may read it."""

    @abstractmethod
    def commit(self, version: Version) -> None:
        """Every rank installed `version`: its outputs may leave."""

    @abstractmethod
    def quarantine(self, reason: str) -> None:
        """Weights may be torn. Poisons forwards in flight; no output leaves and none starts until
        the next `commit`. `arm` on a quarantined engine succeeds (healing)."""

    def post_load(self, group: str) -> None:  # noqa: B027 - optional hook
        """Called once per landed group, after the binding's landings of that group and before its
        gate opens: refresh derived tensors in place."""
