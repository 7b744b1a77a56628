"""The group of a tensor: the unit that lands at once and that one gate waits for. Pure."""

from __future__ import annotations

import re

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.\d+(?=\.)")


def group_of(name: str) -> str:
    """The group that the tensor of canonical `name` belongs to.

    A tensor of a numbered layer belongs to that layer (`model.layers.7`, `transformer.h.0`; of
    nested stacks the outermost counts, because its forward encloses the others). Any other one
    belongs to the module that owns it (`model.embed_tokens`, `lm_head`); a name without a dot is
    its own group.
    """
    layer = _LAYER.search(name)
    if layer is not None:
        return name[: layer.end()]
    return name.rpartition(".")[0] or name
