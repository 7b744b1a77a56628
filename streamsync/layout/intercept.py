"""A module's memory while its loader is recorded: copies are noted, writes prevented."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from streamsync.errors import LayoutError
from streamsync.layout.binding import Binding, dtype_name
from streamsync.layout.module import module_tensors
from streamsync.layout.region import TensorSpec, View
from streamsync.layout.trace import Fragment, Trace, identity, written_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

aten = torch.ops.aten


@dataclass(slots=True, frozen=True)
class Owner:
    """A tensor of the module: its place in `Layout.tensors` of the module's own layout."""

    name: str
    number: int
    spec: TensorSpec
    view: View | None
    """None where writes are prevented and not recorded: what no checkpoint has."""


def owners_of(module: nn.Module, own: Binding) -> dict[int, list[Owner]]:
    """Everything of `module` that a loader could write, by the identity of its storage.

    `own` is the module's own binding. Raises `LayoutError` for sharded parameters.
    """
    owners: dict[int, list[Owner]] = {}
    views = {own.layout.tensors[e.tensor].name: e.view for e in own.layout.entries}
    numbers = {spec.name: number for number, spec in enumerate(own.layout.tensors)}
    for name, tensor in module_tensors(module):
        if isinstance(tensor, DTensor):
            raise LayoutError(
                "loaders of sharded (DTensor) parameters can't be recorded", tensor=name
            )
        first = own.layout.ties.get(name, name)
        if tensor.numel() == 0:
            continue
        number = numbers[first]
        owner = Owner(first, number, own.layout.tensors[number], views[first])
        known = owners.setdefault(identity(tensor), [])
        if owner not in known:
            known.append(owner)
    for prefix, part in module.named_modules():
        others = {n: part._buffers[n] for n in part._non_persistent_buffers_set}
        others |= {n: value for n, value in vars(part).items() if isinstance(value, torch.Tensor)}
        for name, value in others.items():
            if value is not None and value.numel() and identity(value) not in owners:
                spec = TensorSpec(f"{prefix}.{name}".lstrip("."), tuple(value.shape), "")
                owners[identity(value)] = [Owner(spec.name, -1, spec, None)]
    return owners


class Intercept(Trace):  # type: ignore[no-untyped-call] # torch's base is untyped
    """Notes copies from probes to the module's memory; lets nothing else write there."""

    def __init__(
        self, probes: Mapping[str, torch.Tensor], owners: Mapping[int, list[Owner]]
    ) -> None:
        super().__init__(probes)
        self._owners = owners
        self.copies: list[tuple[Owner, Fragment]] = []
        self.refused: list[tuple[set[str], set[str], str]] = []
        self.empty: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.copy_.default and args[0].numel() == 0:
            self.empty |= self.names(args[1])
            return args[0]
        targets = [t for t in written_tensors(func, args, kwargs) if identity(t) in self._owners]
        if not targets:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func is aten.copy_.default:
            self._copy(args[0], args[1])
        elif func is aten._foreach_copy_.default:
            for target, source in zip(args[0], args[1], strict=True):
                self.__torch_dispatch__(aten.copy_.default, (), (target, source))
        else:
            probes = {name for t in _tensors((args, kwargs)) for name in self.names(t)}
            for target in targets:
                owners = {owner.name for owner in self._touched(target) if owner.view or probes}
                if owners:
                    self.refuse(owners, probes, f"the loader writes it with {func}")
        returns = func._schema.returns
        if any(value.alias_info is None for value in returns):
            raise LayoutError(f"the loader runs {func}, which writes and computes at once")
        if len(returns) == 1:
            return targets[0]
        return tuple(targets) if returns else None

    def refuse(self, owners: set[str], probes: set[str], reason: str) -> None:
        """Notes that `owners` (the module's names) get more than copies, from `probes` if any."""
        self.refused.append((owners, probes, reason))

    def _touched(self, target: torch.Tensor) -> list[Owner]:
        owners = self._owners[identity(target)]
        size = target.element_size()
        begin = int(target.storage_offset()) * size
        end = begin + size * (1 + _reach(tuple(target.shape), tuple(target.stride())))
        return [
            owner
            for owner in owners
            if owner.view is None
            or (
                owner.view.offset * owner.spec.itemsize < end
                and begin
                < (owner.view.offset + 1 + _reach(owner.spec.shape, owner.view.strides))
                * owner.spec.itemsize
            )
        ]

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        owners = self._touched(target)
        names = {owner.name for owner in owners}
        probes = self.names(source)
        if not probes:
            if any(owner.view for owner in owners):
                self.refuse(names, set(), "the loader copies values there that it made itself")
            return
        dtypes = {owner.spec.dtype for owner in owners}
        if len(owners) != 1 or owners[0].view is None or dtypes != {dtype_name(target.dtype)}:
            self.refuse(set(), probes, f"it is loaded into a part of {', '.join(sorted(names))}")
            return
        view = View(owners[0].view.storage, int(target.storage_offset()), tuple(target.stride()))
        try:
            found = list(self.fragments(source.expand(target.shape), view))
        except LayoutError as error:
            self.refuse(set(), probes, error.message)
            return
        for fragment in found:
            steps = (self.dtype(fragment.name), *fragment.dtypes)
            if not _casts_once(steps, target.dtype):
                self.refuse(
                    set(), probes, f"it is cast to {steps[-1]} on the way to {target.dtype}"
                )
                return
        self.copies += [(owners[0], fragment) for fragment in found]


def _casts_once(steps: Sequence[torch.dtype], target: torch.dtype) -> bool:
    """Whether casts through all of `steps` to `target` give what one direct cast gives."""
    first, *others = steps
    if others and others[-1] == target:
        others.pop()
    return all(step == first or _widens(first, step) for step in others)


def _widens(narrow: torch.dtype, wide: torch.dtype) -> bool:
    if not (narrow.is_floating_point and wide.is_floating_point):
        return False
    a, b = torch.finfo(narrow), torch.finfo(wide)
    return b.eps <= a.eps and b.max >= a.max and b.smallest_normal <= a.smallest_normal


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    return sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
