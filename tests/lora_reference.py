"""LoRA merged as anybody would write it down, the whole tensor at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def merged(
    weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float
) -> torch.Tensor:
    """`weight + scale * (up @ down)`, summed over the rank in order; of the weight's dtype."""
    total = weight.double()
    scaled = up.float() * scale
    for k in range(down.shape[0]):
        total = total + scaled[:, k].double()[:, None] * down[k].double()[None, :]
    return total.float().to(weight.dtype)
