"""`streamsync layout check`: whether the rules of a model fit its config and its checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from streamsync.errors import LayoutError
from streamsync.layout.region import Box
from streamsync.models.checkpoint import read_listing
from streamsync.models.engine import engine_key, engine_layout
from streamsync.models.model import read_model
from streamsync.models.parallelism import Parallelism
from streamsync.models.trainer import trainer_key, trainer_layout
from streamsync.plan.cover import extent, without

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from streamsync.layout.region import Layout
    from streamsync.models.model import Model

_MAX_LINES: Final = 20


@dataclass(frozen=True, slots=True)
class Options:
    """What the command was asked; no parallelism: one rank that holds all."""

    config: Path
    source: str
    sink: str
    json: Path | None


def main(options: Options) -> int:
    """Checks and prints; 1 when something does not fit."""
    model = read_model(options.config)
    listing = read_listing(options.config)
    faults = [] if listing is None else compare(model, listing)
    sides: dict[str, int] = {}
    for side, text in (("source", options.source), ("sink", options.sink)):
        parallelism = Parallelism.parse(text)
        key, make = _MAKERS[side]
        ranks = {key(parallelism, rank): rank for rank in range(parallelism.replica_ranks)}
        layouts = [make(model, parallelism, rank) for rank in ranks.values()]
        left_out = drafts(model) if side == "sink" else set()
        faults += [f"{side} {text}: {fault}" for fault in gaps(model, layouts, left_out)]
        sides[side] = parallelism.replica_ranks
    result = {
        "family": model.config["model_type"],
        "num_tensors": len(model.tensors),
        "bytes": sum(spec.nbytes for spec in model.tensors),
        "compared_with_checkpoint": listing is not None,
        "ranks": sides,
        "faults": faults,
        "ok": not faults,
    }
    if options.json is not None and str(options.json) != "-":
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2) if str(options.json) == "-" else tell(result, options))
    return 0 if result["ok"] else 1


_MAKERS: Final[
    dict[
        str,
        tuple[
            Callable[[Parallelism, int], tuple[int, ...]],
            Callable[[Model, Parallelism, int], Layout],
        ],
    ]
] = {"source": (trainer_key, trainer_layout), "sink": (engine_key, engine_layout)}


def tell(result: dict[str, Any], options: Options) -> str:
    """The report for a person."""
    lines = [
        f"{result['family']}: {result['num_tensors']} tensors, {result['bytes'] / 1e9:.3g} GB",
        "names, shapes and dtypes were compared with the checkpoint beside the config"
        if result["compared_with_checkpoint"]
        else "no safetensors beside the config: names and shapes are the rules' own",
        f"source {options.source}: {result['ranks']['source']} ranks",
        f"sink {options.sink}: {result['ranks']['sink']} ranks a replica",
    ]
    faults = result["faults"]
    if not faults:
        lines.append("every element of every tensor has its place on both sides")
    lines += faults[:_MAX_LINES]
    if len(faults) > _MAX_LINES:
        lines.append(f"... and {len(faults) - _MAX_LINES} more")
    return "\n".join(lines)


def compare(model: Model, listing: dict[str, tuple[tuple[int, ...], str] | None]) -> list[str]:
    """How the rules' tensors differ from those that the checkpoint's files list."""
    ruled = {spec.name: (spec.shape, spec.dtype) for spec in model.tensors}
    known = set(ruled) | ({"lm_head.weight"} if model.is_tied else set())
    faults = [
        f"{name}: in the checkpoint, without a rule" for name in sorted(listing.keys() - known)
    ]
    faults += [f"{name}: ruled, not in the checkpoint" for name in sorted(ruled.keys() - listing)]
    for name, found in listing.items():
        if found is not None and name in ruled and found != ruled[name]:
            (shape, dtype), (own_shape, own_dtype) = found, ruled[name]
            faults.append(
                f"{name}: {dtype}{list(shape)} in the checkpoint, {own_dtype}{list(own_shape)} "
                "by rule"
            )
    return faults


def gaps(model: Model, layouts: Iterable[Layout], left_out: set[str]) -> list[str]:
    """What no rank holds, in words. Raises `LayoutError` for a layout that holds unknown names."""
    boxes: dict[str, set[Box]] = {spec.name: set() for spec in model.tensors}
    for layout in layouts:
        for entry in layout.entries:
            name = layout.tensors[entry.tensor].name
            if name not in boxes:
                raise LayoutError("held by a rank, but none of the model's tensors", tensor=name)
            boxes[name].add(entry.box)
    faults: list[str] = []
    known: dict[tuple[tuple[int, ...], frozenset[Box]], list[Box]] = {}
    for spec in model.tensors:
        if spec.name in left_out:
            continue
        key = spec.shape, frozenset(boxes[spec.name])
        if key not in known:
            known[key] = without(Box.whole(spec.shape), boxes[spec.name])
        if known[key]:
            missing = ", ".join(extent(box, spec.shape) for box in known[key][:4])
            faults.append(f"{spec.name} {spec.dtype}{list(spec.shape)}: nobody has {missing}")
    return faults


def drafts(model: Model) -> set[str]:
    """Tensors of layers after the last one, which engines load into another model, if at all."""
    return {w.name for w in model.weights if w.layer >= model.num_layers and ".layers." in w.name}
