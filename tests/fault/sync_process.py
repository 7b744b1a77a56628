"""A process that is one side of a job, for tests that kill or stop it: told over a pipe
what to do."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import time
from typing import TYPE_CHECKING, Any

import torch

from streamsync.config import Config, Deadlines
from streamsync.errors import StreamsyncError
from streamsync.publisher import Publisher
from streamsync.subscriber import Subscriber
from tests.sync_rig import StillEngine, bits, fill

if TYPE_CHECKING:
    import signal
    from multiprocessing.connection import Connection

    from streamsync.types import Version

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.fault.sync_process", "streamsync.transports.shm"])

SHORT = Deadlines(connect=5, progress=1.5, total=60, gate=5, lag=3)
NUM_LAYERS = 24


def config(transport: str) -> Config:
    """Tiny buckets and a pool of half the share, so that a sync has a middle."""
    return Config(transport=transport, bucket_bytes=512, pool_bytes=8192, deadlines=SHORT)  # type: ignore[arg-type]


def layers() -> dict[str, torch.Tensor]:
    return {f"layers.{i}.weight": torch.zeros(16, 8) for i in range(NUM_LAYERS)}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(bits(t) for t in tensors.values())).hexdigest()


class Process:
    """The test's end of a child that it owns."""

    def __init__(self, role: str, hub: str, secret: str, transport: str, name: str) -> None:
        self.talk, theirs = _processes.Pipe()
        self.child = _processes.Process(
            target=main, args=(theirs, role, hub, secret, transport, name), daemon=True
        )
        self.child.start()
        theirs.close()
        self.hear()

    def tell(self, do: str, *args: float) -> None:
        self.talk.send((do, *args))

    def hear(self, seconds: float = 50) -> Any:
        assert self.talk.poll(seconds), f"the child said nothing for {seconds} s"
        return self.talk.recv()

    def ask(self, do: str, *args: float) -> Any:
        self.tell(do, *args)
        return self.hear()

    def signal(self, number: signal.Signals) -> None:
        assert self.child.pid is not None
        os.kill(self.child.pid, number)

    def end(self) -> None:
        self.child.kill()
        self.child.join()
        self.child.close()
        self.talk.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()


class Sink:
    """What a child that is a sink can be asked."""

    def __init__(self, hub: str, secret: str, transport: str, name: str) -> None:
        self.tensors = layers()
        self.engine = StillEngine(self.tensors)
        self.side = Subscriber(
            self.engine,
            hub=hub,
            secret=secret,
            replica=name,
            config=config(transport),
            apply="layer",
        )

    def slow(self, seconds: float) -> None:
        self.engine.slow_seconds = seconds

    def landed(self, count: int) -> None:
        """Answers once `count` more layers landed."""
        wanted = self.engine.calls.count("open_gate") + count
        while self.engine.calls.count("open_gate") < wanted:
            time.sleep(0.005)

    def wait(self, step: int) -> str:
        self.side.wait(step, timeout=20)
        return digest(self.tensors)

    def state(self) -> tuple[str, str, str]:
        return self.side.state, digest(self.tensors), str(self.side._rank.error)


class Source:
    """What a child that is a source can be asked."""

    def __init__(self, hub: str, secret: str, transport: str, name: str) -> None:
        self.tensors = layers()
        self.side = Publisher(
            self.tensors, hub=hub, secret=secret, group=name, config=config(transport)
        )
        self.version: Version | None = None

    def replicas(self, count: int) -> None:
        self.side.wait_for_replicas(count, 30)

    def publish(self, step: int) -> tuple[int, str]:
        fill(self.tensors, step)
        self.version = self.side.publish(step)
        return self.version.epoch, digest(self.tensors)

    def outcomes(self) -> dict[str, tuple[str, str]]:
        assert self.version is not None
        outcomes = self.side.wait(self.version, require=0, timeout=40)
        return {o.replica: (o.state, o.text) for o in outcomes}


def main(talk: Connection, role: str, *args: str) -> None:
    served: Sink | Source = (Sink if role == "sink" else Source)(*args)
    with served.side, contextlib.suppress(EOFError):
        talk.send(None)
        while True:
            do, *rest = talk.recv()
            try:
                answer = getattr(served, do)(*rest)
            except StreamsyncError as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            talk.send(answer)
