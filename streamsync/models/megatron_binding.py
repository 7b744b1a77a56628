"""A live Megatron-Core model as a source: the rules' boxes in the memory of its parameters.

What the rules say of a parameter is held against what the parameter says of itself: its shape, and
`tensor_model_parallel`, `partition_dim`, `partition_stride` and `allreduce`, which Megatron sets
where it makes it (`megatron/core/tensor_parallel/layers.py`). A model that was cut in another way
than the rules think is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from streamsync.errors import LayoutError
from streamsync.layout.binding import Binding, dtype_name
from streamsync.layout.held import Held, assemble, hold, refreshed
from streamsync.layout.module import module_tensors
from streamsync.layout.region import Box, TensorSpec
from streamsync.models.megatron_rules import Parameter, Place, Rules

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_HINT = "Megatron changed the geometry of the model: bind it again under a new plan"
_NUMBERED = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")
"""TransformerEngine's name of one expert's parameter in a grouped linear."""


class _ToDict(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


def bind_megatron(
    chunks: nn.Module | Sequence[nn.Module],
    config: str | Path | Mapping[str, Any] | _ToDict,
    *,
    place: Place | None = None,
) -> Binding:
    """The source binding of this rank's part of a `GPTModel`, under Hugging Face names.

    `chunks` is the model or the list of its virtual pipeline stages, in Megatron's wrappers or not;
    `config` is the Hugging Face config: a path, a mapping or a `PretrainedConfig`. Where this rank
    stands is asked of `megatron.core.parallel_state` unless `place` says it. The memory stays
    Megatron's: the binding keeps it alive and copies nothing, and `refresh` reads the parameters
    again, so that they may be moved (offloaded, given other `.data`) while their geometry stays.
    Vocabulary padding belongs to no tensor; the last stage's copy of tied embeddings is one more
    holder of them.

    Raises `LayoutError`, naming the parameter, for one that no rule knows, whose shape is not what
    the config and this rank's place make it, or that lacks Megatron's own marks.
    """
    cores = [_unwrapped(c) for c in ([chunks] if isinstance(chunks, nn.Module) else chunks)]
    rules = Rules(_mapping(config), place or _place())

    def bound() -> Binding:
        return assemble(_held(cores, rules))

    binding = bound()

    def refresh() -> Sequence[torch.Tensor]:
        return refreshed(binding.layout, bound(), _HINT)

    binding.refresh = refresh
    return binding


def _mapping(config: str | Path | Mapping[str, Any] | _ToDict) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if isinstance(config, str | Path):
        path = Path(config)
        read: dict[str, Any] = json.loads(
            (path / "config.json" if path.is_dir() else path).read_text()
        )
        return read
    return config.to_dict()


def _unwrapped(chunk: nn.Module) -> nn.Module:
    """The `GPTModel` in its wrappers (Float16Module, DistributedDataParallel)."""
    core = chunk
    while not hasattr(core, "decoder"):
        inner = getattr(core, "module", None)
        if not isinstance(inner, nn.Module):
            raise LayoutError(
                f"a {type(chunk).__name__} holds no GPTModel of Megatron-Core; give other kinds of "
                "models to the Publisher as they are"
            )
        core = inner
    return core


def _place() -> Place:
    """Where this rank stands, by Megatron's own account."""
    # A model of Megatron that was built without importing it can't be.
    from megatron.core import parallel_state as mpu

    if not mpu.model_parallel_is_initialized():
        raise LayoutError(
            "megatron.core.parallel_state knows no process groups, so this rank's place is "
            "unknown; call initialize_model_parallel() first, or give bind_megatron a place"
        )
    return Place(
        tp=mpu.get_tensor_model_parallel_rank(),
        tp_size=mpu.get_tensor_model_parallel_world_size(),
        ep=mpu.get_expert_model_parallel_rank(),
        ep_size=mpu.get_expert_model_parallel_world_size(),
        etp=mpu.get_expert_tensor_parallel_rank(),
        etp_size=mpu.get_expert_tensor_parallel_world_size(),
    )


