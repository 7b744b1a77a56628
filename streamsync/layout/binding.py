"""A layout bound to this process's memory: the only place where views become torch tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from streamsync.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from streamsync.layout.computation import Computation
    from streamsync.layout.region import Layout, View


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name of a dtype without its prefix, as layouts spell it (`bfloat16`)."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype that a layout calls `name`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"this torch has no dtype {name}; upgrade torch or cast the tensor")
    return dtype


@dataclass(slots=True, kw_only=True)
class Binding:
    """A `layout` and the local tensors it speaks of.

    `storages[k]` is any tensor whose untyped storage is storage number k of the layout's views; the
    binding keeps it alive, so that an address is never reused by another tensor. `refresh`, when
    given, returns the storages as they are now (a trainer may have replaced a parameter's memory)
    or raises `LayoutError` if the geometry changed. `computed` names the tensors of a source whose
    values are not simply what their memory holds.
    """

    layout: Layout
    storages: Sequence[torch.Tensor]
    refresh: Callable[[], Sequence[torch.Tensor]] | None = None
    computed: Mapping[str, Computation] = field(default_factory=dict)

    def view(self, view: View, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The live memory of `view` as a tensor of `shape` (elements); no copy, no ownership."""
        base = self.storages[view.storage].detach()
        flat = torch.empty(0, dtype=dtype, device=base.device)
        return flat.set_(base.untyped_storage(), view.offset, shape, view.strides)

    def addresses(self) -> tuple[int, ...]:
        """Where each storage begins now; changes when a storage was replaced."""
        return tuple(t.untyped_storage().data_ptr() for t in self.storages)

    def rebind(self) -> bool:
        """Looks the storages up again; returns whether any moved (views must then be remade)."""
        if self.refresh is None:
            return False
        before = self.addresses()
        self.storages = self.refresh()
        return self.addresses() != before
