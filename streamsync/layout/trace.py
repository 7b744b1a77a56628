"""Follows meta tensors through torch code: which elements of which probe a tensor is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streamsync.errors import LayoutError
from streamsync.layout.region import Box, View, contiguous_strides
from streamsync.layout.strided import align

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

aten = torch.ops.aten

_LOOKS = frozenset({aten._local_scalar_dense.default, aten.equal.default})
"""Operators whose result is a number or bool, which would be a wrong one."""

_VALUELESS = frozenset(
    {
        aten.empty_like,
        aten.full_like,
        aten.new_empty,
        aten.new_empty_strided,
        aten.new_full,
        aten.new_ones,
        aten.new_zeros,
        aten.ones_like,
        aten.zeros_like,
    }
)
"""Operators that look at their tensor's shape, dtype and device, and not at its values."""


@dataclass(slots=True, frozen=True)
class Fragment:
    """Elements of one probe: `box` of probe `name` are those at `view` of some other memory.

    `dtypes` are those that the values were cast to on the way from the probe, in order.
    """

    name: str
    box: Box
    view: View
    dtypes: tuple[torch.dtype, ...]


@dataclass(slots=True, frozen=True)
class _Part:
    """A box of a copy and the memory of the trace that it was copied from."""

    box: Box
    storage: int
    view: View
    dtype: torch.dtype


