"""How long the flows of a cluster take when all run at once: a fluid model of the network. Pure.

Every rank sends at most 1 byte a second and receives at most 1, whatever lies between: the
network's core is taken as wide enough. Flows that run at once share what a rank has max-min fairly,
as transports with a queue per peer do. Sources and sinks are numbered from 0 on, each side apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Numbers = npt.NDArray[np.int64]
    Reals = npt.NDArray[np.float64]

_STEPS: Final = 400
"""Time advances by at least this part of the bound, so that thousands of flows that end at nearly
the same time are one step. What they leave free is shared out only at its end: a makespan may come
out late by about a step, never early."""

_EQUAL: Final = 1 + 1e-9
"""Rates that differ less are the same one, rounded differently."""


def bound(sources: Numbers, sinks: Numbers, nbytes: Numbers) -> float:
    """Seconds that no schedule can beat: the largest egress or ingress of any rank, in bytes."""
    egress = np.bincount(sources, weights=nbytes)
    ingress = np.bincount(sinks, weights=nbytes)
    return float(max(egress.max(initial=0.0), ingress.max(initial=0.0)))


def makespan(sources: Numbers, sinks: Numbers, nbytes: Numbers) -> float:
    """Seconds until the last of the flows `sources[i] -> sinks[i]` of `nbytes[i]` bytes has ended,
    when all begin at once; 0 for no flows."""
    left = nbytes.astype(np.float64)
    now = last = 0.0
    shortest = bound(sources, sinks, nbytes) / _STEPS
    while left.size:
        rates = fair_rates(sources, sinks)
        ends = left / rates
        step = max(float(ends.min()), shortest)
        done = ends <= step
        last = max(last, now + float(ends[done].max(initial=0.0)))
        now += step
        left = (left - rates * step)[~done]
        sources, sinks = sources[~done], sinks[~done]
    return last


def fair_rates(sources: Numbers, sinks: Numbers) -> Reals:
    """The max-min fair rate of each flow, in bytes a second.

    Bertsekas and Gallager, Data Networks, 6.5.2, for all bottlenecks of a round at once: a rank
    whose even share no flow of its could exceed at the other end gives that share to each of them;
    it is taken off the ranks at the other ends, and the next round begins without these flows.
    """
    num_sources = int(sources.max(initial=-1)) + 1
    num_ranks = num_sources + int(sinks.max(initial=-1)) + 1
    room = np.ones(num_ranks)
    rates = np.zeros(len(sources))
    left = np.arange(len(sources))
    while left.size:
        a, b = sources[left], sinks[left] + num_sources
        count = np.bincount(a, minlength=num_ranks) + np.bincount(b, minlength=num_ranks)
        share = np.divide(room, count, out=np.full(num_ranks, np.inf), where=count > 0)
        elsewhere = np.full(num_ranks, np.inf)
        np.minimum.at(elsewhere, a, share[b])
        np.minimum.at(elsewhere, b, share[a])
        is_bottleneck = share <= elsewhere * _EQUAL
        fixed = is_bottleneck[a] | is_bottleneck[b]
        rate = np.minimum(share[a], share[b])[fixed]
        rates[left[fixed]] = rate
        for ends in (a, b):
            room -= np.bincount(ends[fixed], weights=rate, minlength=num_ranks)
        np.maximum(room, 0.0, out=room)
        left = left[~fixed]
    return rates
