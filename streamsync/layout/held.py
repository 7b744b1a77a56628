"""From tensors in memory to a bound layout: storages found once, ties found by address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from streamsync.errors import LayoutError
from streamsync.layout.binding import Binding, dtype_name
from streamsync.layout.dtensor import local_parts, local_tensor
from streamsync.layout.region import Box, Entry, Layout, TensorSpec, View
from streamsync.types import DTYPE_ITEMSIZES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


@dataclass(slots=True, frozen=True)
class Held:
    """What this rank holds of one global tensor: boxes, and local tensors of the boxes' shapes.

    `origin` is the object the user gave: where nothing is held, only it can show a tie.
    """

    spec: TensorSpec
    origin: torch.Tensor
    parts: tuple[tuple[Box, torch.Tensor], ...]


def hold(name: str, tensor: torch.Tensor, *, allow_meta: bool = False) -> Held:
    """What this rank holds of `tensor`, called `name`: all of a plain one, its shard of a DTensor.

    Nothing is copied; the parts are the live memory. Raises `LayoutError`, with the name and what
    to do, for memory that has no strided view of a dtype that travels, and for no memory at all
    unless `allow_meta` says that only a plan will be made of it.
    """
    shape = tuple(tensor.shape)
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()
    _check(name, local, allow_meta=allow_meta)
    parts: tuple[tuple[Box, torch.Tensor], ...] = ()
    if isinstance(tensor, DTensor):
        parts = local_parts(name, tensor)
    elif local.numel():
        parts = ((Box.whole(shape), local),)
    return Held(TensorSpec(name, shape, dtype_name(local.dtype)), tensor, parts)


def _check(name: str, tensor: torch.Tensor, *, allow_meta: bool) -> None:
    def refuse(what: str, do: str) -> LayoutError:
        return LayoutError(f"{what} can't travel; {do}", tensor=name)

    wrapped = is_traceable_wrapper_subclass(tensor)
    if wrapped:
        raise refuse(
            f"a {type(tensor).__name__} (a tensor made of several others)",
            "bind its plain parts under their own names",
        )
    if tensor.is_meta and not allow_meta:
        raise refuse("a meta tensor has no memory and", "materialise the model first")
    if tensor.layout is not torch.strided:
        raise refuse(f"a sparse tensor ({tensor.layout})", "densify it with .to_dense()")
    if tensor.is_quantized:
        raise refuse("a torch-quantised tensor", "bind its int_repr() and scales by name")
    if dtype_name(tensor.dtype) not in DTYPE_ITEMSIZES:
        raise refuse(f"dtype {dtype_name(tensor.dtype)}", "view it as a dtype of the same width")
    if tensor.is_neg():
        raise refuse("a lazily negated view", "resolve it with .resolve_neg()")
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    if tensor.numel() and tensor.untyped_storage().nbytes() < end:
        raise refuse("a tensor whose memory was freed", "bring it back (reshard, reload) first")


def assemble(
    held: Iterable[Held], refresh: Callable[[], Sequence[torch.Tensor]] | None = None
) -> Binding:
    """The binding of `held`, in its order; it keeps the memory alive and owns none of it.

    A tensor with the very memory of an earlier one (address, shape, strides, dtype) becomes its
    tie. Raises `LayoutError` when two tensors have one name.
    """
    specs: list[TensorSpec] = []
    entries: list[Entry] = []
    storages: list[torch.Tensor] = []
    ties: dict[str, str] = {}
    names: set[str] = set()
    # Two storages of torch may describe one allocation (from_numpy, from_blob), so the address
    # counts and not the object; what has no address (zero bytes) can't be shared.
    numbers: dict[tuple[object, ...], int] = {}
    owners: dict[tuple[object, ...], str] = {}
    origins: list[torch.Tensor] = []  # alive, so that no id is used twice
    for item in held:
        spec = item.spec
        if spec.name in names:
            raise LayoutError("two tensors have this name; rename one", tensor=spec.name)
        names.add(spec.name)
        specs.append(spec)
        origins.append(item.origin)
        memory: tuple[object, ...] = (
            spec.shape,
            spec.dtype,
            *(
                (box, part.device, _meta_id(part), part.data_ptr(), part.stride())
                for box, part in item.parts
            ),
            *(() if item.parts else (id(item.origin),)),
        )
        if owners.setdefault(memory, spec.name) != spec.name:
            ties[spec.name] = owners[memory]
            continue
        for box, part in item.parts:
            storage = part.untyped_storage()
            key = (part.device, _meta_id(part), storage.data_ptr(), storage.nbytes())
            number = numbers.setdefault(key, len(storages))
            if number == len(storages):
                storages.append(part)
            view = View(number, int(part.storage_offset()), tuple(part.stride()))
            entries.append(Entry(len(specs) - 1, box, view))
    layout = Layout(tensors=tuple(specs), entries=tuple(entries), ties=ties)
    return Binding(layout=layout, storages=tuple(storages), refresh=refresh)


def _meta_id(tensor: torch.Tensor) -> int:
    """What tells storages on the meta device apart, where all addresses begin at 0."""
    return int(tensor.untyped_storage()._cdata) if tensor.is_meta else 0


def refreshed(old: Layout, now: Binding, hint: str) -> Sequence[torch.Tensor]:
    """The storages of `now`, whose layout must equal `old`.

    Raises `LayoutError` naming the first tensor that differs; `hint` says what the user can do.
    """
    if now.layout == old:
        return now.storages
    was, new = ({t.name: t for t in layout.tensors} for layout in (old, now.layout))
    for name in (*was, *new):
        if was.get(name) != new.get(name):
            raise LayoutError(
                f"was {_geometry(was.get(name))} when it was bound and is "
                f"{_geometry(new.get(name))} now; {hint}",
                tensor=name,
            )
    if old.ties != now.layout.ties:
        name = next(n for n in was if old.ties.get(n) != now.layout.ties.get(n))
        raise LayoutError(f"its tie to another tensor changed; {hint}", tensor=name)
    was_at, now_at = (_places(layout) for layout in (old, now.layout))
    moved = next((n for n in was if was_at.get(n) != now_at.get(n)), None)
    raise LayoutError(f"its boxes or strides changed since it was bound; {hint}", tensor=moved)


def _geometry(spec: TensorSpec | None) -> str:
    return "absent" if spec is None else f"{spec.dtype}{list(spec.shape)}"


def _places(layout: Layout) -> dict[str, list[tuple[Box, View]]]:
    places: dict[str, list[tuple[Box, View]]] = {}
    for entry in layout.entries:
        places.setdefault(layout.tensors[entry.tensor].name, []).append((entry.box, entry.view))
    return places