@dataclass(slots=True)
class _Memory:
    """One traced storage: a row-major tensor of `shape`, a probe (named) or a copy (of parts).

    Where `lost` says why, the values are more than copies; `names` still tells whose they are.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str | None = None
    parts: list[_Part] = field(default_factory=list)
    lost: str | None = None
    names: set[str] = field(default_factory=set)


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's own class is untyped
    """While entered, follows `probes` (contiguous meta tensors by name) through views and copies.

    Views, casts, moves to a device (the copy stays on meta), `clone`, `cat` and `stack` are
    followed. Whatever else computes something from a probe runs as always; of its result only the
    probes are known that had a part in it. Temporaries that are followed stay alive as long as the
    trace, so that no identity is used twice.
    """

    def __init__(self, probes: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memories: dict[int, _Memory] = {}
        self._dtypes = {name: probe.dtype for name, probe in probes.items()}
        for name, probe in probes.items():
            self._memories[identity(probe)] = _Memory(
                probe, tuple(probe.shape), probe.dtype, name, names={name}
            )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        inputs = list(tensors_in((args, kwargs)))
        names = {name for tensor in inputs for name in self.names(tensor)}
        for target in written_tensors(func, args, kwargs):
            if names:
                self._lose(target, f"{func} changed it before it was loaded", names)
        if names and func is aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0]  # a temporary in real memory: there is nothing to write yet
        if names and func in _LOOKS:
            raise LayoutError("the loader looks at values of the checkpoint before it loads them")
        if func is aten._to_copy.default and self.is_traced(args[0]) and "device" in kwargs:
            kwargs["device"] = torch.device("meta")
            kwargs.pop("pin_memory", None)
        made = func(*args, **kwargs)
        if not names or func.overloadpacket in _VALUELESS:
            return made
        if func in (aten._to_copy.default, aten.clone.default):
            self._follow(made, [(args[0], Box.whole(tuple(made.shape)))], names)
        elif func in (aten.cat.default, aten.stack.default):
            dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % made.ndim
            pieces = list(_joined(args[0], dim, new_dim=func is aten.stack.default))
            self._follow(made, pieces, names)
        else:
            known = {identity(tensor) for tensor in inputs}
            for tensor in tensors_in(made):
                if identity(tensor) not in known:  # else a view of what is known
                    self._lose(tensor, f"its values are computed ({func})", names)
        return made

    def _lose(self, tensor: torch.Tensor, reason: str, names: set[str]) -> None:
        memory = self._memories.get(identity(tensor))
        if memory is None:
            memory = _Memory(tensor, tuple(tensor.shape), tensor.dtype)
            self._memories[identity(tensor)] = memory
        memory.lost = memory.lost or reason
        memory.names = memory.names | names

    def is_traced(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in a probe or in a copy of one."""
        return identity(tensor) in self._memories

    def names(self, tensor: torch.Tensor) -> set[str]:
        """The probes that had a part in `tensor`'s memory."""
        memory = self._memories.get(identity(tensor))
        return memory.names if memory is not None else set()

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of the probe called `name`."""
        return self._dtypes[name]

    def fragments(self, tensor: torch.Tensor, other: View) -> Iterator[Fragment]:
        """What `tensor`, whose elements correspond to `other` (same shape), is made of.

        The fragments' views lie in `other`'s memory and cover every element of `tensor` once.
        Raises `LayoutError` when an element is not an unchanged probe's, or when the view is too
        scattered for boxes.
        """
        at = View(0, int(tensor.storage_offset()), tuple(tensor.stride()))
        yield from self._resolve(identity(tensor), tuple(tensor.shape), tensor.dtype, at, other, ())

    def _resolve(
        self,
        storage: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        at: View,
        other: View,
        dtypes: tuple[torch.dtype, ...],
    ) -> Iterator[Fragment]:
        memory = self._memories.get(storage)
        if memory is None:
            raise LayoutError("its values are computed, not copied from the checkpoint")
        if memory.lost is not None:
            raise LayoutError(memory.lost)
        if dtype != memory.dtype:
            raise LayoutError(f"its {memory.dtype} bytes are reinterpreted as {dtype}")
        for box, view in align(memory.shape, shape, at, other):
            if memory.name is not None:
                yield Fragment(memory.name, box, view, dtypes)
                continue
            missing = box.numel
            for part in memory.parts:
                common = part.box.intersect(box)
                if common is None:
                    continue
                missing -= common.numel
                yield from self._resolve(
                    part.storage,
                    common.shape,
                    part.dtype,
                    part.view.within(part.box, common),
                    view.within(box, common),
                    (memory.dtype, *dtypes) if part.dtype != memory.dtype else dtypes,
                )
            if missing:
                raise LayoutError("only a part of its values comes from the checkpoint")

    def _follow(
        self, made: torch.Tensor, pieces: list[tuple[torch.Tensor, Box]], names: set[str]
    ) -> None:
        pieces = [(tensor, box) for tensor, box in pieces if self.is_traced(tensor)]
        if made.numel() == 0:
            return
        if not pieces:
            self._lose(made, "its values are not read from the checkpoint directly", names)
            return
        # A copy may keep its source's order of dims, so its own row-major order is that of strides.
        order = sorted(range(made.ndim), key=made.stride().__getitem__, reverse=True)
        shape = tuple(made.shape[d] for d in order)
        memory = _Memory(made, shape, made.dtype, names=set(names))
        if tuple(made.stride(d) for d in order if made.shape[d] > 1) != tuple(
            s for s, n in zip(contiguous_strides(shape), shape, strict=True) if n > 1
        ):
            memory.lost = "it was copied with gaps"
        for tensor, box in pieces:
            memory.parts.append(
                _Part(
                    Box(tuple(box.start[d] for d in order), tuple(box.shape[d] for d in order)),
                    identity(tensor),
                    View(0, int(tensor.storage_offset()), tuple(tensor.stride(d) for d in order)),
                    tensor.dtype,
                )
            )
        self._memories[identity(made)] = memory


def written_tensors(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of operator `func` that it writes, by its schema."""
    if not func._schema.is_mutable:
        return
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, torch.Tensor))


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors in arguments or results of an operator, in whatever lists they come."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def identity(tensor: torch.Tensor) -> int:
    """What tensors of one storage have in common, also where there is no address (meta)."""
    if tensor.layout is not torch.strided:
        return -1
    return int(tensor.untyped_storage()._cdata)


def _joined(
    tensors: Sequence[torch.Tensor], dim: int, *, new_dim: bool
) -> Iterator[tuple[torch.Tensor, Box]]:
    """Where each of the tensors lies in their `cat`, or with `new_dim` in their `stack`."""
    begin = 0
    for tensor in tensors:
        if new_dim:
            tensor = tensor.unsqueeze(dim)
        if tensor.numel() == 0:  # cat takes empty ones of any shape
            continue
        start = [0] * tensor.ndim
        start[dim] = begin
        begin += tensor.shape[dim]
        yield tensor, Box(tuple(start), tuple(tensor.shape))
