"""A layout bound to this process's memory: the only place where views become torch tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from streamsync.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from streamsync.layout.computation import Computation
    from streamsync.layout.landing import Landing
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
    values are not simply what their memory holds. `landings` finish at a sink what copying alone
    can't; the memory that they stage tensors in is among `storages`. A binding on the meta device
    has no memory and serves plans only.
    """

    layout: Layout
    storages: Sequence[torch.Tensor]
    refresh: Callable[[], Sequence[torch.Tensor]] | None = None
    computed: Mapping[str, Computation] = field(default_factory=dict)
    landings: tuple[Landing, ...] = ()

    def view(self, view: View, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The live memory of `view` as a tensor of `shape` (elements); no copy, no ownership.

        Raises `LayoutError` for a binding on the meta device.
        """
        base = self.storages[view.storage].detach()
        if base.is_meta:
            self.check_memory()
        flat = torch.empty(0, dtype=dtype, device=base.device)
        return flat.set_(base.untyped_storage(), view.offset, shape, view.strides)

    def check_memory(self) -> None:
        """Raises `LayoutError` for a binding on the meta device."""
        if any(tensor.is_meta for tensor in self.storages):
            raise LayoutError(
                "this layout was recorded from a module on the meta device: it serves plans, but "
                "no bytes can move through it; bind a module that has memory"
            )

    def addresses(self) -> tuple[int, ...]:
        """Where each storage begins now; changes when a storage was replaced. On the meta device,
        where nothing begins anywhere, they are numbers far apart."""
        return tuple(
            (number + 1) << 42 if t.is_meta else t.untyped_storage().data_ptr()
            for number, t in enumerate(self.storages)
        )

    @property
    def staging_bytes(self) -> int:
        """Host memory in which tensors wait for their landings, allocated once."""
        return sum(t.untyped_storage().nbytes() for x in self.landings for t in x.staging)

    def rebind(self) -> bool:
        """Looks the storages up again; returns whether any moved (views must then be remade)."""
        if self.refresh is None:
            return False
        before = self.addresses()
        self.storages = self.refresh()
        return self.addresses() != before
