"""Which of several sources sends a box, so that all send about as much. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def balance(nbytes: Sequence[int], holders: Sequence[Sequence[str]]) -> list[int]:
    """For each item, the position in `holders[item]` of the rank that sends its `nbytes[item]`.

    Items with one holder are settled first; the rest go, largest first, to their least loaded
    holder (Graham's LPT rule: where every rank holds everything, no rank sends more than the mean
    plus one largest item). Deterministic: ties go to the first holder in the order given.
    """
    chosen = [0] * len(nbytes)
    load: dict[str, int] = {rank: 0 for ranks in holders for rank in ranks}
    free: list[int] = []
    for item, ranks in enumerate(holders):
        if len(ranks) == 1:
            load[ranks[0]] += nbytes[item]
        else:
            free.append(item)
    free.sort(key=lambda item: -nbytes[item])
    for item in free:
        ranks = holders[item]
        best = min(range(len(ranks)), key=lambda i: load[ranks[i]])
        chosen[item] = best
        load[ranks[best]] += nbytes[item]
    return chosen
