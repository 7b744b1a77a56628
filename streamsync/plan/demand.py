"""What a sink needs, by sets of ranks that can send it, and how these are dealt it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamsync.plan.balance import Spread, divide, num_dealt_at_once
from streamsync.plan.schedule import cut

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from streamsync.plan.balance import Quota, Slot
    from streamsync.plan.cover import Cell
    from streamsync.plan.schedule import Part

Dealt = tuple[int, "Sequence[Part]"]
"""Parts of the tensor of this number, in order."""

_Ranks = tuple[int, ...]


class Demand:
    """The cells of all tensors of a sink (`cells[t]` are those of tensor `t`, whose elements have
    `itemsizes[t]` bytes), cut into parts that fit into buckets."""

    def __init__(
        self, cells: Sequence[tuple[Cell, ...]], itemsizes: Sequence[int], bucket_bytes: int
    ) -> None:
        self._bucket_bytes = bucket_bytes
        self._items: dict[_Ranks, list[tuple[int, tuple[Part, ...], int]]] = {}
        # Tensors that are cut alike have one tuple of cells, and are cut into parts once.
        known: dict[
            tuple[int, int],
            list[tuple[list[tuple[int, tuple[Part, ...], int]], tuple[Part, ...], int]],
        ] = {}
        for tensor, (own, itemsize) in enumerate(zip(cells, itemsizes, strict=True)):
            key = (id(own), itemsize)
            parted = known.get(key)
            if parted is None:
                parted = known[key] = [
                    (
                        self._items.setdefault(cell.ranks, []),
                        cut(cell.box, itemsize, bucket_bytes),
                        cell.numel * itemsize,
                    )
                    for cell in own
                ]
            for items, parts, nbytes in parted:
                items.append((tensor, parts, nbytes))
        self.nbytes: dict[_Ranks, int] = {
            ranks: sum(nbytes for _, _, nbytes in items) for ranks, items in self._items.items()
        }

    def divide(self, slot: Slot) -> dict[_Ranks, list[Quota]]:
        """How a sink in `slot` divides its demand: for each set of ranks, who sends how much."""
        return divide(self.nbytes, slot, self._bucket_bytes)

    def deal(self, ranks: _Ranks, quotas: Sequence[Quota]) -> list[list[Dealt]]:
        """For each of `quotas` what it is dealt of that which `ranks` hold, in forward order; it
        depends on how large the quotas are, not on whose they are."""
        items = self._items[ranks]
        if len(quotas) == 1:
            return [[(tensor, parts) for tensor, parts, _ in items]]
        dealt: list[list[Dealt]] = [[] for _ in quotas]
        spread = Spread(quotas)
        at_once = num_dealt_at_once(quotas, self._bucket_bytes)
        for tensor, parts, nbytes in items:
            if len(parts) <= at_once:
                dealt[spread.deal(nbytes)].append((tensor, parts))
            else:
                for run in _runs(parts, at_once):
                    dealt[spread.deal(sum(part.nbytes for part in run))].append((tensor, run))
        return dealt


def _runs(parts: Sequence[Part], length: int) -> Iterator[Sequence[Part]]:
    return (parts[i : i + length] for i in range(0, len(parts), length))
