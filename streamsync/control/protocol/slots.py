"""Each replica's slot: its place among all replicas, by which they spread over the sources. Pure.

A sink takes the slot that it has when it plans; one that moves later counts from its next plan on.

A slot is (index, count). Replicas that stand at equal distances ask different copies of the same
box, and none is asked more than another. A changed slot can change a plan, so one replica that
comes or goes must not move the others: slots are dealt anew only with a new source group, or when
the number of replicas has moved by more than a quarter. Until then a newcomer takes the slot of one
that left, or shares one, as far as possible from the last that was shared.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamsync.plan.balance import Slot


@dataclass(slots=True)
class Slots:
    """Slots by replica; `generation` counts how often all were dealt anew."""

    generation: int = 0
    count: int = 0
    indexes: dict[str, int] = field(default_factory=dict)

    def of(self, replica: str) -> Slot:
        """The slot of `replica`, which is given one if it has none."""
        if replica not in self.indexes:
            self.indexes[replica] = self._free_index()
            self._deal_if_moved()
        return self.indexes[replica], self.count

    def take_up(self, replica: str, held: Slot) -> None:
        """A replica brings the slot that a hub before this one gave it: nothing moves if its
        count is that of the others, or there is none yet."""
        index, count = held
        if replica in self.indexes or not 0 <= index < count:
            return
        if not self.indexes:
            self.count = count
        if self.count == count:
            self.indexes[replica] = index

    def leave(self, replica: str) -> None:
        """`replica` is gone."""
        if self.indexes.pop(replica, None) is not None and 4 * len(self.indexes) < 3 * self.count:
            self.deal()

    @property
    def are_even(self) -> bool:
        """Whether every index is taken, and once."""
        return len(set(self.indexes.values())) == len(self.indexes) == self.count

    def deal(self) -> None:
        """Deals all slots anew, in the old order."""
        order = sorted(self.indexes, key=lambda name: self.indexes[name])
        self.indexes = {name: index for index, name in enumerate(order)}
        self.count = len(order)
        self.generation += 1

    def _deal_if_moved(self) -> None:
        if 4 * len(self.indexes) > 5 * self.count:
            self.deal()

    def _free_index(self) -> int:
        if not self.count:
            return 0
        taken = Counter(self.indexes.values())
        least = min(taken[index] for index in range(self.count))
        free = [index for index in range(self.count) if taken[index] == least]
        return min(free, key=_reversed_bits)


def _reversed_bits(index: int) -> int:
    """Ascending indexes in this order (van der Corput's) are far apart from each other."""
    return int(f"{index:032b}"[::-1], 2)
