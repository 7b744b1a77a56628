"""Bad input at the API: each is refused within seconds, by name, on whichever side can say it."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from streamsync.config import Config, Deadlines
from streamsync.control.hub import Hub
from streamsync.errors import (
    ConfigError,
    ControlError,
    MissingExtraError,
    PlanError,
    StreamsyncError,
    VersionError,
)
from streamsync.publisher import AsyncPublisher, Publisher
from streamsync.subscriber import Subscriber
from streamsync.testing.job import LocalJob
from tests.sync_rig import StillEngine, bits, differing, fill, until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec

QUICK = Config(transport="tcp", deadlines=Deadlines(connect=2, progress=4, total=12, gate=8, lag=3))
SECRET = "a secret of this job"
NOWHERE = "tcp://127.0.0.1:9"


def tensors() -> dict[str, torch.Tensor]:
    return {"layers.0.weight": torch.zeros(4, 4)}


def both(hub: str, secret: str) -> list[Publisher | Subscriber]:
    return [
        Publisher(tensors(), hub=hub, secret=secret, config=QUICK),
        Subscriber(StillEngine(tensors()), hub=hub, secret=secret, config=QUICK),
    ]


def test_an_unreachable_hub() -> None:
    for side in both(NOWHERE, SECRET):
        with pytest.raises(ControlError, match=r"127\.0\.0\.1:9 is unreachable"):
            side.start()


def test_a_hub_that_is_no_address() -> None:
    for side in both("somewhere:else", SECRET):
        with pytest.raises(ConfigError, match="somewhere:else"):
            side.start()


def test_a_wrong_secret() -> None:
    with Hub(secret=SECRET) as hub:
        for side in both(hub.address, SECRET + "?"):
            with pytest.raises(ControlError, match="secret differs"):
                side.start()


def test_a_secret_too_short() -> None:
    with pytest.raises(ConfigError, match="at least 8 bytes"):
        Hub(secret="short").start()
    for side in both(NOWHERE, "short"):
        with pytest.raises(ConfigError, match="at least 8 bytes"):
            side.start()


def test_a_port_in_use() -> None:
    with Hub(secret=SECRET) as hub:
        port = int(hub.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=str(port)):
            Hub(secret=SECRET, port=port).start()


def test_a_rank_beyond_num_ranks() -> None:
    with pytest.raises(ConfigError, match="rank 2 is not below num_ranks 2"):
        Publisher(tensors(), hub=NOWHERE, secret=SECRET, rank=2, num_ranks=2)
    with pytest.raises(ConfigError, match="rank 1 is not below num_ranks 1"):
        Subscriber(StillEngine(tensors()), hub=NOWHERE, secret=SECRET, rank=1)


def test_num_ranks_that_do_not_agree() -> None:
    with LocalJob(QUICK) as job:
        job.add_sources([tensors()])
        job.add_replica([StillEngine(tensors())])
        second = Publisher(
            tensors(), hub=job.hub.address, secret=job.secret, rank=1, num_ranks=2, config=QUICK
        )
        with pytest.raises(ControlError, match="num_ranks=1 by trainer/0"):
            second.start()
        other = Subscriber(
            StillEngine(tensors()),
            hub=job.hub.address,
            secret=job.secret,
            rank=1,
            num_ranks=2,
            config=QUICK,
        )
        with pytest.raises(ControlError, match="num_ranks=1 by engine/0"):
            other.start()
        job.wait_for_replicas()
        job.sync()


def test_one_name_for_a_trainer_and_an_engine() -> None:
    with LocalJob(QUICK) as job:
        job.add_sources([tensors()])
        with pytest.raises(ControlError, match="trainer"):
            job.add_replica([StillEngine(tensors())], name="trainer")


@pytest.mark.parametrize("side", ["source", "sink"])
def test_a_transport_that_the_other_side_does_not_take(side: str) -> None:
    ours, theirs = (Config(transport="tcp"), Config(transport="shm"))
    if side == "source":
        ours, theirs = theirs, ours
    with LocalJob(ours) as job:
        job.add_sources([tensors()])
        (subscriber,) = job.add_replica([StillEngine(tensors())], config=theirs)
        with pytest.raises(PlanError, match="set both alike"):
            job.wait_for_replicas(timeout=20)
        with pytest.raises(ConfigError, match="set both alike"):
            subscriber.wait(timeout=20)


@pytest.mark.parametrize("at_source", [True, False])
def test_digests_on_one_side_only(at_source: bool) -> None:
    with LocalJob(Config(transport="tcp", digest=at_source)) as job:
        job.add_sources([tensors()])
        (subscriber,) = job.add_replica(
            [StillEngine(tensors())], config=Config(transport="tcp", digest=not at_source)
        )
        with pytest.raises(PlanError, match="digests are"):
            job.wait_for_replicas(timeout=20)
        with pytest.raises(ConfigError, match="digests are"):
            subscriber.wait(timeout=20)


class _Missing:
    """An import system without one distribution's modules."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] == self._name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ucx` asked for where ucxx is not installed: at both ends an error that names the extra."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "ucxx"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "streamsync.transports.ucx", raising=False)
    monkeypatch.setattr(sys, "meta_path", [_Missing("ucxx"), *sys.meta_path])
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "ucxx" else real(name, *rest),
    )
    with LocalJob(Config(transport="ucx")) as job:
        job.add_sources([tensors()])
        (subscriber,) = job.add_replica([StillEngine(tensors())])
        with pytest.raises(ConfigError, match=r"streamsync\[ucx\]"):
            subscriber.wait(timeout=20)
        with pytest.raises(StreamsyncError, match=r"streamsync\[ucx\]"):
            job.wait_for_replicas(timeout=20)
    assert MissingExtraError("ucx", "ucx").extra == "ucx"


