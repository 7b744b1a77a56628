"""Groups of tensor names."""

from __future__ import annotations

import pytest

from streamsync.layout.group import group_of


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.0"),
        ("model.layers.17.mlp.experts.3.up_proj.weight", "model.layers.17"),
        ("transformer.h.11.attn.c_attn.bias", "transformer.h.11"),
        ("vision.blocks.2.norm.weight", "vision.blocks.2"),
        ("layers.4.w", "layers.4"),
        ("model.layers.3.inner.layers.1.weight", "model.layers.3"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("model.norm.weight", "model.norm"),
        ("lm_head.weight", "lm_head"),
        ("weight", "weight"),
        ("layers.4", "layers"),
        ("model.sublayers.3.weight", "model.sublayers.3"),
        ("model.layers.norm.weight", "model.layers.norm"),
    ],
)
def test_group(name: str, group: str) -> None:
    assert group_of(name) == group
