"""Who sends what: level loads, few sources, every byte given out."""

from __future__ import annotations

from collections import Counter

import pytest

from streamsync.plan.balance import Quota, Spread, divide, num_dealt_at_once, pour

MIB = 1 << 20


def loads(demand: dict[tuple[int, ...], int], count: int, bucket_bytes: int = 1) -> Counter[int]:
    """What each rank sends to all replicas."""
    sent: Counter[int] = Counter()
    for index in range(count):
        for ranks, quotas in divide(demand, (index, count), bucket_bytes).items():
            assert sum(quota.nbytes for quota in quotas) == pytest.approx(demand[ranks])
            assert {quota.rank for quota in quotas} <= set(ranks)
            for quota in quotas:
                sent[quota.rank] += round(quota.nbytes)
    return sent


def test_pouring_fills_the_lowest_first() -> None:
    assert pour([0, 0, 0], 9) == [3, 3, 3]
    assert pour([10, 0, 0], 6) == [0, 3, 3]
    assert pour([1, 5, 0], 9) == [4, 0, 5]
    assert pour([2, 2], 0) == [0, 0]
    assert pour([7], 3) == [3]


def test_a_lone_sink_uses_all_copies_evenly() -> None:
    assert loads({(0, 1, 2, 3): 4000}, 1) == dict.fromkeys(range(4), 1000)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 12])
def test_no_copy_sends_more_than_another(count: int) -> None:
    sent = loads({(0, 1, 2, 3): 12_000}, count)
    assert max(sent.values()) <= 1.001 * sum(sent.values()) / 4


def test_many_replicas_need_one_or_two_copies_each() -> None:
    for index in range(10):
        (quotas,) = divide({tuple(range(7)): 7000}, (index, 10), 1).values()
        assert len(quotas) <= 2


def test_replicas_that_use_a_copy_wholly_use_it_alike() -> None:
    ranks = tuple(range(3))
    divided = [divide({ranks: 900}, (index, 6), 1)[ranks] for index in range(6)]
    assert divided == [[Quota(n // 2, 900)] for n in range(6)]


def test_a_rank_that_alone_holds_something_sends_less_of_the_rest() -> None:
    sent = loads({(0,): 600, (0, 1, 2): 900}, 1)
    assert sent == {0: 600, 1: 450, 2: 450}


def test_what_is_next_to_nothing_comes_from_a_rank_in_use() -> None:
    """A norm that everybody holds opens no session."""
    divided = divide({(3,): 100 * MIB, tuple(range(64)): 8192}, (0, 1), 4 * MIB)
    assert divided[tuple(range(64))] == [Quota(3, pytest.approx(8192))]


def test_a_sliver_is_left_to_the_others() -> None:
    """The last of three replicas would take 15 bytes from rank 5, which it does not use yet."""
    demand = {(2,): 10_000, (1, 5, 9): 14_970, (2, 3, 5): 5_000}
    divided = divide(demand, (2, 3), 1)
    assert divided[1, 5, 9] == [Quota(9, pytest.approx(14_970))]
    assert divided[2, 3, 5] == [Quota(2, pytest.approx(7.5)), Quota(3, pytest.approx(4992.5))]


def test_a_lone_sink_does_not_talk_to_hundreds_of_copies() -> None:
    ranks = tuple(range(1000))
    (quotas,) = divide({ranks: 1_000_000}, (0, 1), 1).values()
    assert len(quotas) == 256
    assert quotas[0].rank < 4
    assert quotas[-1].rank > 995
    assert sum(quota.nbytes for quota in quotas) == pytest.approx(1_000_000)


def test_items_are_spread_in_proportion_and_from_the_start() -> None:
    spread = Spread([Quota(8, 300.0), Quota(9, 100.0)])
    given = [spread.deal(10) for _ in range(40)]
    assert Counter(given) == {0: 30, 1: 10}
    for start in range(0, 40, 8):
        assert set(given[start : start + 8]) == {0, 1}


def test_large_demands_are_dealt_in_larger_runs() -> None:
    even = [Quota(n, 1024.0 * MIB) for n in range(4)]
    assert num_dealt_at_once(even, 4 * MIB) == 4
    assert num_dealt_at_once(even, 64 * MIB) == 1
