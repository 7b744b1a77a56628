"""Quantisation as anybody would write it down: one block after the other, the whole tensor."""

from __future__ import annotations

from itertools import product

import torch


def reference(wide: torch.Tensor, block: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """`(values float8_e4m3fn [*wide.shape], scales float32 [blocks in each dim])` of `wide`."""
    grid = tuple(-(-n // b) for n, b in zip(wide.shape, block, strict=True))
    values = torch.empty(wide.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(grid)
    for index in product(*map(range, grid)):
        where = tuple(slice(i * b, (i + 1) * b) for i, b in zip(index, block, strict=True))
        part = wide[where].float()
        amax = part.abs().max()
        scale = 448.0 / amax
        if amax == 0 or not torch.isfinite(scale):
            scale = torch.tensor(1.0)
        values[where] = torch.clamp(part * scale, -448.0, 448.0).to(torch.float8_e4m3fn)
        scales[index] = 1.0 / scale
    return values, scales
