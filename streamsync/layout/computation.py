"""What a source sends of a tensor instead of its bytes as they are: computed when they leave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from streamsync.layout.region import Box


class Computation(Protocol):
    """Makes the values of one tensor of a binding out of its memory and whatever else it holds."""

    def compute(self, box: Box, base: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the tensor's values in `box` to `out`; `base` is the live memory of `box`.

        The values are those of the tensor's own dtype, whatever the dtype of `out`, and must not
        depend on how the tensor is cut into boxes. Runs in an executor's thread, several at once;
        writes nothing but `out`.
        """
