"""A whole job in one process: a hub, source ranks, sink ranks, each in its own thread and loop."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from streamsync.control.hub import Hub
from streamsync.publisher import Publisher
from streamsync.subscriber import Subscriber

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    import torch
    from torch import nn

    from streamsync.config import Config
    from streamsync.engines.base import Engine
    from streamsync.layout.binding import Binding
    from streamsync.observability.probe import Probe
    from streamsync.plan.plan import Rules
    from streamsync.types import Apply, Arm, Outcome, Version


class LocalJob:
    """A context manager: add sources and replicas, then `publish`. Everything closes with it.

    Real sockets, real sessions, real stages; only the processes are threads here.
    """

    def __init__(self, config: Config | None = None, *, lost_seconds: float = 30.0) -> None:
        self.config = config
        self.secret = secrets.token_hex(16)
        self.hub = Hub(secret=self.secret, lost_seconds=lost_seconds)
        self.publishers: list[Publisher] = []
        self.subscribers: list[Subscriber] = []
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(self.hub)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def add_sources(
        self,
        sources: Sequence[nn.Module | Mapping[str, torch.Tensor] | Binding],
        *,
        probe: Probe | None = None,
    ) -> None:
        """The ranks of the one source group, all at once."""
        for rank, source in enumerate(sources):
            publisher = Publisher(
                source,
                hub=self.hub.address,
                secret=self.secret,
                rank=rank,
                num_ranks=len(sources),
                config=self.config,
                probe=probe,
            )
            self.publishers.append(self._open.enter_context(publisher))

    def add_replica(
        self,
        engines: Sequence[Engine],
        *,
        name: str = "engine",
        apply: Apply = "layer",
        arm: Arm = "late",
        rules: Rules | None = None,
        probe: Probe | None = None,
        config: Config | None = None,
    ) -> list[Subscriber]:
        """The ranks of one replica."""
        added = []
        for rank, engine in enumerate(engines):
            subscriber = Subscriber(
                engine,
                hub=self.hub.address,
                secret=self.secret,
                replica=name,
                rank=rank,
                num_ranks=len(engines),
                apply=apply,
                arm=arm,
                rules=rules,
                config=config or self.config,
                probe=probe,
            )
            added.append(self._open.enter_context(subscriber))
        self.subscribers += added
        return added

    def wait_for_replicas(self, num_replicas: int = 1, timeout: float = 30.0) -> None:
        """Until every source has so many complete replicas."""
        for publisher in self.publishers:
            publisher.wait_for_replicas(num_replicas, timeout)

    def publish(self, step: int | None = None) -> Version:
        """All source ranks at once, as a trainer's ranks do."""
        with ThreadPoolExecutor(len(self.publishers)) as threads:
            versions: list[Version] = list(
                threads.map(lambda publisher: publisher.publish(step), self.publishers)
            )
        assert len(set(versions)) == 1
        return versions[0]

    def wait(self, version: Version, timeout: float = 60.0) -> list[Outcome]:
        """Until every source knows every outcome; raises unless all replicas committed."""
        return [o for p in self.publishers for o in p.wait(version, timeout=timeout)]

    def sync(self, step: int | None = None) -> Version:
        """`publish` and `wait`."""
        version = self.publish(step)
        self.wait(version)
        return version
