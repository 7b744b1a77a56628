"""The hub's books: who is in, and which epoch a source group is in."""

from __future__ import annotations

from typing import Any

import pytest

from streamsync.control.protocol.membership import Joined, Member, Membership


def member(name: str = "trainer/0", **changes: Any) -> Member:
    unit, _, rank = name.partition("/")
    fields: dict[str, Any] = {
        "name": name,
        "role": "source" if unit == "trainer" else "sink",
        "unit": unit,
        "rank": int(rank),
        "num_ranks": 2,
        "endpoint": "tcp://127.0.0.1:1",
        "incarnation": "first life",
    }
    return Member(**fields | changes)


def full(clock: int = 100, epoch: int = 0) -> Membership:
    membership = Membership()
    for rank in range(2):
        membership.join(member(f"trainer/{rank}", epoch=epoch), clock)
    return membership


def test_a_group_is_complete_when_every_rank_is_in() -> None:
    membership = Membership()
    assert not membership.is_complete("trainer", "source")
    membership.join(member("trainer/1"), 100)
    assert not membership.is_complete("trainer", "source")
    assert "trainer" not in membership.epochs
    membership.join(member("trainer/0"), 100)
    assert membership.is_complete("trainer", "source")
    assert [m.rank for m in membership.of("trainer", "source")] == [0, 1]
    assert not membership.is_complete("trainer", "sink")
    assert membership.source_units() == ["trainer"]


def test_every_change_raises_the_membership_epoch() -> None:
    membership = full()
    assert membership.membership_epoch == 2
    assert membership.join(member(), 100) == Joined(replaced=False)
    assert membership.membership_epoch == 2
    assert membership.join(member(incarnation="second life"), 100) == Joined(replaced=True)
    assert membership.membership_epoch == 3
    assert membership.leave("trainer/0", "second life")
    assert membership.membership_epoch == 4


def test_an_epoch_is_above_the_last_one_and_not_below_the_clock() -> None:
    membership = full(clock=100)
    assert membership.epochs["trainer"] == 100
    membership.join(member(incarnation="second life"), 100)
    assert membership.epochs["trainer"] == 101
    membership.join(member(incarnation="third life"), 50)
    assert membership.epochs["trainer"] == 102
    membership.join(member(incarnation="fourth life"), 1000)
    assert membership.epochs["trainer"] == 1000


def test_a_new_hub_keeps_the_epoch_that_all_members_hold() -> None:
    """Case 44."""
    assert full(clock=100, epoch=7).epochs["trainer"] == 7


def test_a_new_hub_with_a_new_member_opens_a_new_epoch() -> None:
    """Case 44: hub and one trainer rank were restarted."""
    membership = Membership()
    membership.join(member("trainer/0", epoch=500), 100)
    membership.join(member("trainer/1"), 100)
    assert membership.epochs["trainer"] == 501


def test_members_that_hold_different_epochs_get_a_new_one() -> None:
    membership = Membership()
    membership.join(member("trainer/0", epoch=500), 100)
    membership.join(member("trainer/1", epoch=600), 100)
    assert membership.epochs["trainer"] == 601


def test_a_member_forgotten_for_silence_comes_back_into_its_epoch() -> None:
    membership = full(clock=100)
    membership.leave("trainer/1", "first life")
    assert not membership.is_complete("trainer", "source")
    membership.join(member("trainer/1", epoch=100), 200)
    assert membership.epochs["trainer"] == 100


def test_an_epoch_below_the_last_one_is_not_kept() -> None:
    membership = full(clock=100)
    for rank in range(2):
        membership.leave(f"trainer/{rank}", "first life")
    for rank in range(2):
        membership.join(member(f"trainer/{rank}", incarnation="other", epoch=50), 60)
    assert membership.epochs["trainer"] == 101


def test_an_engine_changes_no_epoch() -> None:
    membership = full(clock=100)
    for rank in range(2):
        membership.join(member(f"engine/{rank}"), 500)
    assert membership.epochs == {"trainer": 100}


def test_only_the_life_that_is_in_can_leave() -> None:
    membership = full()
    assert not membership.leave("trainer/0", "another life")
    assert not membership.leave("trainer/9", "first life")
    assert membership.is_complete("trainer", "source")


@pytest.mark.parametrize(
    ("newcomer", "says"),
    [
        (member("trainer/2"), "rank 2 is not below num_ranks 2"),
        (member("trainer/1", rank=-1), "rank -1 is not below"),
        (member("engine/0", num_ranks=0), "rank 0 is not below num_ranks 0"),
        (member("trainer/3", num_ranks=4), "num_ranks=2 by trainer/0, but trainer/3 says 4"),
        (member("other/0", unit="trainer", role="source"), "taken by trainer/0"),
        (member("engine/0", unit="trainer"), "already the name of a unit of the other role"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_who_does_not_fit_is_told_why(newcomer: Member, says: str) -> None:
    membership = full()
    before = (membership.membership_epoch, dict(membership.members))
    answer = membership.join(newcomer, 100)
    assert isinstance(answer, str)
    assert says in answer
    assert (membership.membership_epoch, membership.members) == before
