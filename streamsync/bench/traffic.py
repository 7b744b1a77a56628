"""Who sends how much to whom in a whole cluster, when every one of its sinks plans. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from streamsync.control.found import decode_found
from streamsync.plan.cover import Coverage
from streamsync.plan.demand import Demand
from streamsync.plan.match import match as match_layouts
from streamsync.plan.plan import Rules
from streamsync.plan.refusal import Findings

if TYPE_CHECKING:
    from streamsync.bench.cluster import Joined
    from streamsync.bench.flow import Numbers
    from streamsync.bench.layouts import Side
    from streamsync.layout.region import Layout
    from streamsync.plan.balance import Quota
    from streamsync.plan.holders import Holders


class Flows(NamedTuple):
    """Columns of what travels: `sources[i] -> sinks[i]`, `nbytes[i]`."""

    sources: Numbers
    sinks: Numbers
    nbytes: Numbers


@dataclass(frozen=True, slots=True)
class Traffic:
    """All flows, sinks numbered replica by replica, and the bytes that all sinks need."""

    flows: Flows
    needed_bytes: int

    @classmethod
    def of(cls, sinks: Side, joined: Joined, bucket_bytes: int) -> Traffic:
        """What every sink of the cluster would be sent, by the hub's answers and slots. Sinks of
        equal layout and slot plan alike, and are planned once."""
        needed_bytes = 0
        rows: list[tuple[int, int, int]] = []
        for rank, number in enumerate(sinks.numbers):
            layout = sinks.layouts[number]
            planner = Egress(layout, decode_found(joined.answers[number]).holders, bucket_bytes)
            for replica, slot in enumerate(joined.slots):
                sink = replica * len(sinks.numbers) + rank
                rows += [(source, sink, nbytes) for source, nbytes in planner.of(slot).items()]
            needed_bytes += layout.nbytes * len(joined.slots)
        return cls(Flows(*np.array(rows, np.int64).reshape(-1, 3).T), needed_bytes)


class Egress:
    """What each source would send to sinks of one layout, by slot: the planner's own choice, before
    anything is packed into buckets."""

    def __init__(self, layout: Layout, holders: Holders, bucket_bytes: int) -> None:
        findings = Findings("sink")
        coverage = Coverage(holders, findings)
        matches = match_layouts(layout, holders, Rules(), {}, findings).matches
        cells = [coverage.cells(match) for match in matches]
        findings.refuse(len(layout.tensors))
        itemsizes = [match.tensor.wire.itemsize for match in matches]
        self._demand = Demand(cells, itemsizes, bucket_bytes)
        self._dealt: dict[tuple[tuple[int, ...], tuple[float, ...]], list[int]] = {}

    def of(self, slot: tuple[int, int]) -> Counter[int]:
        """Bytes by source rank for a sink in `slot`."""
        egress: Counter[int] = Counter()
        for ranks, quotas in self._demand.divide(slot).items():
            for quota, nbytes in zip(quotas, self._deal(ranks, quotas), strict=True):
                egress[quota.rank] += nbytes
        return egress

    def _deal(self, ranks: tuple[int, ...], quotas: list[Quota]) -> list[int]:
        """Bytes for each of `quotas`: depends on their sizes alone, which slots have in common."""
        if len(quotas) == 1:
            return [self._demand.nbytes[ranks]]
        key = (ranks, tuple(round(quota.nbytes, 3) for quota in quotas))
        dealt = self._dealt.get(key)
        if dealt is None:
            dealt = self._dealt[key] = [
                sum(part.nbytes for _, parts in items for part in parts)
                for items in self._demand.deal(ranks, quotas)
            ]
        return dealt
