"""Which landings are due, and which gates may open, as the groups of one sync land. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamsync.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from streamsync.layout.landing import Landing


class Landings:
    """The landings of one sync that brings the tensors `delivered`.

    A landing is due when the last of its groups landed; a gate opens when its group landed and
    all landings of the group are done. Raises `PlanError` when a landing would get a part of its
    tensors only.
    """

    def __init__(self, landings: Sequence[Landing], delivered: Collection[str]) -> None:
        self._awaited: list[tuple[Landing, set[str]]] = []
        self._undone: dict[str, int] = {}
        self._closed: list[str] = []
        made: set[str] = set()
        for landing in landings:
            missing = [n for n in landing.names if n not in delivered and n not in made]
            if len(missing) == len(landing.names):
                continue  # none of its business
            if missing:
                raise PlanError(
                    f"{landing.names[0]} and what shares a parameter with it are loaded at once, "
                    f"but this sync leaves out {', '.join(missing[:8])}; add them to the subset",
                    tensor=missing[0],
                )
            self._awaited.append((landing, set(landing.groups)))
            made.update(landing.makes)
            for group in landing.groups:
                self._undone[group] = self._undone.get(group, 0) + 1

    def landed(self, group: str) -> list[Landing]:
        """All bytes of `group` are proved: the landings that are due now."""
        self._closed.append(group)
        due: list[Landing] = []
        for landing, awaited in self._awaited:
            if group in awaited:
                awaited.remove(group)
                if not awaited:
                    due.append(landing)
        return due

    def done(self, landing: Landing) -> None:
        """`landing` was due and has been made."""
        for group in landing.groups:
            self._undone[group] -= 1

    def openable(self) -> list[str]:
        """The groups whose gates may open now and could not before; each comes once."""
        ready = [group for group in self._closed if not self._undone.get(group)]
        self._closed = [group for group in self._closed if self._undone.get(group)]
        return ready
