"""The demo's own proof that what landed is what the trainer has, bit for bit.

Nothing here uses a layout, a plan or a digest: every trainer rank writes its shards and their
corners as torch's DTensor computes them, the engine writes its parameters, and the parent pastes
the shards together, casts with torch and compares bytes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from streamsync.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ENGINE_DTYPE: Final = torch.bfloat16
"""What the engine's rule declares that fp32 parameters are cast to."""

_PLACES: Final = "places"


def write_shards(model: nn.Module, path: Path) -> None:
    """Writes this rank's shard of every parameter, and where it lies in the whole tensor."""
    from safetensors.torch import save_file
    from torch.distributed.tensor import DTensor  # a second that the parent need not spend
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shards: dict[str, torch.Tensor] = {}
    places: dict[str, dict[str, Sequence[int]]] = {}
    for name, parameter in model.named_parameters():
        whole = parameter.detach()
        if isinstance(whole, DTensor):
            shard = whole.to_local()
            _, corner = compute_local_shape_and_global_offset(
                whole.shape, whole.device_mesh, whole.placements
            )
        else:
            shard, corner = whole, (0,) * whole.ndim
        if shard.numel():
            shards[name] = shard.contiguous()
        places[name] = {"shape": tuple(whole.shape), "corner": tuple(corner)}
    save_file(shards, path, metadata={_PLACES: json.dumps(places)})


def write_parameters(model: nn.Module, path: Path) -> None:
    """Writes every parameter of an engine as it is; a tied one once."""
    from safetensors.torch import save_file

    save_file({name: p.detach().contiguous() for name, p in model.named_parameters()}, path)


def mismatched(shard_paths: Sequence[Path], parameters_path: Path) -> list[str]:
    """Names whose bytes differ between the trainer's shards, cast as declared, and the engine's
    parameters, or that only one of the two has.

    Raises `IntegrityError` when the shards don't make up a tensor exactly once: then the copies are
    no yardstick.
    """
    from safetensors import safe_open

    # safetensors' own types say nothing of what these return.
    files: list[Any] = [safe_open(path, framework="pt") for path in shard_paths]
    places = [json.loads(file.metadata()[_PLACES]) for file in files]
    present = [set(file.keys()) for file in files]
    engine: Any = safe_open(parameters_path, framework="pt")
    engine_names, trainer_names = set(engine.keys()), {name for place in places for name in place}
    wrong = engine_names ^ trainer_names
    for name in sorted(engine_names & trainer_names):
        parts = [
            (place[name]["corner"], file.get_tensor(name))
            for file, place, names in zip(files, places, present, strict=True)
            if name in names
        ]
        shape = next(place[name]["shape"] for place in places if name in place)
        expected = paste(name, tuple(shape), parts).to(ENGINE_DTYPE)
        if not same_bits(expected, engine.get_tensor(name)):
            wrong.add(name)
    return sorted(wrong)


def paste(
    name: str, shape: tuple[int, ...], parts: Sequence[tuple[Any, torch.Tensor]]
) -> torch.Tensor:
    """The whole tensor of `shape` from (corner, shard) pairs that cover it exactly once."""
    if not parts:
        if 0 in shape:
            return torch.empty(shape)
        raise IntegrityError("no trainer rank has a shard of it", tensor=name)
    whole = torch.empty(shape, dtype=parts[0][1].dtype)
    times = torch.zeros(shape, dtype=torch.uint8)
    for corner, shard in parts:
        place = tuple(slice(a, a + n) for a, n in zip(corner, shard.shape, strict=True))
        whole[place] = shard
        times[place] += 1
    if not bool((times == 1).all()):
        raise IntegrityError("the trainer's shards don't cover it exactly once", tensor=name)
    return whole


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes (so NaN equals the same NaN)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (a, b)))
