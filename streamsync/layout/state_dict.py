"""Plain mappings of names to tensors as sources: any strides, any dtype that travels, DTensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamsync.layout.held import assemble, hold, refreshed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from streamsync.layout.binding import Binding

_HINT = "the geometry of a binding is fixed: bind again under a new plan"


def bind_tensors(
    tensors: Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]],
) -> Binding:
    """A source binding of the tensors of a mapping, in its order, whole and wherever they lie.

    Transposed, strided, expanded and offset views, scalars and zero-size tensors are legal; of a
    DTensor the local shard is bound. Names with the very same memory are ties. The binding keeps
    the memory alive and copies nothing. Given a callable instead of a mapping, `refresh` calls it
    again and accepts new memory of the same geometry. Raises `LayoutError` for tensors that can't
    travel (sparse, quantised, meta, complex, freed), and from `refresh` when the geometry changed.
    """
    if not callable(tensors):
        return assemble(hold(name, tensor) for name, tensor in tensors.items())
    look_up = tensors

    def bound() -> Binding:
        return assemble(hold(name, tensor) for name, tensor in look_up().items())

    binding = bound()

    def refresh() -> Sequence[torch.Tensor]:
        return refreshed(binding.layout, bound(), _HINT)

    binding.refresh = refresh
    return binding
