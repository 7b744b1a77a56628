"""Slots: replicas stand at equal distances, and one that comes or goes moves nobody."""

from __future__ import annotations

from collections import Counter

import pytest

from streamsync.control.protocol.slots import Slots


def dealt(num_replicas: int) -> Slots:
    slots = Slots()
    for number in range(num_replicas):
        slots.of(f"engine{number}")
    slots.deal()
    return slots


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 7, 128])
def test_replicas_that_are_dealt_slots_have_one_each(num_replicas: int) -> None:
    slots = dealt(num_replicas)
    given = [slots.of(f"engine{number}") for number in range(num_replicas)]
    assert sorted(given) == [(index, num_replicas) for index in range(num_replicas)]
    assert slots.are_even


def test_newcomers_move_nobody_until_they_are_more_than_a_quarter() -> None:
    slots = dealt(8)
    before, generation = dict(slots.indexes), slots.generation
    assert [slots.of("late0"), slots.of("late1")] == [(0, 8), (4, 8)]
    assert not slots.are_even
    assert {name: slots.indexes[name] for name in before} == before
    assert slots.generation == generation
    slots.of("late2")
    assert slots.generation == generation + 1
    assert slots.are_even
    assert slots.count == 11


def test_who_grows_one_by_one_is_never_far_from_even() -> None:
    slots = Slots()
    for number in range(300):
        slots.of(f"engine{number}")
        assert len(slots.indexes) <= 1.25 * slots.count
        assert max(Counter(slots.indexes.values()).values()) <= 2
    assert slots.generation < 30


def test_a_newcomer_takes_the_slot_of_one_that_left() -> None:
    slots = dealt(8)
    slots.leave("engine5")
    slots.leave("nobody")
    assert slots.of("late") == (5, 8)
    assert slots.are_even


def test_more_than_a_quarter_that_left_are_closed_up() -> None:
    slots = dealt(8)
    slots.leave("engine0")
    slots.leave("engine1")
    assert slots.count == 8
    slots.leave("engine2")
    left = [slots.of(f"engine{number}") for number in range(3, 8)]
    assert sorted(left) == [(n, 5) for n in range(5)]


def test_the_last_one_leaves_nothing() -> None:
    slots = dealt(1)
    slots.leave("engine0")
    assert slots.of("other") == (0, 1)


def test_a_new_hub_takes_up_the_slots_that_replicas_hold() -> None:
    old, new = dealt(5), Slots()
    for number in (3, 0, 4, 1, 2):
        new.take_up(f"engine{number}", old.of(f"engine{number}"))
        assert new.of(f"engine{number}") == old.of(f"engine{number}")
    assert new.generation == 0
    assert new.are_even


def test_a_slot_that_does_not_fit_is_not_taken_up() -> None:
    slots = dealt(4)
    for held in [(0, 0), (2, 9), (7, 4), (-1, 4)]:
        slots.take_up("odd", held)
        assert "odd" not in slots.indexes
    slots.take_up("engine0", (3, 4))
    assert slots.of("engine0") == (0, 4)
