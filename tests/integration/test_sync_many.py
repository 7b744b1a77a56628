"""Replicas of several ranks with sources that most of them take nothing from, and copies among
sources: who talks to whom, and what moves when one comes or goes."""

from __future__ import annotations

import torch

from streamsync.config import Config
from streamsync.layout.binding import Binding
from streamsync.layout.region import Box, Entry, Layout, TensorSpec, View
from streamsync.testing.job import LocalJob
from tests.sync_rig import StillEngine, bits, fill, until

CONFIG = Config(transport="memory")


def names(count: int) -> list[str]:
    return [f"layers.{n}.weight" for n in range(count)]


def holding(tensors: dict[str, torch.Tensor], held: list[str]) -> Binding:
    """A rank that lists all `tensors` and holds some."""
    numbers = {name: number for number, name in enumerate(tensors)}
    return Binding(
        layout=Layout(
            tensors=tuple(TensorSpec(n, tuple(t.shape), "float32") for n, t in tensors.items()),
            entries=tuple(
                Entry(numbers[name], Box((0, 0), (4, 3)), View(storage, 0, (3, 1)))
                for storage, name in enumerate(held)
            ),
        ),
        storages=[tensors[name] for name in held],
    )


def fresh(count: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(4, 3) for name in names(count)}


def sessions(job: LocalJob) -> dict[str, set[str]]:
    return {p.name: set(p._rank._audience.peers) for p in job.publishers}


def test_every_source_hears_of_a_replica_through_one_rank_at_least() -> None:
    """Six sources hold a layer each, three ranks need one each of the first three: source number i
    also has a session with rank i modulo 3, and with no other."""
    source, sinks = fresh(6), [fresh(6) for _ in range(3)]
    with LocalJob(CONFIG) as job:
        job.add_sources([holding(source, [name]) for name in source])
        job.add_replica(
            [StillEngine(holding(sinks[rank], [names(6)[2 - rank]])) for rank in range(3)]
        )
        job.wait_for_replicas()
        engine = [f"engine/{rank}" for rank in range(3)]
        assert sessions(job) == {
            "trainer/0": {engine[0], engine[2]},
            "trainer/1": {engine[1]},
            "trainer/2": {engine[2], engine[0]},
            "trainer/3": {engine[0]},
            "trainer/4": {engine[1]},
            "trainer/5": {engine[2]},
        }
        for step in range(3):
            fill(source, step)
            version = job.publish(step)
            for publisher in job.publishers:
                (outcome,) = publisher.wait(version)
                assert (outcome.replica, outcome.state) == ("engine", "committed")
            for rank in range(3):
                name = names(6)[2 - rank]
                assert bits(sinks[rank][name]) == bits(source[name])


def test_a_rank_that_needs_nothing_hears_of_versions() -> None:
    """More ranks than sources, and one without a byte: the replica still commits as one."""
    source, sinks = fresh(1), [fresh(1) for _ in range(3)]
    with LocalJob(CONFIG) as job:
        job.add_sources([holding(source, names(1))])
        held = [names(1), [], names(1)]
        subscribers = job.add_replica(
            [StillEngine(holding(tensors, h)) for tensors, h in zip(sinks, held, strict=True)]
        )
        job.wait_for_replicas()
        fill(source, 1)
        version = job.sync(0)
        for subscriber in subscribers:
            assert subscriber.wait(0) == version


def test_replicas_that_come_are_balanced_and_every_version_is_whole() -> None:
    """Four copies of the source, replicas that come one by one: slots are dealt anew as they grow,
    which costs nobody a session, and no version is lost to that."""
    source = fresh(8)
    sinks: list[dict[str, torch.Tensor]] = []
    with LocalJob(CONFIG) as job:
        job.add_sources([holding(source, names(8)) for _ in range(4)])
        for number in range(4):
            sinks.append(fresh(8))
            job.add_replica([StillEngine(sinks[-1])], name=f"engine{number}")
            job.wait_for_replicas(number + 1)
            fill(source, number)
            job.sync(number)
            for tensors in sinks:
                assert all(bits(tensors[name]) == bits(source[name]) for name in source)
        slots = {s._rank._enrolment.slot for s in job.subscribers}
        assert {count for _, count in slots} == {4}
        assert len(slots) == 4


def test_a_restarted_source_costs_no_plan_and_no_other_session() -> None:
    source, sink = fresh(2), fresh(2)
    with LocalJob(CONFIG, lost_seconds=2) as job:
        job.add_sources([holding(source, [name]) for name in source])
        (subscriber,) = job.add_replica([StillEngine(sink)])
        job.wait_for_replicas()
        job.sync(0)
        plan, peers = subscriber.plan, dict(subscriber._rank._subscriptions.peers)
        first = job.publishers[0]
        first.close()
        again = type(first)(
            holding(source, names(1)),
            hub=job.hub.address,
            secret=job.secret,
            num_ranks=2,
            config=CONFIG,
        )
        with again:
            job.publishers[0] = again
            again.wait_for_replicas()
            until(lambda: len(subscriber._rank._subscriptions.peers) == 2)
            fill(source, 5)
            job.sync(3)
            assert all(bits(sink[name]) == bits(source[name]) for name in source)
            assert subscriber.plan is plan
            now = subscriber._rank._subscriptions.peers
            assert now["trainer/1"] is peers["trainer/1"]
            assert now["trainer/0"] is not peers["trainer/0"]
