"""Where the gates of a torch module go: which modules wait for which groups. Pure."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from streamsync.layout.group import group_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from streamsync.layout.binding import Binding

_Span = tuple[torch.device, int, int]


@dataclass(slots=True, frozen=True, eq=False)
class Scope:
    """A module whose calls are watched, and the `groups` that its call waits for (may be none).

    `tensors` are the parameters and buffers that this gate guards.
    """

    name: str
    module: nn.Module
    groups: frozenset[str]
    tensors: tuple[torch.Tensor, ...]


def place_gates(model: nn.Module, binding: Binding) -> tuple[Scope, ...]:
    """The scopes of `model`, its own first, then in registration order.

    A gate stands at the outermost callable module whose tensors all belong to one group: an
    embedding, a layer, the final norm, the head. The modules around gates are watched as well, so
    that a call of any part of the model is a forward; they wait for the tensors they hold
    themselves. Tensors of modules that can't be called (`ModuleList`, `ParameterList`) are waited
    for at the model's own call. A tensor's groups follow from its memory and not from its name, so
    a tied head waits for the embedding, and a fused tensor for all of its parts.
    """
    groups_at = _groups_by_memory(binding)
    scopes: list[Scope] = []
    strays: list[torch.Tensor] = []
    seen: set[int] = set()

    def groups_of(tensors: tuple[torch.Tensor, ...]) -> frozenset[str]:
        return frozenset(chain.from_iterable(map(groups_at, tensors)))

    def walk(name: str, module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        tensors = _tensors(module, recurse=True)
        total = groups_of(tensors)
        if not total:
            return
        callable_ = _is_callable(module)
        if callable_ and len(total) == 1:
            seen.update(map(id, module.modules()))
            scopes.append(Scope(name, module, total, tensors))
            return
        own = _tensors(module, recurse=False)
        if callable_:
            scopes.append(Scope(name, module, groups_of(own), own))
        else:
            strays.extend(own)
        for child_name, child in module.named_children():
            walk(f"{name}.{child_name}" if name else child_name, child)

    walk("", model)
    root = next((s for s in scopes if s.module is model), Scope("", model, frozenset(), ()))
    tensors = (*root.tensors, *strays)
    root = Scope("", model, root.groups | groups_of(tuple(strays)), tensors)
    return (root, *(s for s in scopes if s.module is not model))


def unguarded(binding: Binding, scopes: tuple[Scope, ...]) -> list[str]:
    """The names of the binding's tensors that a forward could read without passing a gate of their
    group: memory that no module of the model owns, for one. Empty when all is well."""
    guards: dict[tuple[torch.device, str], list[tuple[int, int]]] = {}
    for scope in scopes:
        for device, begin, end in map(_span, scope.tensors):
            for group in scope.groups:
                guards.setdefault((device, group), []).append((begin, end))
    guarded = {key: _merged(spans) for key, spans in guards.items()}
    names: dict[str, None] = {}
    for name, _, (device, begin, end) in _written(binding):
        begins, ends = guarded.get((device, group_of(name)), ([], []))
        at = bisect_right(begins, begin) - 1
        if begin < end and (at < 0 or ends[at] < end):
            names[name] = None
    return list(names)


def _is_callable(module: nn.Module) -> bool:
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _tensors(module: nn.Module, *, recurse: bool) -> tuple[torch.Tensor, ...]:
    return tuple(chain(module.parameters(recurse), module.buffers(recurse)))


def _groups_by_memory(binding: Binding) -> Callable[[torch.Tensor], frozenset[str]]:
    """Tells which groups write into a tensor's memory.

    Each group counts with the whole range that it writes of a storage: a storage cut into many
    groups may make a gate wait for one more than it needs, never for one less.
    """
    hulls: dict[tuple[torch.device, int], dict[str, tuple[int, int]]] = {}
    for name, base, (device, begin, end) in _written(binding):
        if begin < end:
            groups = hulls.setdefault((device, base), {})
            low, high = groups.get(group_of(name), (begin, end))
            groups[group_of(name)] = (min(low, begin), max(high, end))

    def groups_at(tensor: torch.Tensor) -> frozenset[str]:
        device, begin, end = _span(tensor)
        found = hulls.get((device, _local(tensor).untyped_storage().data_ptr()), {})
        return frozenset(g for g, (low, high) in found.items() if begin < high and low < end)

    return groups_at


def _written(binding: Binding) -> Iterator[tuple[str, int, _Span]]:
    """What a sync writes of the model: by which tensor, in the storage that begins where, and which
    span of it. What waits in staging memory counts where its landing takes it."""
    layout = binding.layout
    bases = binding.addresses()
    staging = {
        part.untyped_storage().data_ptr()
        for landing in binding.landings
        for part in landing.staging
    }
    for entry in layout.entries:
        tensor, view = layout.tensors[entry.tensor], entry.view
        base = bases[view.storage]
        if base in staging:
            continue
        reach = _reach(entry.box.shape, view.strides)
        begin = base + view.offset * tensor.itemsize
        device = binding.storages[view.storage].device
        yield tensor.name, base, (device, begin, begin + reach * tensor.itemsize)
    for landing in binding.landings:
        for target in landing.targets:
            base = _local(target).untyped_storage().data_ptr()
            for name in landing.names:
                yield name, base, _span(target)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    # A tensor-parallel transformers model holds DTensors; their memory is the local shard's.
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _span(tensor: torch.Tensor) -> _Span:
    """Device and addresses from a tensor's first byte to behind its last one."""
    local = _local(tensor)
    begin = local.data_ptr()
    reach = _reach(tuple(local.shape), tuple(local.stride()))
    return local.device, begin, begin + reach * local.element_size()


def _reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def _merged(spans: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    begins: list[int] = []
    ends: list[int] = []
    for begin, end in sorted(spans):
        if ends and begin <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            begins.append(begin)
            ends.append(end)
    return begins, ends
