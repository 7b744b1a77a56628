"""Which of several sources sends what, so that all send about as much. Pure.

Each set of source ranks that hold the same boxes divides a sink's demand for these in three steps.

- Level: the demand is poured over the set so that its least loaded ranks get most of it. Small sets
  come first, so that a rank that alone holds other things gets less of what it shares. What would
  give a rank next to nothing goes to ranks that the sink talks to anyway.
- Slot: the replicas of an engine stand in a line and cut it into equal parts; each takes its own
  part of the set's ranks. Many replicas thus need one or two ranks of a set each, and no rank is
  asked for more than another.
- Spread: within its part a sink asks all ranks for some of every layer, so that early layers do not
  wait for one rank.

Every rank plans for itself: what it assumes of the others is that they need as much as it does.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

Slot = tuple[int, int]
"""A replica's index among all replicas, and their count."""

_LEAST_PART: Final = 1 / 256
"""A rank that would send less than this part of a sink's bytes is not worth a session."""
_GRAINS: Final = 64
"""What several ranks share is cut into at least so many parts per rank, if buckets allow."""


class Quota(NamedTuple):
    """What one rank of a set is to send of the set's bytes."""

    rank: int
    nbytes: float


def divide(
    demand: Mapping[tuple[int, ...], int], slot: Slot, bucket_bytes: int
) -> dict[tuple[int, ...], list[Quota]]:
    """For each set of ranks (ascending numbers), how this sink's `demand` in bytes (all
    positive) is divided.

    Deterministic. Every set's quotas sum to its demand.
    """
    least = max(sum(demand.values()) * _LEAST_PART, bucket_bytes)
    levels: defaultdict[int, float] = defaultdict(float)
    used: set[int] = set()
    divided: dict[tuple[int, ...], list[Quota]] = {}
    for ranks in sorted(demand, key=lambda ranks: (len(ranks), ranks)):
        nbytes = demand[ranks]
        poured = pour(ranks, nbytes, levels)
        for rank, part in poured.items():
            levels[rank] += part
        known = [rank for rank in ranks if rank in used]
        if len(ranks) == 1:
            quotas = [Quota(ranks[0], nbytes)]
        elif known and all(part < least for rank, part in poured.items() if rank not in used):
            even = nbytes / len(known)
            quotas = _merge([Quota(rank, even) for rank in known], nbytes, least)
        else:
            line = [Quota(rank, poured[rank]) for rank in ranks]
            quotas = _merge(list(_part(line, nbytes, slot)), nbytes, least)
        used.update(quota.rank for quota in quotas)
        divided[ranks] = quotas
    return divided


def pour(ranks: Iterable[int], nbytes: int, loads: Mapping[int, float]) -> dict[int, float]:
    """`nbytes` poured over `ranks` that stand at `loads`: the lowest are filled up to one level."""
    ordered = sorted(ranks, key=lambda rank: (loads.get(rank, 0.0), rank))
    level, left, filled = 0.0, float(nbytes), 0
    for filled, rank in enumerate(ordered):
        load = loads.get(rank, 0.0)
        if filled and (load - level) * filled >= left:
            break
        left -= (load - level) * filled
        level = load
    else:
        filled = len(ordered)
    level += left / filled
    return {
        rank: level - loads.get(rank, 0.0) if n < filled else 0.0 for n, rank in enumerate(ordered)
    }


def _part(line: Iterable[Quota], nbytes: int, slot: Slot) -> Iterator[Quota]:
    """The part that `slot` takes of a line of quotas laid end to end, as much as all of it."""
    index, count = slot
    start, stop = index / count * nbytes, (index + 1) / count * nbytes
    at = 0.0
    for rank, part in line:
        common = min(at + part, stop) - max(at, start)
        at += part
        if common > 0:
            yield Quota(rank, common * count)


def _merge(quotas: list[Quota], nbytes: int, least: float) -> list[Quota]:
    """Without those below `least`, as long as there is another: the rest takes theirs."""
    largest = max(quotas, key=lambda quota: quota.nbytes)
    kept = [quota for quota in quotas if quota.nbytes >= least] or [largest]
    scale = nbytes / sum(quota.nbytes for quota in kept)
    return [Quota(rank, part * scale) for rank, part in kept]


def num_dealt_at_once(quotas: Sequence[Quota], bucket_bytes: int) -> int:
    """How many buckets' worth of one tensor a rank may be dealt at once, so that several ranks can
    share evenly."""
    total = sum(quota.nbytes for quota in quotas)
    return max(1, int(total / (len(quotas) * _GRAINS)) // bucket_bytes)


class Spread:
    """Deals items, which come in forward order, to `quotas`, each in proportion."""

    def __init__(self, quotas: Sequence[Quota]) -> None:
        self._steps = [1 / quota.nbytes for quota in quotas]
        self._dealt = [0.0] * len(quotas)

    def deal(self, nbytes: int) -> int:
        """The number of the quota that the next item goes to: that which is, of all, the least full
        afterwards."""
        best, least = 0, float("inf")
        for n, step in enumerate(self._steps):
            after = self._dealt[n] + nbytes * step
            if after < least:
                best, least = n, after
        self._dealt[best] = least
        return best
