"""The other side of a Megatron job: replicas of several sizes in the test's own process."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

import torch
from safetensors.torch import load_file

import streamsync.transports.shm  # noqa: F401 - else many loops wait for one import at once
from streamsync import Config, Subscriber
from streamsync.layout.binding import dtype_name, torch_dtype
from streamsync.layout.held import Held, assemble
from streamsync.layout.region import Box, TensorSpec
from tests.sync_rig import StillEngine, bits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from streamsync.layout.binding import Binding
    from streamsync.plan.plan import Rules
    from streamsync.types import Version


class Keeper(StillEngine):
    """One sink rank; `kept[step]` are the bits of its memory, storage by storage, when it
    committed."""

    def __init__(self, binding: Binding) -> None:
        super().__init__(binding)
        self.kept: dict[int, list[bytes]] = {}

    def commit(self, version: Version) -> None:
        super().commit(version)
        self.kept[version.step] = self.memory()

    def memory(self) -> list[bytes]:
        """The bits of all storages as they are."""
        return [bits(storage) for storage in self.binding().storages]


def rows(tensors: Mapping[str, TensorSpec], rank: int, size: int) -> Binding:
    """A rank of an engine that fuses nothing: of each tensor an even share of rows, the first ranks
    one more; scalars and the rest of what can't be cut on the last rank. NaN to begin with."""
    held = []
    for spec in tensors.values():
        start, stop = (spec.shape[0] * at // size for at in (rank, rank + 1))
        box = Box((start, *(0,) * (len(spec.shape) - 1)), (stop - start, *spec.shape[1:]))
        local = torch.full(box.shape, torch.nan, dtype=torch_dtype(spec.dtype))
        held.append(Held(spec, local, ((box, local),) if box.numel else ()))
    return assemble(held)


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


def replicas_of(path: Path, sizes: Sequence[int]) -> dict[int, list[Keeper]]:
    """Replicas of each size for the checkpoint at `path`, of which only the shapes are used."""
    specs = specs_of(path)
    return {size: [Keeper(rows(specs, rank, size)) for rank in range(size)] for size in sizes}


def expected(path: Path, engines: Mapping[int, Sequence[Keeper]]) -> dict[int, list[list[bytes]]]:
    """What the memory of each rank must be after the checkpoint at `path` was loaded."""
    checkpoint = load_file(path)
    specs = specs_of(path)
    wanted: dict[int, list[list[bytes]]] = {}
    for size in engines:
        wanted[size] = []
        for rank in range(size):
            fresh = Keeper(rows(specs, rank, size))
            layout = fresh.binding().layout
            for entry in layout.entries:
                spec = layout.tensors[entry.tensor]
                cut = checkpoint[spec.name]
                for dim, (start, length) in enumerate(
                    zip(entry.box.start, entry.box.shape, strict=True)
                ):
                    cut = cut.narrow(dim, start, length)
                fresh.binding().view(entry.view, entry.box.shape, cut.dtype).copy_(cut)
            wanted[size].append(fresh.memory())
    return wanted