def _held(cores: Sequence[nn.Module], rules: Rules) -> list[Held]:
    """What this rank holds, in forward order."""
    parts: dict[str, dict[Box, torch.Tensor]] = {}
    origins: dict[str, tuple[TensorSpec, torch.Tensor]] = {}
    for core in cores:
        for local, name, tensor in _tensors(core, rules.place):
            memory = _memory(local, tensor)
            marked = bool(getattr(tensor, "tensor_model_parallel", False))
            wanted = rules.parameter(name, is_cut=marked, num_rows=tensor.shape[0])
            _check(local, tensor, wanted, rules.place)
            for part in wanted.parts:
                spec = TensorSpec(part.tensor, part.shape, dtype_name(memory.dtype))
                origins.setdefault(part.tensor, (spec, tensor))
                offset = memory.storage_offset() + part.offset
                view = memory.as_strided(part.box.shape, part.strides, offset)
                # A stage may hold rows of tied embeddings twice; Megatron keeps the two equal.
                parts.setdefault(part.tensor, {}).setdefault(part.box, view)
    return [
        Held(spec, origin, tuple((box, view) for box, view in parts[name].items() if box.numel))
        for name, (spec, origin) in origins.items()
    ]


def _tensors(core: nn.Module, place: Place) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Name here, name over the whole model and tensor of all that a checkpoint of `core` holds.

    Layers of a pipeline stage and experts of a rank count from 0 here; the layers themselves know
    their numbers over the whole model.
    """
    numbers = [layer.layer_number - 1 for layer in core.decoder.layers]  # type: ignore[union-attr]
    for local, tensor in module_tensors(core):
        words = _NUMBERED.sub(r"mlp.experts.local_experts.\3.\1.\2", local).split(".")
        if words[:2] == ["decoder", "layers"]:
            words[2] = str(numbers[int(words[2])])
        if "local_experts" in words:
            at = words.index("local_experts") + 1
            num_experts: int = core.config.num_moe_experts  # type: ignore[union-attr,assignment]
            words[at] = str(place.ep * num_experts // place.ep_size + int(words[at]))
        yield local, ".".join(words), tensor


def _memory(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The live memory of a parameter, in which its rows follow each other."""
    held = hold(name, tensor)
    memory = held.parts[0][1] if held.parts else tensor.detach()
    if memory.shape != tensor.shape or not memory.is_contiguous():
        raise LayoutError(
            f"its memory ({list(memory.shape)}, strides {list(memory.stride())}) is not that of "
            f"Megatron's parameter {list(tensor.shape)}; bind sharded or strided parameters under "
            "checkpoint names of their own with bind_tensors",
            tensor=name,
        )
    return memory


def _check(name: str, tensor: torch.Tensor, wanted: Parameter, place: Place) -> None:
    """Raises `LayoutError` unless the parameter itself says what the rules say of it."""

    def refuse(what: str, do: str) -> LayoutError:
        return LayoutError(f"{what}; {do}", tensor=name, place=place)

    if tuple(tensor.shape) != wanted.shape:
        raise refuse(
            f"its local shape is {list(tensor.shape)} and the rules make it {list(wanted.shape)}",
            "bind it with the config that the model was built from",
        )
    if name.endswith("router.expert_bias") and tensor.dtype is not torch.float32:
        raise refuse(
            f"the router's bias is {dtype_name(tensor.dtype)}, which Megatron makes float32 in its "
            "first forward",
            "call the router's _maintain_float32_expert_bias() before",
        )
    if not isinstance(tensor, nn.Parameter):
        return
    cut = wanted.dim is not None and wanted.num_cuts > 1
    marked = bool(getattr(tensor, "tensor_model_parallel", False))
    marks = "tensor_model_parallel, partition_dim, partition_stride"
    # TransformerEngine leaves an expert's marks out where Megatron itself cuts it.
    if cut and not marked and not wanted.is_expert:
        raise refuse(
            f"it is one of {wanted.num_cuts} parts along dim {wanted.dim}, but lacks Megatron's "
            f"marks of that ({marks})",
            "whoever replaced the parameter must copy them "
            "(megatron.core.tensor_parallel.copy_tensor_model_parallel_attributes)",
        )
    if marked and (place.etp_size if wanted.is_expert else place.tp_size) > 1:
        dim, stride = tensor.partition_dim, getattr(tensor, "partition_stride", 1)  # type: ignore[attr-defined]
        if dim != wanted.dim or stride not in (1, wanted.stride):
            raise refuse(
                f"it says it is cut along dim {dim} with stride {stride}, and the rules say "
                f"{wanted.dim} and {wanted.stride}",
                f"its {marks} must be those that Megatron gave it",
            )
    if getattr(tensor, "allreduce", True) == (wanted.is_expert and place.ep_size > 1):
        raise refuse(
            f"its gradients are {'' if getattr(tensor, 'allreduce', True) else 'not '}reduced over "
            f"all data parallel ranks (allreduce), and expert parallelism is {place.ep_size}",
            "an expert's parameter must belong to the expert parallel groups, any other to all",
        )
