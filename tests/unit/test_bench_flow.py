from __future__ import annotations

import numpy as np
import pytest

from streamsync.bench.flow import bound, fair_rates, makespan

Flows = list[tuple[int, int, int]]


def arrays(flows: Flows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    sources, sinks, nbytes = np.array(flows, np.int64).reshape(-1, 3).T
    return sources, sinks, nbytes


@pytest.mark.parametrize(
    ("flows", "rates"),
    [
        ([(0, 0, 1)], [1]),
        ([(0, 0, 1), (1, 1, 1)], [1, 1]),
        ([(0, 0, 1), (0, 1, 1)], [1 / 2, 1 / 2]),  # one source, two sinks
        ([(0, 0, 1), (0, 1, 1), (1, 1, 1)], [1 / 2, 1 / 2, 1 / 2]),
        # Sink 0 is the tightest, 1/3 each; source 2 then has 2/3 left for its other flow.
        ([(0, 0, 1), (1, 0, 1), (2, 0, 1), (2, 1, 1)], [1 / 3, 1 / 3, 1 / 3, 2 / 3]),
        # A chain of bottlenecks: 1/3 at sink 0, then source 2's 2/3 makes sink 1 give 1/3 only.
        (
            [(0, 0, 1), (1, 0, 1), (2, 0, 1), (2, 1, 1), (3, 1, 1), (3, 2, 1)],
            [1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2, 1 / 2],
        ),
    ],
)
def test_rates_are_those_computed_by_hand(flows: Flows, rates: list[float]) -> None:
    sources, sinks, _ = arrays(flows)
    assert fair_rates(sources, sinks) == pytest.approx(rates)


@pytest.mark.parametrize(
    ("flows", "seconds", "least"),
    [
        ([], 0, 0),
        ([(0, 0, 0)], 0, 0),
        ([(0, 0, 100)], 100, 100),
        ([(0, 0, 100), (0, 1, 100)], 200, 200),
        # Each at 1/2: the first ends at 120, and the second has source 0 to itself.
        ([(0, 0, 60), (0, 1, 100)], 160, 160),
        # Sink 0 gives 1/3 each until 300; source 2 has 2/3 for its other flow, of which 100 are
        # left then, and sends them at 1.
        ([(0, 0, 100), (1, 0, 100), (2, 0, 100), (2, 1, 300)], 400, 400),
        # Both sinks are crowded until 40, so source 0 sends at 1/4 + 1/4 only; then it is alone.
        (
            [(0, 0, 100), (0, 1, 100)] + [(k, k % 2, 10) for k in range(1, 7)],
            220,
            200,
        ),
    ],
)
def test_makespans_are_those_computed_by_hand(flows: Flows, seconds: float, least: float) -> None:
    assert bound(*arrays(flows)) == least
    assert seconds <= makespan(*arrays(flows)) <= seconds * 1.005


def test_rates_use_up_a_bottleneck_of_every_flow_and_no_rank_sends_too_much() -> None:
    """What max-min fairness is: each flow has a rank that is full and where no flow is faster."""
    random = np.random.default_rng(0)
    for _ in range(20):
        num_flows = int(random.integers(1, 300))
        sources = random.integers(0, 20, num_flows)
        sinks = random.integers(0, 12, num_flows)
        rates = fair_rates(sources, sinks)
        saturated = np.zeros(num_flows, bool)
        for ends in (sources, sinks):
            used = np.bincount(ends, weights=rates)
            assert used.max() <= 1 + 1e-6
            fastest = np.zeros(len(used))
            np.maximum.at(fastest, ends, rates)
            saturated |= (used[ends] > 1 - 1e-6) & (rates > fastest[ends] - 1e-6)
        assert saturated.all()


def test_a_makespan_is_never_below_its_bound_and_exact_but_for_a_step() -> None:
    """Against the same model with a step for every flow that ends."""
    random = np.random.default_rng(1)
    worst = 0.0
    for _ in range(40):
        num_flows = int(random.integers(1, 60))
        flows = (
            random.integers(0, 12, num_flows),
            random.integers(0, 12, num_flows),
            (10 ** random.uniform(3, 9, num_flows)).astype(np.int64),
        )
        exact = event_by_event(*flows)
        found = makespan(*flows)
        assert bound(*flows) * (1 - 1e-9) <= exact * (1 + 1e-9)
        assert exact * (1 - 1e-9) <= found <= exact * 1.01
        worst = max(worst, exact / bound(*flows))
    assert worst > 1.01  # else nothing here could ever exceed it


def event_by_event(sources: np.ndarray, sinks: np.ndarray, nbytes: np.ndarray) -> float:
    """The fluid model in plain Python: one bottleneck at a time, one ended flow at a time."""
    left = {flow: float(n) for flow, n in enumerate(nbytes)}
    now = 0.0
    while left:
        room: dict[tuple[str, int], float] = {}
        for flow in left:
            room[("source", sources[flow])] = room[("sink", sinks[flow])] = 1.0
        rates: dict[int, float] = {}
        while len(rates) < len(left):
            through: dict[tuple[str, int], list[int]] = {}
            for flow in left.keys() - rates.keys():
                through.setdefault(("source", sources[flow]), []).append(flow)
                through.setdefault(("sink", sinks[flow]), []).append(flow)
            rank = min(through, key=lambda r: room[r] / len(through[r]))
            rate = room[rank] / len(through[rank])
            for flow in through[rank]:
                rates[flow] = rate
                room[("source", sources[flow])] -= rate
                room[("sink", sinks[flow])] -= rate
        step = min(left[flow] / rates[flow] for flow in left)
        now += step
        left = {
            flow: n - rates[flow] * step
            for flow, n in left.items()
            if n - rates[flow] * step > 1e-6 * n
        }
    return now
