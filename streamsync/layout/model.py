"""The one way from a model to its binding, whatever kind of model it is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from streamsync.layout.module import Side, bind_module

if TYPE_CHECKING:
    from torch import nn

    from streamsync.layout.binding import Binding


def bind_model(model: nn.Module, *, side: Side) -> Binding:
    """The binding of `model` as a source or a sink, under canonical names where they are known.

    A transformers model gets the names of its Hugging Face checkpoint (experts that transformers
    stacks are told apart again); any other module its own parameter names. Memory, refresh and
    errors: see `bind_module`.
    """
    # A model of a library that was never imported can't be here, so nothing is imported for it.
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        from streamsync.layout.transformers import bind_transformers

        return bind_transformers(model, side=side)
    return bind_module(model, side=side)
