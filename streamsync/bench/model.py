"""The synthetic model that the benchmark moves: tensors of equal size in a few layers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import xxhash
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from streamsync.bench.options import PipelineOptions

_MOST_LAYERS = 32
_MOST_COLUMNS = 4096


class Shape(NamedTuple):
    """`num_tensors` matrices `[rows, columns]`, dealt out evenly to `num_layers` layers."""

    num_tensors: int
    rows: int
    columns: int
    num_layers: int

    @classmethod
    def of(cls, options: PipelineOptions) -> Shape:
        """The shape nearest below the options' bytes: a tensor of 64 elements or more takes a
        multiple of 64, so that it has rows like a model's."""
        numel = options.bytes // options.tensors // 2
        numel -= numel % 64 if numel >= 64 else 0
        columns = math.gcd(numel, _MOST_COLUMNS) if numel >= 64 else numel
        return cls(options.tensors, numel // columns, columns, min(options.tensors, _MOST_LAYERS))

    @property
    def nbytes(self) -> int:
        """Bytes of the model in the wire dtype, bfloat16."""
        return 2 * self.num_tensors * self.rows * self.columns

    def names(self) -> list[str]:
        """Every tensor's name, layer by layer."""
        return [
            f"layers.{layer}.weight_{number}"
            for layer in range(self.num_layers)
            for number in range(layer, self.num_tensors, self.num_layers)
        ]


class Layer(nn.Module):
    """Parameters, and a forward that reads none of them: the engine's time is not measured."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns `hidden`."""
        return hidden


class SyntheticModel(nn.Module):
    """The sink's model, in bfloat16 and all zeros."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(shape.num_layers))
        for name in shape.names():
            _, layer, own = name.split(".")
            zeros = torch.zeros(shape.rows, shape.columns, dtype=torch.bfloat16)
            self.layers[int(layer)].register_parameter(own, nn.Parameter(zeros, False))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Passes through every layer, and so through every gate."""
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def source_tensors(shape: Shape, *, cast: bool) -> dict[str, torch.Tensor]:
    """The source's state dict: random values, float32 with `cast`, else bfloat16."""
    random = torch.Generator().manual_seed(0)
    dtype = torch.float32 if cast else torch.bfloat16
    return {
        name: torch.empty(shape.rows, shape.columns, dtype=dtype).uniform_(1, 2, generator=random)
        for name in shape.names()
    }


def step(tensors: Mapping[str, torch.Tensor]) -> None:
    """Changes every value by one unit in the last place of a bfloat16."""
    for tensor in tensors.values():
        if tensor.dtype == torch.float32:
            tensor.view(torch.int32).add_(1 << 16)
        else:
            tensor.view(torch.int16).add_(1)


def hashes(tensors: Iterable[torch.Tensor]) -> list[int]:
    """A hash (xxh3, 64 bits) of each tensor's bytes in bfloat16."""
    return [
        xxhash.xxh3_64_intdigest(
            tensor.detach().to(torch.bfloat16).view(-1).view(torch.uint8).numpy().data
        )
        for tensor in tensors
    ]
