"""Real model classes end to end: stacked experts, and projections that a loader fuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest
import torch
from torch import nn

from streamsync.config import Config
from streamsync.engines.torch_module import TorchEngine
from streamsync.layout.recorder import record_loader
from streamsync.layout.region import TensorSpec
from streamsync.plan.plan import CastRule, Rules
from streamsync.testing.job import LocalJob

if TYPE_CHECKING:
    from collections.abc import Iterable

BF16 = Rules(casts=(CastRule(source="float32", sink="bfloat16"),))
HIDDEN, FFN = 6, 10


class FusedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 2 * FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        gate, up = self.gate_up(x + torch.softmax(q @ k.mT, -1) @ v).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


class FusedModel(nn.Module):
    """An engine's model: fused projections, and a loader that takes checkpoint names."""

    ROWS: ClassVar = {
        "q_proj": ("qkv", 0, HIDDEN),
        "k_proj": ("qkv", HIDDEN, HIDDEN),
        "v_proj": ("qkv", 2 * HIDDEN, HIDDEN),
        "gate_proj": ("gate_up", 0, FFN),
        "up_proj": ("gate_up", FFN, FFN),
        "down_proj": ("down", 0, HIDDEN),
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, HIDDEN)
        self.layers = nn.ModuleList(FusedLayer() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name == "embed.weight":
                self.embed.weight.data.copy_(weight)
                continue
            _, number, projection, _ = name.split(".")
            fused, start, length = self.ROWS[projection]
            parameter = self.layers[int(number)].get_submodule(fused).weight
            parameter.data.narrow(0, start, length).copy_(weight)


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (11, HIDDEN)}
    for number in range(3):
        for projection, (fused, _, length) in FusedModel.ROWS.items():
            width = FFN if fused == "down" else HIDDEN
            shapes[f"layers.{number}.{projection}.weight"] = (length, width)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_recorded_loader() -> None:
    """Three syncs into the layout recorded from the engine's loader equal that loader's work."""
    source, sink, wanted = checkpoint(0), FusedModel(), FusedModel()
    specs = {n: TensorSpec(n, tuple(t.shape), "float32") for n, t in source.items()}
    recording = record_loader(sink, specs, sink.load_weights)
    assert recording.opaque == {}
    with LocalJob(Config(transport="tcp", bucket_bytes=128)) as job:
        job.add_sources([source])
        job.add_replica([TorchEngine(sink, binding=recording.binding)])
        job.wait_for_replicas()
        for step in range(3):
            new = checkpoint(step + 1)
            for name, tensor in source.items():
                tensor.copy_(new[name])
            job.sync(step)
            wanted.load_weights(new.items())
            state = wanted.state_dict()
            assert all(torch.equal(t, state[name]) for name, t in sink.state_dict().items())
            ids = torch.arange(5)
            assert torch.equal(sink(ids), wanted(ids))


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_transformers_models(kind: str) -> None:
    """Three syncs fp32 → bf16 between transformers models; the MoE's experts are stacked there."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    size = {
        "hidden_size": 16,  # torch's grouped matmul wants strides of 16 bytes
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "vocab_size": 41,
        "max_position_embeddings": 32,
    }
    if kind == "llama":
        config = transformers.LlamaConfig(**size, tie_word_embeddings=True)
        build = transformers.LlamaForCausalLM
    else:
        config = transformers.Qwen3MoeConfig(
            **size, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8
        )
        build = transformers.Qwen3MoeForCausalLM
    source, sink = build(config).eval(), build(config).to(torch.bfloat16).eval()
    with LocalJob(Config(transport="memory", bucket_bytes=1000)) as job:
        job.add_sources([source])
        job.add_replica([TorchEngine(sink)], rules=BF16)
        job.wait_for_replicas()
        for step in range(3):
            with torch.no_grad():
                for parameter in source.parameters():
                    parameter.normal_()
            job.sync(step)
            wanted = source.state_dict()
            for name, tensor in sink.state_dict().items():
                assert torch.equal(tensor, wanted[name].to(tensor.dtype)), name
            ids = torch.arange(7)[None]
            fresh = build(config).to(torch.bfloat16).eval()
            fresh.load_state_dict(wanted)
            assert torch.equal(sink(ids).logits, fresh(ids).logits)
