"""The other side of a Megatron job: replicas of several sizes in the test's own process."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from safetensors.torch import load_file

import streamsync.transports.shm  # noqa: F401 - else many loops wait for one import at once
from streamsync import Config, Subscriber
from streamsync.layout.binding import dtype_name
from streamsync.layout.recorder import record_loader
from streamsync.layout.region import TensorSpec
from tests.megatron.fused import FusedModel
from tests.sync_rig import StillEngine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from streamsync.plan.plan import Rules
    from streamsync.types import Version


class Keeper(StillEngine):
    """One sink rank around `model`, recorded from the model's own loader for a checkpoint of
    `specs`; `kept[step]` are the bits of all its parameters when it committed."""

    def __init__(self, model: FusedModel, specs: Mapping[str, TensorSpec]) -> None:
        super().__init__(record_loader(model, specs, model.load).binding)
        self.model = model
        self.kept: dict[int, list[bytes]] = {}

    def commit(self, version: Version) -> None:
        super().commit(version)
        self.kept[version.step] = self.model.bits()


class Replicas:
    """Replicas of several sizes at one hub, as a context manager: `engines[size][rank]`."""

    def __init__(
        self,
        engines: Mapping[int, Sequence[Keeper]],
        *,
        hub: str,
        secret: str,
        config: Config,
        rules: Rules | None = None,
    ) -> None:
        self.engines = engines
        self.subscribers = [
            Subscriber(
                engine,
                hub=hub,
                secret=secret,
                replica=f"tp{size}",
                rank=rank,
                num_ranks=size,
                rules=rules,
                config=config,
            )
            for size, ranks in engines.items()
            for rank, engine in enumerate(ranks)
        ]
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            for subscriber in self.subscribers:
                opening.enter_context(subscriber)
            self._open = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def wait(self, step: int, seconds: float) -> None:
        """Until every rank of every replica committed `step`."""
        for subscriber in self.subscribers:
            subscriber.wait(step, seconds)


def specs_of(path: Path) -> dict[str, TensorSpec]:
    """Names, shapes and dtypes of a checkpoint."""
    return {
        name: TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype))
        for name, tensor in load_file(path).items()
    }


def replicas_of(
    path: Path, config: Mapping[str, Any], sizes: Sequence[int]
) -> dict[int, list[Keeper]]:
    """Replicas of each size, all NaN, for the checkpoint at `path`, of which only names, shapes
    and dtypes are used: engines that fuse what they can, recorded from their own loaders."""
    specs = specs_of(path)
    return {
        size: [Keeper(FusedModel(config, specs, rank, size), specs) for rank in range(size)]
        for size in sizes
    }


def expected(
    path: Path, config: Mapping[str, Any], sizes: Sequence[int]
) -> dict[int, list[list[bytes]]]:
    """What the memory of each rank is after its own loader loaded the checkpoint at `path`."""
    checkpoint, specs = load_file(path), specs_of(path)
    wanted: dict[int, list[list[bytes]]] = {}
    for size in sizes:
        wanted[size] = []
        for rank in range(size):
            model = FusedModel(config, specs, rank, size)
            model.load(checkpoint.items())
            wanted[size].append(model.bits())
    return wanted
