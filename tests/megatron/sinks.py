"""The other side of a Megatron job: replicas of several sizes in the test's own process."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

import msgspec
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

    import torch

    from streamsync.plan.plan import Rules
    from streamsync.types import Version
    from tests.megatron.scenarios import Scenario


class Keeper(StillEngine):
    """One sink rank, recorded from the loader of its model; `kept[step]` are the bits of all its
    parameters when it committed."""

    def __init__(
        self,
        config: Mapping[str, Any],
        specs: Mapping[str, TensorSpec],
        rank: int,
        size: int,
        dtype: str | None,
    ) -> None:
        self._made_of = config, specs, rank, size, dtype
        self.model = FusedModel(*self._made_of)
        self.kept: dict[int, list[bytes]] = {}
        super().__init__(record_loader(self.model, specs, self.model.load).binding)

    def commit(self, version: Version) -> None:
        super().commit(version)
        self.kept[version.step] = self.model.bits()

    def expected(self, checkpoint: Mapping[str, torch.Tensor]) -> list[bytes]:
        """The bits of a second one of its kind after its loader loaded `checkpoint`."""
        twin = FusedModel(*self._made_of)
        twin.load((name, tensor) for name, tensor in checkpoint.items() if name in twin.names)
        return twin.bits()


class Replicas:
    """Replicas at one hub, as a context manager: `engines[replica][rank]`."""

    def __init__(
        self,
        engines: Mapping[str, Sequence[Keeper]],
        *,
        hub: str,
        secret: str,
        config: Config,
        rules: Rules,
    ) -> None:
        self.engines = engines
        part = msgspec.structs.replace(rules, unused=("*",))  # a draft needs little of a model
        self.subscribers = [
            Subscriber(
                engine,
                hub=hub,
                secret=secret,
                replica=replica,
                rank=rank,
                num_ranks=len(ranks),
                rules=part if replica == "draft" else rules,
                config=config,
            )
            for replica, ranks in engines.items()
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


def replicas_of(scenario: Scenario, path: Path, sizes: Sequence[int]) -> dict[str, list[Keeper]]:
    """Replicas of each size and one of the draft alone, all NaN, for the checkpoint at `path`, of
    which only names, shapes and dtypes are used."""
    specs = {
        name: TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype))
        for name, tensor in load_file(path).items()
    }
    config, dtype = scenario.config, scenario.engine_dtype
    replicas = {
        f"tp{size}": [Keeper(config, specs, rank, size, dtype) for rank in range(size)]
        for size in sizes
    }
    if scenario.has_draft:
        draft = ("model.embed_tokens.", f"model.layers.{config['num_hidden_layers']}.")
        taken = {name: spec for name, spec in specs.items() if name.startswith(draft)}
        replicas["draft"] = [Keeper(config, taken, 0, 1, dtype)]
    return replicas
