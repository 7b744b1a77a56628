"""A module's memory while its loader is recorded: copies and fills are noted, writes prevented."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from streamsync.errors import LayoutError
from streamsync.layout.binding import Binding, dtype_name
from streamsync.layout.module import module_tensors
from streamsync.layout.region import TensorSpec, View
from streamsync.layout.trace import Fragment, Trace, identity, tensors_in, written_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

aten = torch.ops.aten

_FILLS = frozenset({aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default})


@dataclass(slots=True, frozen=True)
class Owner:
    """A tensor of the module: its place in `Layout.tensors` of the module's own layout.

    `begin` is the first of its elements in the storage that the loader sees, which is another than
    that of `view` when the binding receives the tensor elsewhere.
    """

    name: str
    number: int
    spec: TensorSpec
    begin: int
    view: View | None
    """None where writes are prevented and not recorded: what no checkpoint has."""


@dataclass(slots=True, frozen=True)
class Write:
    """What the loader wrote to `owner`: a fragment of a probe, or (None) values that no checkpoint
    has a part in. `view` of `shape` is in the numbering of the module's own layout."""

    owner: Owner
    shape: tuple[int, ...]
    view: View
    fragment: Fragment | None


@dataclass(slots=True, frozen=True)
class Refusal:
    """More than copying, and why: `owners` (the module's names) got it, from `probes`."""

    owners: frozenset[str]
    probes: frozenset[str]
    reason: str


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
        begin = int(tensor.storage_offset())
        owner = Owner(first, number, own.layout.tensors[number], begin, views[first])
        known = owners.setdefault(identity(tensor), [])
        if owner not in known:
            known.append(owner)
    for prefix, part in module.named_modules():
        others = {n: part._buffers[n] for n in part._non_persistent_buffers_set}
        others |= {n: value for n, value in vars(part).items() if isinstance(value, torch.Tensor)}
        for name, value in others.items():
            if value is not None and value.numel() and identity(value) not in owners:
                spec = TensorSpec(f"{prefix}.{name}".lstrip("."), tuple(value.shape), "")
                owners[identity(value)] = [Owner(spec.name, -1, spec, 0, None)]
    return owners


class Intercept(Trace):  # type: ignore[no-untyped-call] # torch's base is untyped
    """Notes what is written to the module's memory, in order; lets nothing be written there."""

    def __init__(
        self, probes: Mapping[str, torch.Tensor], owners: Mapping[int, list[Owner]]
    ) -> None:
        super().__init__(probes)
        self._owners = owners
        self._loaded: dict[int, set[str]] = {}
        self.writes: list[Write] = []
        self.refusals: list[Refusal] = []
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
        elif func in _FILLS and not any(self.names(t) for t in tensors_in(args[1:])):
            self._fill(args[0])
        else:
            probes = {name for t in tensors_in((args, kwargs)) for name in self.names(t)}
            for target in targets:
                self._note(target, probes)
                owners = {owner.name for owner in self._touched(target) if owner.view or probes}
                if owners:
                    self.refuse(owners, probes, f"the loader writes it with {func}")
        returns = func._schema.returns
        if any(value.alias_info is None for value in returns):
            raise LayoutError(f"the loader runs {func}, which writes and computes at once")
        if len(returns) == 1:
            return targets[0]
        return tuple(targets) if returns else None

    def names(self, tensor: torch.Tensor) -> set[str]:
        """The probes that had a part in `tensor`'s memory, also where it is the module's."""
        return super().names(tensor) | self._loaded.get(identity(tensor), set())

    def refuse(self, owners: set[str], probes: set[str], reason: str) -> None:
        """Notes that `owners` (the module's names) get more than copies, from `probes` if any."""
        self.refusals.append(Refusal(frozenset(owners), frozenset(probes), reason))

    def _note(self, target: torch.Tensor, probes: set[str]) -> None:
        # What is read from there later is the checkpoint's too.
        self._loaded.setdefault(identity(target), set()).update(probes)

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
                owner.begin * owner.spec.itemsize < end
                and begin
                < (owner.begin + 1 + _reach(owner.spec.shape, owner.view.strides))
                * owner.spec.itemsize
            )
        ]

    def _place(self, target: torch.Tensor) -> tuple[Owner, View] | None:
        """The one owner that `target` lies in, and its view there; None if it is not so simple."""
        owners = self._touched(target)
        if len(owners) != 1 or owners[0].view is None:
            return None
        owner, view = owners[0], owners[0].view
        if owner.spec.dtype != dtype_name(target.dtype):
            return None
        offset = view.offset + int(target.storage_offset()) - owner.begin
        return owner, View(view.storage, offset, tuple(target.stride()))

    def _fill(self, target: torch.Tensor) -> None:
        place = self._place(target)
        if place is not None:
            self.writes.append(Write(place[0], tuple(target.shape), place[1], None))
            return
        owners = {owner.name for owner in self._touched(target) if owner.view}
        if owners:
            self.refuse(owners, set(), "the loader fills a part of it in some other shape")

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        probes = self.names(source)
        if not probes:
            self._fill(target)
            return
        self._note(target, probes)
        owners = {owner.name for owner in self._touched(target)}
        place = self._place(target)
        if place is None:
            self.refuse(owners, probes, "it is loaded into memory that is not one parameter's")
            return
        owner, view = place
        try:
            found = list(self.fragments(source.expand(target.shape), view))
        except LayoutError as error:
            self.refuse(owners, probes, error.message)
            return
        for fragment in found:
            steps = (self.dtype(fragment.name), *fragment.dtypes)
            if not _casts_once(steps, target.dtype):
                reason = f"it is cast to {steps[-1]} on the way to {target.dtype}"
                self.refuse(owners, probes, reason)
                return
        self.writes += [Write(owner, f.box.shape, f.view, f) for f in found]


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
