"""What an engine does with tensors once they landed in staging memory: all that is not geometry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from streamsync.errors import EngineError, StreamsyncError
from streamsync.layout.binding import torch_dtype
from streamsync.layout.group import group_of
from streamsync.layout.memories import Memories
from streamsync.layout.trace import identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

    from streamsync.layout.binding import Binding

    Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


@dataclass(slots=True, frozen=True, kw_only=True)
class Landing:
    """Work that runs once in every sync that brings its tensors, after the bytes of all of them
    were proved in `staging` and before a gate of their groups opens.

    `names` are those tensors, as the layout calls them: a sync brings all of them or none.
    `staging` is host memory that the landing owns, allocated once. `parameters` are the tensors
    that `work` writes, by the names of `module`; their addresses stay. `makes` are tensors of the
    layout that it writes in place of the sources, for landings after it.
    """

    names: tuple[str, ...]
    staging: tuple[torch.Tensor, ...]
    module: nn.Module
    parameters: tuple[str, ...]
    work: Callable[[], object]
    makes: tuple[str, ...] = ()

    @property
    def targets(self) -> list[torch.Tensor]:
        """The live tensors that `work` writes, as they are now."""
        return [tensor_of(self.module, name) for name in self.parameters]

    @property
    def groups(self) -> frozenset[str]:
        """The groups whose gates wait for this landing."""
        return frozenset(map(group_of, self.names))

    def land(self) -> None:
        """Writes the live tensors from `staging`. Blocks; one landing of an engine at a time.

        Raises `EngineError` with the groups, tensors and the engine's own text.
        """
        try:
            with torch.no_grad():
                self.work()
        except StreamsyncError:
            raise
        except Exception as error:
            shown = ", ".join(self.names[:4]) + (" ..." if len(self.names) > 4 else "")
            raise EngineError(
                f"the engine failed to take {shown} of {', '.join(sorted(self.groups))}: "
                f"{type(error).__name__}: {error}"
            ) from error


@dataclass(slots=True, frozen=True, kw_only=True)
class Transform:
    """Says that the live memory of a module's `parameter` is not what its loader writes but what a
    kernel wants: prepacked, shuffled, transposed.

    `land(staged, live)` writes `live` (the parameter as it is now) with `copy_` from `staged` (host
    memory in the shape, strides and dtype that the loader was recorded with). It always starts from
    `staged` and never from what an earlier call made. `check_transform` proves it.
    """

    parameter: str
    land: Callable[[torch.Tensor, torch.Tensor], object]


def land_opaque(
    module: nn.Module, load: Load, tensors: Mapping[str, torch.Tensor], parameters: Sequence[str]
) -> Landing:
    """The landing that hands `tensors` (name → staging) to the engine's own loader.

    `parameters` are the module's names of what it writes. What the loader replaces instead of
    writing is copied to where it was.
    """

    def work() -> None:
        memories = Memories(module)
        try:
            load(iter(tensors.items()))
        finally:
            replaced = memories.put_back()
        for name, memory, value in replaced:
            if value is None or (value.shape, value.dtype) != (memory.shape, memory.dtype):
                now = "nothing" if value is None else f"{value.dtype}{list(value.shape)}"
                raise EngineError(
                    f"the loader replaces {name} by {now}, where the engine holds "
                    f"{memory.dtype}{list(memory.shape)}; declare a Transform for it"
                )
            memory.copy_(value)

    return Landing(
        names=tuple(tensors),
        staging=tuple(tensors.values()),
        module=module,
        parameters=tuple(parameters),
        work=work,
    )


def land_transform(
    module: nn.Module, transform: Transform, staged: torch.Tensor, names: Sequence[str]
) -> Landing:
    """The landing of a transformed parameter, whose checkpoint tensors `names` wait in `staged`."""

    def work() -> None:
        live = tensor_of(module, transform.parameter)
        address = live.data_ptr()
        transform.land(staged, live.detach())
        now = tensor_of(module, transform.parameter)
        if now is not live or now.data_ptr() != address:
            raise EngineError(
                f"the transform of {transform.parameter} replaced it; write it in place (copy_)"
            )

    return Landing(
        names=tuple(names),
        staging=(staged,),
        module=module,
        parameters=(transform.parameter,),
        work=work,
    )


def check_transform(
    binding: Binding,
    transform: Transform,
    checkpoint: Mapping[str, torch.Tensor],
    fresh: nn.Module,
) -> None:
    """Proves `transform` of a recorded `binding` against an engine that no sync has touched.

    `checkpoint` has the tensors that `fresh` (the same engine, or another of the same kind and
    place) loaded by itself. They are staged as a sync would and transformed into spare memory
    (as much as the parameter has), which must equal what `fresh` holds, bit for bit; nothing live
    is written. Raises `EngineError` when it differs.
    """
    landing = next((x for x in binding.landings if x.parameters == (transform.parameter,)), None)
    if landing is None:
        raise EngineError(f"the binding has no transform of {transform.parameter}")
    (staged,) = landing.staging
    layout = binding.layout
    for entry in layout.entries:
        if identity(binding.storages[entry.view.storage]) == identity(staged):
            spec = layout.tensors[entry.tensor]
            where = tuple(slice(a, b) for a, b in zip(entry.box.start, entry.box.stop, strict=True))
            view = binding.view(entry.view, entry.box.shape, torch_dtype(spec.dtype))
            view.copy_(checkpoint[spec.name][where])
    wanted = tensor_of(fresh, transform.parameter).detach()
    made = torch.empty_like(wanted)
    # What the transform leaves out shows.
    made.untyped_storage().fill_(0xA5)  # type: ignore[attr-defined] # torch does not type it
    with torch.no_grad():
        transform.land(staged, made)
    differs = _bytes(made) != _bytes(wanted)
    if differs.any():
        raise EngineError(
            f"the transform of {transform.parameter} does not make what a fresh engine holds: "
            f"{int(differs.sum())} of {differs.numel()} bytes differ"
        )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def tensor_of(module: nn.Module, name: str) -> torch.Tensor:
    """The parameter or buffer that `module` has under `name` now."""
    path, _, last = name.rpartition(".")
    tensor = getattr(module.get_submodule(path), last)
    assert isinstance(tensor, torch.Tensor)
    return tensor
