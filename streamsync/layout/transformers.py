"""Transformers models under the names of their Hugging Face checkpoints.

Transformers 5 keeps experts stacked and converts checkpoints while it loads them
(`transformers.core_model_loading`). Its own conversion is reversed here on meta tensors that
remember where they came from: no weight is touched, and no second list of names is kept.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from streamsync.errors import LayoutError
from streamsync.layout.binding import Binding, dtype_name, torch_dtype
from streamsync.layout.module import Side, bind_module, module_tensors
from streamsync.layout.overlap import check_writable
from streamsync.layout.region import Entry, Layout, TensorSpec, View, contiguous_strides
from streamsync.layout.strided import align
from streamsync.layout.trace import Fragment, Trace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightTransform

_BLOCKS = frozenset(
    {"Chunk", "Concatenate", "MergeModulelist", "Split", "SplitModulelist", "Transpose"}
)
"""Conversions that only move whole blocks, so that they are geometry."""


def bind_transformers(model: PreTrainedModel, *, side: Side) -> Binding:
    """The binding of a transformers model under its checkpoint names, in forward order.

    Fused and stacked parameters are told apart: an entry per expert and projection, in the live
    memory of the fused parameter; FSDP2 shards of them too. Memory and `refresh` are those of
    `bind_module`. Raises `LayoutError` for quantised models and for conversions that are not
    blocks (`Interleave`, `PermuteForRope`, ...), naming them.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        raise LayoutError(
            f"{type(model).__name__} was quantised by transformers; load it dequantised, or use an "
            "engine that records its own loader"
        )
    own = bind_module(model, side="source")
    made = _checkpoint_tensors(model, own.layout.tensors)
    layout = _renamed(own.layout, made)
    binding = Binding(layout=layout, storages=own.storages)
    if side == "sink":
        check_writable(binding)

    def refresh() -> Sequence[torch.Tensor]:
        own.rebind()
        return own.storages

    binding.refresh = refresh
    return binding


def checkpoint_specs(model: PreTrainedModel) -> list[TensorSpec]:
    """The tensors of `model`'s checkpoint; the model may be on the meta device.

    Of tied tensors the first one's name only, as transformers saves them; what transformers never
    loads in less than fp32 is fp32. Errors: see `bind_transformers`.
    """
    in_fp32 = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    seen: set[int] = set()
    own: list[TensorSpec] = []
    for name, tensor in module_tensors(model):
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        kept = tensor.is_floating_point() and any(part in name for part in in_fp32)
        dtype = dtype_name(torch.float32 if kept else tensor.dtype)
        own.append(TensorSpec(name, tuple(tensor.shape), dtype))
    return [spec for spec, _ in _checkpoint_tensors(model, own).values()]


def _checkpoint_tensors(
    model: PreTrainedModel, tensors: Sequence[TensorSpec]
) -> dict[str, tuple[TensorSpec, list[Fragment]]]:
    """By checkpoint name: the tensor, and the boxes of the model's tensors that it is made of.

    A fragment's view says where its box lies in the row-major checkpoint tensor.
    """
    from transformers.core_model_loading import revert_weight_conversion

    conversions = _conversions(model)
    _check_blocks([spec.name for spec in tensors], conversions)
    probes = {
        spec.name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
        for spec in tensors
    }
    # Stands in for the model, so that its own record of conversions is neither used nor changed.
    reader: Any = SimpleNamespace(config=model.config, _weight_conversions=conversions)
    with Trace(probes) as trace:
        reverted = revert_weight_conversion(reader, dict(probes))
    made: dict[str, tuple[TensorSpec, list[Fragment]]] = {}
    for name, tensor in reverted.items():
        spec = TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype))
        dense = View(0, 0, contiguous_strides(spec.shape))
        try:
            made[name] = spec, list(trace.fragments(tensor, dense))
        except LayoutError as error:
            raise error.at(tensor=name) from None
    used = {fragment.name for _, fragments in made.values() for fragment in fragments}
    for spec in tensors:
        if spec.name not in used and spec.nbytes:
            raise LayoutError(
                "transformers' conversion leaves it out of checkpoints; list it as non-persistent "
                "or bind the model as a plain module (bind_module)",
                tensor=spec.name,
            )
    return made


