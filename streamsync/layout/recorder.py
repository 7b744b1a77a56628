"""An engine's layout, recorded from the engine's own loader instead of written by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from streamsync.errors import LayoutError
from streamsync.layout.binding import Binding, torch_dtype
from streamsync.layout.intercept import Intercept, Owner, owners_of
from streamsync.layout.module import bind_module, module_tensors
from streamsync.layout.overlap import overlaps
from streamsync.layout.region import Box, Entry, Layout, TensorSpec, View
from streamsync.layout.trace import identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

aten = torch.ops.aten


@dataclass(slots=True, frozen=True, kw_only=True)
class Recording:
    """What a loader does with a checkpoint, as far as it is geometry, and what is left over.

    `opaque` names checkpoint tensors (or, where no tensor of the checkpoint is involved, the
    module's own) that the loader does more to than copying, with the reason: they are not part of
    `binding`, and only the loader itself can deliver them. `ignored` are checkpoint tensors that
    the loader never copied anywhere. `unwritten` counts, by the module's own names, elements of
    parameters and persistent buffers that no checkpoint tensor is copied to.
    """

    binding: Binding
    opaque: dict[str, str]
    ignored: tuple[str, ...]
    unwritten: dict[str, int]


def record_loader(
    module: nn.Module,
    tensors: Mapping[str, TensorSpec],
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
) -> Recording:
    """Runs `load` once with meta tensors in place of the checkpoint `tensors` and notes its copies.

    Nothing at the module changes: copies are noted and not made, every other operation that would
    write a tensor of the module is intercepted and makes it opaque, and a parameter that the
    loader replaced is put back. To be called after the model was loaded and before anything
    repacks its parameters. The binding keeps the module's memory alive; its `refresh` is that of
    `bind_module`. Delivering opaque tensors is the caller's business: one that can't must refuse.
    Raises `LayoutError` with the loader's own text when it can't run on meta tensors.
    """
    own = bind_module(module, side="source")
    probes = {
        name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
        for name, spec in tensors.items()
    }
    recorder = Intercept(probes, owners_of(module, own))
    originals = [
        (owner, dict(owner._parameters), dict(owner._buffers)) for owner in module.modules()
    ]
    memories = [(tensor, tensor.detach()) for _, tensor in module_tensors(module)]
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
        replaced = _put_back(module, originals, memories)
    for name in replaced:
        recorder.refuse({name}, set(), "the loader replaces it by another tensor")
    return _recording(own, recorder, tensors)


def _put_back(
    module: nn.Module,
    originals: Sequence[tuple[nn.Module, dict[str, Any], dict[str, Any]]],
    memories: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> set[str]:
    """Undoes what no dispatch mode sees: replaced parameters and `p.data = ...`; names them."""
    replaced: set[str] = set()
    before = {id(tensor): identity(memory) for tensor, memory in memories}
    paths = {id(part): name for name, part in module.named_modules()}
    for part, parameters, buffers in originals:
        for was, now in ((parameters, part._parameters), (buffers, part._buffers)):
            changed = {n for n in {*was, *now} if was.get(n) is not now.get(n)}
            if changed:
                path = paths.get(id(part), "")
                replaced |= {f"{path}.{name}".lstrip(".") for name in changed}
                now.clear()
                now.update(was)
    moved = {id(tensor) for tensor, _ in memories if identity(tensor) != before[id(tensor)]}
    for tensor, memory in memories:
        if id(tensor) in moved:
            tensor.data = memory
    replaced |= {name for name, tensor in module_tensors(module) if id(tensor) in moved}
    return replaced


def _recording(own: Binding, recorder: Intercept, tensors: Mapping[str, TensorSpec]) -> Recording:
    opaque: dict[str, str] = {}
    writers: dict[str, set[str]] = {}
    places: dict[str, dict[tuple[Box, View], Owner]] = {}
    for owner, fragment in recorder.copies:
        writers.setdefault(owner.name, set()).add(fragment.name)
        places.setdefault(fragment.name, {})[fragment.box, fragment.view] = owner
    for owners, probes, reason in recorder.refused:
        involved = probes | {name for owner in owners for name in writers.get(owner, ())}
        for name in involved or owners:
            about = f" ({', '.join(sorted(owners))})" if involved and owners else ""
            opaque.setdefault(name, reason + about)
    for name, at in places.items():
        dtypes = {owner.spec.dtype for owner in at.values()}
        if len(dtypes) > 1:
            opaque.setdefault(name, f"it is loaded as {' and as '.join(sorted(dtypes))}")

    layout = _layout(own, places, opaque, recorder.empty, tensors)
    binding = Binding(layout=layout, storages=own.storages)
    for pair in overlaps(binding):
        for name in pair:
            other = pair[0] if name == pair[1] else pair[1]
            opaque.setdefault(name, f"{other} is loaded into the same memory")
    layout = _layout(own, places, opaque, recorder.empty, tensors)

    def refresh() -> Sequence[torch.Tensor]:
        own.rebind()
        return own.storages

    unclear = {
        n for name in opaque for n in (name, *(o.name for o in places.get(name, {}).values()))
    }
    written: dict[str, int] = dict.fromkeys(
        (spec.name for spec in own.layout.tensors if spec.name not in own.layout.ties), 0
    )
    for entry in layout.entries:
        spec = layout.tensors[entry.tensor]
        written[places[spec.name][entry.box, entry.view].name] += entry.box.numel
    sizes = {spec.name: Box.whole(spec.shape).numel for spec in own.layout.tensors}
    known = {spec.name for spec in layout.tensors}
    return Recording(
        binding=Binding(layout=layout, storages=own.storages, refresh=refresh),
        opaque=opaque,
        ignored=tuple(n for n in tensors if n not in known and n not in opaque),
        unwritten={
            name: sizes[name] - done
            for name, done in written.items()
            if done < sizes[name] and name not in unclear
        },
    )


def _layout(
    own: Binding,
    places: Mapping[str, Mapping[tuple[Box, View], Owner]],
    opaque: Mapping[str, str],
    empty: set[str],
    tensors: Mapping[str, TensorSpec],
) -> Layout:
    """The layout of what is not opaque, in the module's order; equal places are ties."""

    def order(name: str) -> tuple[int, int]:
        return min(
            ((owner.number, view.offset) for (_, view), owner in places.get(name, {}).items()),
            default=(len(own.layout.tensors), 0),
        )

    specs: list[TensorSpec] = []
    entries: list[Entry] = []
    ties: dict[str, str] = {}
    owners: dict[frozenset[tuple[Box, View]], str] = {}
    for name in sorted((places.keys() | empty) - opaque.keys(), key=lambda n: (order(n), n)):
        at = places.get(name, {})
        spec = tensors[name]
        dtype = next((owner.spec.dtype for owner in at.values()), spec.dtype)
        specs.append(TensorSpec(name, spec.shape, dtype))
        if at and owners.setdefault(frozenset(at), name) != name:
            ties[name] = owners[frozenset(at)]
            continue
        entries += [Entry(len(specs) - 1, box, view) for box, view in at]
    return Layout(tensors=tuple(specs), entries=tuple(entries), ties=ties)
