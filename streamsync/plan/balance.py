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

from bisect import bisect_right
from collections import defaultdict
from itertools import accumulate
from operator import add
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
        loads = [levels[rank] for rank in ranks]
        poured = pour(loads, nbytes)
        levels.update(zip(ranks, map(add, loads, poured), strict=True))
        quotas = list(_part(ranks, poured, slot))
        divided[ranks] = _worthwhile(quotas, used.intersection(ranks), least)
        used.update(quota.rank for quota in divided[ranks])
    return divided


def pour(loads: Sequence[float], nbytes: float) -> list[float]:
    """How much more each gets when `nbytes` are poured over `loads`: the lowest are filled up to
    one level."""
    if min(loads) == max(loads):
        return [nbytes / len(loads)] * len(loads)
    level, left, filled = 0.0, nbytes, 0
    for filled, load in enumerate(sorted(loads)):
        if filled and (load - level) * filled >= left:
            break
        left -= (load - level) * filled
        level = load
    else:
        filled = len(loads)
    level += left / filled
    return [max(level - load, 0.0) for load in loads]


def _part(ranks: Sequence[int], poured: Sequence[float], slot: Slot) -> Iterator[Quota]:
    """The part that `slot` takes of the ranks' line, in which each has the length of what was
    poured on it; scaled up to as much as all of it."""
    index, count = slot
    ends = list(accumulate(poured))
    start, stop = index / count * ends[-1], (index + 1) / count * ends[-1]
    for n in range(bisect_right(ends, start), len(ends)):
        begin = ends[n] - poured[n]
        if begin >= stop:
            break
        common = min(ends[n], stop) - max(begin, start)
        if common > 0:
            yield Quota(ranks[n], common * count)


def _worthwhile(quotas: list[Quota], known: set[int], least: float) -> list[Quota]:
    """`quotas` without those below `least` of ranks that are not `known`: the known ranks and those
    that remain take theirs, or, where there are none, some of these themselves."""
    kept = {rank: part for rank, part in quotas if part >= least or rank in known}
    small = [quota for quota in quotas if quota.rank not in kept]
    rest = sum(quota.nbytes for quota in small)
    if small:
        takers = sorted(known.union(kept)) or _spaced(small, max(1, int(rest / least)))
        for rank in takers:
            kept[rank] = kept.get(rank, 0.0) + rest / len(takers)
    return [Quota(rank, kept[rank]) for rank in sorted(kept)]


def _spaced(quotas: Sequence[Quota], most: int) -> list[int]:
    """At most so many of the quotas' ranks, at equal distances."""
    number = min(most, len(quotas))
    return [quotas[(2 * n + 1) * len(quotas) // (2 * number)].rank for n in range(number)]


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