def _conversions(model: PreTrainedModel) -> list[WeightTransform]:
    """Transformers' conversions for this kind of model, however this one was made.

    Whether a prefix is part of the checkpoint's names can only be known from the checkpoint that
    a model was loaded from, so `PrefixChange` counts only where that loading used it.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    loaded = getattr(model, "_weight_conversions", None) or []
    prefixes = {tuple(x.source_patterns) for x in loaded if isinstance(x, PrefixChange)}
    return [
        conversion
        for conversion in get_model_conversion_mapping(_plain(model), add_legacy=False)
        if not isinstance(conversion, PrefixChange) or tuple(conversion.source_patterns) in prefixes
    ]


def _plain(model: PreTrainedModel) -> PreTrainedModel:
    """`model`, or a twin without memory when wrappers (FSDP2) changed the classes of its modules.

    Transformers looks conversions up by class and takes a wrapped class for foreign code.
    """
    from transformers import PreTrainedModel

    if all(
        type(module).__module__.startswith("transformers.")
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
    ):
        return model
    plain = next(
        (c for c in type(model).__mro__ if c.__module__.startswith("transformers.models.")), None
    )
    if plain is None:
        return model
    with torch.device("meta"):
        twin: PreTrainedModel = plain(model.config)
    return twin


def _check_blocks(names: Sequence[str], conversions: Sequence[WeightTransform]) -> None:
    converters = [c.reverse_transform() for c in conversions if getattr(c, "operations", None)]
    for name in names:
        for converter in reversed(converters):
            if converter.rename_source_key(name)[1] is None:
                continue
            operations: Any = getattr(converter, "operations", ())
            foreign = {type(operation).__name__ for operation in operations} - _BLOCKS
            if foreign:
                raise LayoutError(
                    f"transformers converts it with {', '.join(sorted(foreign))}, which is more "
                    "than moving blocks; such models can't be synced by layout yet",
                    tensor=name,
                )
            break


def _renamed(own: Layout, made: Mapping[str, tuple[TensorSpec, list[Fragment]]]) -> Layout:
    """The layout `own` with its tensors taken apart, or joined, into those of `made`."""
    numbers = {spec.name: number for number, spec in enumerate(own.tensors)}
    held: dict[str, list[Entry]] = {}
    for entry in own.entries:
        held.setdefault(own.tensors[entry.tensor].name, []).append(entry)

    def place(name: str) -> tuple[object, ...]:
        fragments = made[name][1]
        return min(((numbers[f.name], f.box.start) for f in fragments), default=(len(numbers), ()))

    tensors: list[TensorSpec] = []
    entries: list[Entry] = []
    ties: dict[str, str] = {}
    owners: dict[tuple[object, ...], str] = {}
    for name in sorted(made, key=place):
        spec, fragments = made[name]
        dtypes = {own.tensors[numbers[f.name]].dtype for f in fragments} | {spec.dtype}
        if len(dtypes) > 1:
            raise LayoutError(
                f"its parts have several dtypes in the model ({', '.join(sorted(dtypes))})",
                tensor=name,
            )
        parts = [(own.ties.get(f.name, f.name), f) for f in fragments]
        memory = spec.shape, *((owner, f.box, f.view) for owner, f in parts)
        tensors.append(spec)
        if fragments and owners.setdefault(memory, name) != name:
            ties[name] = owners[memory]
            continue
        for owner, fragment in parts:
            for entry in held.get(owner, ()):
                entries += _taken(entry, fragment, spec.shape, len(tensors) - 1)
    return Layout(tensors=tuple(tensors), entries=tuple(entries), ties=ties)


def _taken(entry: Entry, fragment: Fragment, shape: tuple[int, ...], tensor: int) -> list[Entry]:
    """The part of a model tensor's `entry` that belongs to `fragment` of a checkpoint tensor."""
    common = entry.box.intersect(fragment.box)
    if common is None:
        return []
    at = fragment.view.within(fragment.box, common)
    local = entry.view.within(entry.box, common)
    return [Entry(tensor, box, view) for box, view in align(shape, common.shape, at, local)]