def test_two_source_groups_are_one_too_many() -> None:
    """A sink that finds two trainers waits and says which."""
    with LocalJob(QUICK) as job:
        job.add_sources([tensors()])
        with Publisher(
            tensors(), hub=job.hub.address, secret=job.secret, group="second", config=QUICK
        ):
            (subscriber,) = job.add_replica([StillEngine(tensors())])
            with pytest.raises(StreamsyncError, match="several source groups joined"):
                subscriber.wait(timeout=3)


def test_waiting_for_what_was_never_published() -> None:
    from streamsync.types import Version

    with LocalJob(QUICK) as job:
        job.add_sources([tensors()])
        with pytest.raises(VersionError, match="never published"):
            job.publishers[0].wait(Version(1, 2))
        with pytest.raises(ControlError, match="0 of 1 replicas"):
            job.wait_for_replicas(timeout=0.2)


def test_calls_after_close() -> None:
    with LocalJob(QUICK) as job:
        job.add_sources([tensors()])
        (subscriber,) = job.add_replica([StillEngine(tensors())])
        job.wait_for_replicas()
    for call in (job.publishers[0].publish, subscriber.wait):
        with pytest.raises(StreamsyncError, match="not running: closed"):
            call()
    job.publishers[0].close()
    subscriber.close()


async def test_a_cancelled_publish_gives_its_version_up() -> None:
    """`publish` cancelled while it waits behind a running sync: the version is never sent, since
    the parameters may change at any moment; later ones are."""
    source, sink = tensors(), tensors()
    engine = StillEngine(sink)
    job = await asyncio.to_thread(LocalJob(QUICK).__enter__)
    try:
        await asyncio.to_thread(job.add_replica, [engine])
        made = partial(AsyncPublisher, source, hub=job.hub.address, secret=job.secret, config=QUICK)
        async with await asyncio.to_thread(made) as publisher:
            await publisher.wait_for_replicas(timeout=20)
            await publisher.sync(0)
            engine.slow_seconds = 1.0
            first = await publisher.publish(1)
            fill(source, 2)
            waiting = asyncio.create_task(publisher.publish(2))
            await asyncio.sleep(0.1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await publisher.wait(first)
            engine.slow_seconds = 0
            assert bits(sink["layers.0.weight"]) == bytes(64)
            last = await publisher.publish(3)
            outcomes = await publisher.wait(last, timeout=20)
            assert [outcome.state for outcome in outcomes] == ["committed"]
            assert differing(source, sink) == []
            calls = engine.calls.count("commit")
            assert calls == 3, "the cancelled version was sent after all"
    finally:
        await asyncio.to_thread(job.__exit__, None, None, None)


@pytest.fixture
def _interrupts() -> Iterator[None]:
    """A test run that a script started in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts")
def test_an_interrupted_publish_gives_its_version_up() -> None:
    """Ctrl-C in `publish` that waits behind a running sync: as if cancelled."""
    source, sink = tensors(), tensors()
    engine = StillEngine(sink)
    with LocalJob(QUICK) as job:
        job.add_sources([source])
        job.add_replica([engine])
        job.wait_for_replicas()
        job.sync(0)
        engine.slow_seconds = 1.0
        first = job.publishers[0].publish(1)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            job.publishers[0].publish(2)
        timer.join()
        fill(source, 3)
        job.publishers[0].wait(first)
        engine.slow_seconds = 0
        until(lambda: engine.calls.count("commit") == 2)
        assert bits(sink["layers.0.weight"]) == bytes(64), "the interrupted version was sent"
        job.sync(3)
        assert differing(source, sink) == []
        assert engine.calls.count("commit") == 3
