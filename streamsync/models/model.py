"""A model as its config.json tells it: the tensors of its checkpoint, without a weight."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from streamsync.errors import LayoutError
from streamsync.layout.region import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streamsync.models.weight import Weight

FAMILIES: Final = ("deepseek_v3", "llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""`model_type`s with a file in `families`."""


@dataclass(frozen=True)
class Model:
    """`weights` are the checkpoint's tensors in forward order, under Hugging Face names. A head
    that `is_tied` to the embedding is none of them."""

    config: Mapping[str, Any]
    weights: tuple[Weight, ...]
    dtype: str
    is_tied: bool

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The weights as layouts list them."""
        return tuple(TensorSpec(w.name, w.shape, w.dtype or self.dtype) for w in self.weights)

    @property
    def num_layers(self) -> int:
        """Decoder layers, without those of drafts."""
        return int(self.config["num_hidden_layers"])

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer; 0 for a dense model."""
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        return next((int(self.config[n]) for n in names if self.config.get(n)), 0)

    @cached_property
    def numbers(self) -> dict[tuple[int, int | None], Sequence[int]]:
        """Positions of the weights of each (layer, expert; None: of no expert)."""
        found: dict[tuple[int, int | None], list[int]] = {}
        for number, weight in enumerate(self.weights):
            found.setdefault((weight.layer, weight.expert), []).append(number)
        return {place: tuple(numbers) for place, numbers in found.items()}


def read_model(config: str | Path | Mapping[str, Any], *, dtype: str = "") -> Model:
    """The model that a config.json (a path to it or to its folder, or what it holds) describes.

    `dtype` is that of its tensors; empty: the config's, or bfloat16. Raises `LayoutError` for a
    family without rules, and for a config that lacks something.
    """
    content = _content(config)
    family = content.get("model_type")
    if family not in FAMILIES:
        raise LayoutError(
            f"models of model_type {family!r} have no rules yet; there are rules for "
            f"{', '.join(FAMILIES)}; a new family is a file in streamsync/models/families"
        )
    try:
        weights = tuple(import_module(f"streamsync.models.families.{family}").weights(content))
    except KeyError as error:
        raise LayoutError(f"the config of this {family} lacks {error}") from None
    said = dtype or content.get("dtype") or content.get("torch_dtype") or "bfloat16"
    is_tied = bool(content.get("tie_word_embeddings"))
    if is_tied:
        weights = tuple(weight for weight in weights if weight.name != "lm_head.weight")
    return Model(content, weights, str(said).removeprefix("torch."), is_tied)


def _content(config: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LayoutError(f"{path} can't be read as a config.json: {error}") from None
    if not isinstance(content, dict):
        raise LayoutError(f"{path} is no config.json: it holds no object")
    return content
