"""Cases 32, 43 and 44 over whole syncs: a process is killed or stopped, the hub dies, and the next
sync works or says why not."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from streamsync.control.hub import Hub
from streamsync.errors import StreamsyncError, VersionError
from streamsync.publisher import Publisher
from streamsync.subscriber import Subscriber
from streamsync.transports.ucx_library import is_installed
from tests.fault.sync_process import NUM_LAYERS, Process, config, digest, layers
from tests.sync_rig import StillEngine, fill, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from streamsync.types import Outcome, Version

pytestmark = pytest.mark.timeout(120)
SECRET = "the secret of a test"
SECONDS = 45.0
"""More than all deadlines together, on a loaded machine."""
transports = pytest.mark.parametrize("transport", ["tcp", "shm"])


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(secret=SECRET, lost_seconds=4) as hub:
        yield hub


class Trainer:
    """A source in this process."""

    def __init__(self, hub: Hub | str, transport: str) -> None:
        self.tensors: dict[str, torch.Tensor] = layers()
        self.publisher = Publisher(
            self.tensors, hub=address(hub), secret=SECRET, config=config(transport)
        )
        self.step = -1

    def __enter__(self) -> Trainer:
        self.publisher.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.publisher.close()

    def publish(self) -> Version:
        self.step += 1
        fill(self.tensors, self.step)
        return self.publisher.publish(self.step)

    def sync(self) -> str:
        """A sync that every replica of now commits; returns the digest of what was sent."""
        outcomes = self.publisher.wait(self.publish(), timeout=SECONDS)
        assert outcomes, "no replica took part"
        return digest(self.tensors)

    def outcomes(self, version: Version) -> dict[str, Outcome]:
        found = self.publisher.wait(version, require=0, timeout=SECONDS)
        return {outcome.replica: outcome for outcome in found}


def address(hub: Hub | str) -> str:
    return hub if isinstance(hub, str) else hub.address


def sink(hub: Hub | str, transport: str, name: str = "engine") -> Process:
    return Process("sink", address(hub), SECRET, transport, name)


def source(hub: Hub, transport: str) -> Process:
    return Process("source", hub.address, SECRET, transport, "trainer")


@pytest.mark.skipif(not is_installed(), reason="needs ucxx")
def test_ucx_between_processes(hub: Hub) -> None:
    """Case 20: the same bytes over ucx, which needs two processes."""
    with Trainer(hub, "ucx") as trainer, sink(hub, "ucx") as engine:
        trainer.publisher.wait_for_replicas(timeout=SECONDS)
        for _ in range(3):
            sent = trainer.sync()
            assert engine.ask("wait", trainer.step) == sent
        assert trainer.publisher.transports() == {"engine/0": "ucx"}


@transports
@pytest.mark.parametrize("when", ["before", "middle", "after"])
def test_a_sink_is_killed(hub: Hub, transport: str, when: str) -> None:
    """Case 32: SIGKILL before the sync, in its middle, after its last byte: the source says who and
    goes on; case 44: a new process of the same name gets the next version."""
    with Trainer(hub, transport) as trainer:
        with sink(hub, transport) as engine:
            trainer.publisher.wait_for_replicas(timeout=SECONDS)
            trainer.sync()
            if when == "middle":
                engine.ask("slow", 0.1)
                publishing = threading.Thread(target=trainer.publish)
                publishing.start()
                engine.ask("landed", NUM_LAYERS // 4)
                engine.signal(signal.SIGKILL)
                publishing.join(SECONDS)
                assert not publishing.is_alive(), "publish hangs on a dead sink"
                newest = trainer.publisher._rank._machine.newest
                assert newest is not None
                outcome = trainer.outcomes(newest)["engine"]
                assert outcome.state == "failed"
                assert "ended" in outcome.text or "gone" in outcome.text
            else:
                if when == "after":
                    trainer.sync()
                engine.signal(signal.SIGKILL)
                engine.child.join()
                outcomes = trainer.outcomes(trainer.publish())
                assert all(o.state == "failed" for o in outcomes.values())
        with sink(hub, transport) as engine:
            trainer.publisher.wait_for_replicas(timeout=SECONDS)
            sent = trainer.sync()
            assert engine.ask("wait", trainer.step) == sent
        pool = trainer.publisher._rank._pool
        until(lambda: pool.num_outstanding == 0)


@transports
def test_a_sink_is_stopped(hub: Hub, transport: str) -> None:
    """Case 32: SIGSTOP in the middle: within the deadlines the version fails by the sink's name;
    after SIGCONT the sink heals with the next version. Case 43: the other replica commits, and
    nothing waits longer than the deadlines."""
    with (
        Trainer(hub, transport) as trainer,
        sink(hub, transport, "stuck") as stuck,
        sink(hub, transport, "alive") as alive,
    ):
        trainer.publisher.wait_for_replicas(2, timeout=SECONDS)
        trainer.sync()
        stuck.ask("slow", 0.1)
        published: list[Version] = []
        publishing = threading.Thread(target=lambda: published.append(trainer.publish()))
        publishing.start()
        stuck.ask("landed", 2)
        stuck.signal(signal.SIGSTOP)
        publishing.join(30)
        assert not publishing.is_alive(), "publish hangs on a stopped sink"
        # Far below the total deadline: a stopped sink is noticed by its silence.
        outcomes = trainer.publisher.wait(published[0], require="any", timeout=30)
        states = {outcome.replica: outcome.state for outcome in outcomes}
        assert states["alive"] == "committed"
        assert states["stuck"] in ("failed", "dropped")
        with pytest.raises(VersionError, match="stuck"):
            trainer.publisher.wait(published[0])
        assert alive.ask("wait", trainer.step) == digest(trainer.tensors)
        stuck.signal(signal.SIGCONT)
        stuck.ask("slow", 0)
        until(lambda: len(trainer.publisher.transports()) == 2, SECONDS)
        sent = trainer.sync()
        assert stuck.ask("wait", trainer.step) == sent
        assert alive.ask("wait", trainer.step) == sent


@contextlib.contextmanager
def engine_here(hub: Hub | str, transport: str) -> Iterator[tuple[Subscriber, StillEngine, dict]]:
    tensors = layers()
    engine = StillEngine(tensors)
    with Subscriber(
        engine, hub=address(hub), secret=SECRET, config=config(transport)
    ) as subscriber:
        yield subscriber, engine, tensors


@transports
def test_a_source_is_killed(hub: Hub, transport: str) -> None:
    """Case 32: SIGKILL of the source in the middle: the sink says so by the source's name and is
    quarantined or keeps the old version, never a torn one; case 44: a restarted trainer gets a new
    epoch, and its first version heals."""
    with engine_here(hub, transport) as (subscriber, engine, tensors):
        with source(hub, transport) as trainer:
            trainer.ask("replicas", 1)
            epoch, sent = trainer.ask("publish", 0)
            subscriber.wait(0, timeout=SECONDS)
            assert digest(tensors) == sent
            engine.slow_seconds = 0.1
            seen = engine.calls.count("open_gate")
            trainer.tell("publish", 1)
            until(lambda: engine.calls.count("open_gate") > seen + 2)
            trainer.signal(signal.SIGKILL)
            until(lambda: subscriber.state in ("serving", "quarantined"), SECONDS)
            assert subscriber.state == "quarantined"
            assert subscriber.version is None
            until(lambda: engine.quarantined, SECONDS)
            assert "trainer/0" in engine.quarantined
        engine.slow_seconds = 0
        with source(hub, transport) as trainer:
            trainer.ask("replicas", 1)
            again, sent = trainer.ask("publish", 0)
            assert again > epoch
            assert trainer.ask("outcomes")["engine"][0] == "committed"
            version = subscriber.wait(0, timeout=SECONDS)
            assert (version.epoch, version.step) == (again, 0)
            assert digest(tensors) == sent
            assert not engine.quarantined


@transports
def test_a_source_is_stopped(hub: Hub, transport: str) -> None:
    """Case 32: SIGSTOP of the source in the middle: the sink fails the version by name within its
    deadlines; after SIGCONT the next version heals."""
    with (
        engine_here(hub, transport) as (subscriber, engine, tensors),
        source(hub, transport) as trainer,
    ):
        trainer.ask("replicas", 1)
        trainer.ask("publish", 0)
        subscriber.wait(0, timeout=SECONDS)
        engine.slow_seconds = 0.1
        seen = engine.calls.count("open_gate")
        trainer.tell("publish", 1)
        until(lambda: engine.calls.count("open_gate") > seen + 2)
        trainer.signal(signal.SIGSTOP)
        until(lambda: subscriber.state == "quarantined", SECONDS)
        until(lambda: engine.quarantined, SECONDS)
        assert "trainer/0" in engine.quarantined
        engine.slow_seconds = 0
        trainer.signal(signal.SIGCONT)
        trainer.hear()
        assert trainer.ask("outcomes")["engine"][0] == "failed"
        trainer.ask("replicas", 1)  # the sink, which gave the silent source up, tries again
        _, sent = trainer.ask("publish", 2)
        assert trainer.ask("outcomes")["engine"][0] == "committed"
        subscriber.wait(2, timeout=SECONDS)
        assert digest(tensors) == sent


def test_the_hub_dies_and_comes_back() -> None:
    """Case 44: without a hub syncs go on; a new one at the same port learns all members again."""
    with contextlib.ExitStack() as stack:
        first = Hub(secret=SECRET)
        first.start()
        trainer = stack.enter_context(Trainer(first, "tcp"))
        subscriber, _, tensors = stack.enter_context(engine_here(first, "tcp"))
        trainer.publisher.wait_for_replicas(timeout=SECONDS)
        trainer.sync()
        epoch = trainer.publisher._rank._machine.newest.epoch
        port = int(first.address.rpartition(":")[2])
        first.close()
        for _ in range(2):
            assert trainer.sync() == digest(tensors)
        with Hub(secret=SECRET, port=port) as second:
            until(lambda: second.num_members == 2, SECONDS)
            assert trainer.sync() == digest(tensors)
            with sink(second, "tcp", "late") as late:
                until(lambda: len(trainer.publisher.transports()) == 2, SECONDS)
                until(lambda: trainer.publisher.wait_for_replicas(2, SECONDS) is None, SECONDS)
                sent = trainer.sync()
                assert late.ask("wait", trainer.step) == sent == digest(tensors)
            assert trainer.publisher._rank._machine.newest.epoch == epoch
        assert subscriber.version is not None


def test_the_hub_process_is_killed() -> None:
    """Case 44: SIGKILL of the hub. Members register with the one that takes its port, are asked for
    their outlines again, and nobody loses a session or gets other bytes than before."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(hub_process(port))
        trainer = stack.enter_context(Trainer(f"tcp://127.0.0.1:{port}", "tcp"))
        subscriber, _, tensors = stack.enter_context(engine_here(f"tcp://127.0.0.1:{port}", "tcp"))
        trainer.publisher.wait_for_replicas(timeout=SECONDS)
        trainer.sync()
        shares = [share.digest for share in subscriber.plan.shares]
        session = subscriber._rank._subscriptions.peers["trainer/0"]
        epoch = trainer.publisher._rank._machine.newest.epoch
        first.kill()
        first.wait()
        assert trainer.sync() == digest(tensors)
        stack.enter_context(hub_process(port))
        with sink(f"tcp://127.0.0.1:{port}", "tcp", "late") as late:
            trainer.publisher.wait_for_replicas(2, SECONDS)
            sent = trainer.sync()
            assert late.ask("wait", trainer.step) == sent == digest(tensors)
        assert trainer.publisher._rank._machine.newest.epoch == epoch
        assert [share.digest for share in subscriber.plan.shares] == shares
        assert subscriber._rank._subscriptions.peers["trainer/0"] is session


@contextlib.contextmanager
def hub_process(port: int) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "streamsync", "hub", "--port", str(port)],
        env=os.environ | {"STREAMSYNC_SECRET": SECRET},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert str(port) in process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_nothing_is_left_of_dead_peers(hub: Hub) -> None:
    """Sinks that come, are killed and come again cost no descriptor, lease or thread."""

    def footprint() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with Trainer(hub, "shm") as trainer:
        counts = []
        for _ in range(3):
            with sink(hub, "shm") as engine:
                trainer.publisher.wait_for_replicas(timeout=SECONDS)
                trainer.sync()
                engine.signal(signal.SIGKILL)
                engine.child.join()
            until(lambda: not trainer.publisher.transports(), SECONDS)
            time.sleep(0.3)
            counts.append(footprint())
        assert all(after <= before for before, after in zip(counts[1], counts[2], strict=True))
        assert trainer.publisher._rank._pool.used_bytes == 0
        with pytest.raises(StreamsyncError, match="0 of 1 replicas"):
            trainer.publisher.wait_for_replicas(timeout=0.1)
