"""An engine's layout, recorded from the engine's own loader instead of written by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from streamsync.errors import LayoutError
from streamsync.layout.binding import Binding, torch_dtype
from streamsync.layout.held import assemble, hold, refreshed
from streamsync.layout.intercept import Intercept, owners_of
from streamsync.layout.landing import land_opaque, land_transform
from streamsync.layout.memories import Memories
from streamsync.layout.module import module_tensors
from streamsync.layout.records import Records

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn

    from streamsync.layout.landing import Landing, Load, Transform
    from streamsync.layout.region import TensorSpec


@dataclass(slots=True, frozen=True, kw_only=True)
class Recording:
    """What a loader does with a checkpoint.

    `binding` delivers every tensor that the loader loads. `opaque` names those (checkpoint tensors)
    that the loader does more to than copying, with the reason: they are received whole, into
    `binding.staging_bytes` of host memory, and handed to the loader when they landed. `ignored` are
    checkpoint tensors that the loader puts nowhere. `filled` counts, by the module's own names,
    elements that the loader fills with values of its own, which stay right for ever: padding.
    `unwritten` counts the elements of parameters and persistent buffers that get nothing at all.
    """

    binding: Binding
    opaque: dict[str, str]
    ignored: tuple[str, ...]
    filled: dict[str, int]
    unwritten: dict[str, int]


def record_loader(
    module: nn.Module,
    tensors: Mapping[str, TensorSpec],
    load: Load,
    *,
    transforms: Iterable[Transform] = (),
) -> Recording:
    """Runs `load` once with meta tensors in place of the checkpoint `tensors` and notes its copies.

    Nothing at the module changes: copies and fills are noted and not made, every other operation
    that would write a tensor of the module is intercepted and makes its checkpoint tensors opaque,
    and a parameter that the loader replaced is put back. To be called after the model was loaded
    and before anything repacks its parameters; those that will be repacked are named by
    `transforms`, and their checkpoint tensors are received in host memory beside the module.

    The binding keeps the module's memory alive (not that of transformed parameters) and owns the
    staging memory; its `refresh` is that of `bind_module`. Opaque tensors are handed to `load`
    again, with values, group by group. A module on the meta device gets a layout for plans only.
    Raises `LayoutError` with the loader's own text when it can't run on meta tensors.
    """
    staged = _Staged(module, transforms)
    own = staged.bind()
    probes = {
        name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
        for name, spec in tensors.items()
    }
    recorder = Intercept(probes, owners_of(module, own))
    memories = Memories(module)
    try:
        with torch.no_grad(), recorder:
            load(iter(probes.items()))
    except LayoutError:
        raise
    except Exception as error:
        raise LayoutError(
            "the loader can't be recorded, it failed on tensors without values: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        replaced = memories.put_back()
    for name, _, value in replaced:
        came_from = recorder.names(value) if value is not None else set()
        first = own.layout.ties.get(name, name)
        recorder.refuse({first}, came_from, "the loader replaces it by another tensor")

    records = Records(own, recorder, tensors)
    for transform in staged.transforms:
        for name in records.loaded.get(transform.parameter, ()):
            if name in records.opaque:
                raise LayoutError(
                    f"the loader does more than copy it into {transform.parameter}, which is to "
                    f"be transformed as well: {records.opaque[name]}; let the transform do both",
                    tensor=name,
                )
    on_meta = any(tensor.is_meta for tensor in own.storages)
    spare = {
        name: torch.empty(
            tensors[name].shape,
            dtype=torch_dtype(tensors[name].dtype),
            device="meta" if on_meta else "cpu",
        )
        for name in tensors
        if name in records.opaque
    }

    def storages() -> Sequence[torch.Tensor]:
        own.rebind()
        return (*own.storages, *spare.values())

    layout = records.layout(list(spare))
    loaded = {spec.name for spec in layout.tensors}
    landings = [] if on_meta else _landings(module, load, records, spare, staged)
    return Recording(
        binding=Binding(
            layout=layout, storages=storages(), refresh=storages, landings=tuple(landings)
        ),
        opaque=records.opaque,
        ignored=tuple(name for name in tensors if name not in loaded),
        filled=records.filled,
        unwritten=records.unwritten,
    )


class _Staged:
    """The module's own tensors, with staging memory in place of those to be transformed."""

    def __init__(self, module: nn.Module, transforms: Iterable[Transform]) -> None:
        self._module = module
        self.transforms = tuple(transforms)
        self.memory: dict[str, torch.Tensor] = {}
        tensors = dict(module_tensors(module))
        for transform in self.transforms:
            if transform.parameter not in tensors:
                raise LayoutError(
                    f"the transform of {transform.parameter} names no parameter or persistent "
                    "buffer of the module"
                )
            live = tensors[transform.parameter]
            aliases = [name for name, tensor in tensors.items() if tensor is live]
            device = "meta" if live.is_meta else "cpu"
            memory = torch.empty_strided(live.shape, live.stride(), dtype=live.dtype, device=device)
            self.memory |= dict.fromkeys(aliases, memory)

    def bind(self) -> Binding:
        """The binding under the module's own names."""

        def bound() -> Binding:
            return assemble(
                hold(name, self.memory.get(name, tensor), allow_meta=True)
                for name, tensor in module_tensors(self._module)
            )

        binding = bound()
        binding.refresh = lambda: refreshed(
            binding.layout, bound(), "anything that changes shapes needs a new recording"
        )
        return binding


def _landings(
    module: nn.Module,
    load: Load,
    records: Records,
    spare: Mapping[str, torch.Tensor],
    staged: _Staged,
) -> list[Landing]:
    landings = []
    for names, parameters in records.opaque_together():
        landings.append(land_opaque(module, load, {n: spare[n] for n in names}, parameters))
    for transform in staged.transforms:
        names = sorted(records.loaded.get(transform.parameter, ()))
        if names:
            memory = staged.memory[transform.parameter]
            landings.append(land_transform(module, transform, memory, names))
    return landings
