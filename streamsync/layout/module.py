"""Any torch module as source or sink, under its own parameter names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from streamsync.layout.held import assemble, hold, refreshed
from streamsync.layout.overlap import check_writable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import nn

    from streamsync.layout.binding import Binding

Side = Literal["source", "sink"]

_HINT = (
    "an FSDP module that was left unsharded (a forward without a backward) must be resharded with "
    ".reshard() first; anything else that changes shapes needs a new binding"
)


def module_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and persistent buffer of `module` under every name it has, module by module.

    A tied tensor comes once per name. Non-persistent buffers are none of a checkpoint's business
    and never come.
    """
    for prefix, owner in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            yield dot + name, parameter
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            # torch keeps this only here; state_dict() reads it the same way.
            if name not in owner._non_persistent_buffers_set:
                yield dot + name, buffer


def bind_module(module: nn.Module, *, side: Side) -> Binding:
    """The binding of a module's parameters and persistent buffers, each in its own dtype.

    FSDP2 modules bind their local shards, and start no collective. `refresh` reads the module
    again, so that parameters may be replaced (`p.data = ...`) as long as their geometry stays.
    The binding keeps the memory alive, also after the module let go of it, until it is refreshed.
    Raises `LayoutError` for tensors that can't travel, and for a sink for memory that one sync
    would write twice.
    """

    def bound() -> Binding:
        made = assemble(hold(name, tensor) for name, tensor in module_tensors(module))
        if side == "sink":
            check_writable(made)
        return made

    binding = bound()

    def refresh() -> Sequence[torch.Tensor]:
        return refreshed(binding.layout, bound(), _HINT)

    binding.refresh = refresh
    return binding
