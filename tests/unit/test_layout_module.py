"""Plain torch modules as sources and sinks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from streamsync.errors import LayoutError
from streamsync.layout.binding import Binding, torch_dtype
from streamsync.layout.module import bind_module
from streamsync.layout.region import Box


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3, bias=False, dtype=torch.bfloat16)
        self.register_buffer("correction", torch.tensor([0.5001, 0.5003, 0.5]))
        self.register_buffer("expert_map", torch.arange(3))
        self.register_buffer("cache", torch.zeros(9), persistent=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList([Router(), Router()])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("inv_freq", torch.ones(2), persistent=False)


def copy(source: Binding, sink: Binding) -> None:
    """Moves every box of the sink from the source's whole tensors, as a sync would."""
    held = {source.layout.tensors[e.tensor].name: e for e in source.layout.entries}
    for entry in sink.layout.entries:
        spec = sink.layout.tensors[entry.tensor]
        whole = held[spec.name]
        dtype = torch_dtype(spec.dtype)
        view = whole.view.within(whole.box, entry.box)
        sink.view(entry.view, entry.box.shape, dtype).copy_(
            source.view(view, entry.box.shape, dtype)
        )


def test_names_dtypes_and_ties() -> None:
    """Cases 12, 17: tied names once; non-persistent buffers never; each buffer in its own dtype."""
    layout = bind_module(Model(), side="sink").layout
    assert {t.name: t.dtype for t in layout.tensors} == {
        "embed.weight": "float32",
        "layers.0.correction": "float32",
        "layers.0.expert_map": "int64",
        "layers.0.gate.weight": "bfloat16",
        "layers.1.correction": "float32",
        "layers.1.expert_map": "int64",
        "layers.1.gate.weight": "bfloat16",
        "norm.weight": "float32",
        "norm.bias": "float32",
        "head.weight": "float32",
    }
    assert layout.tensors[0].name == "embed.weight"  # forward order
    assert layout.tensors[-1].name == "head.weight"
    assert layout.ties == {"head.weight": "embed.weight"}
    assert all(e.box == Box.whole(layout.tensors[e.tensor].shape) for e in layout.entries)


@torch.no_grad()
def test_copy_into_a_poisoned_module_is_exact() -> None:
    """Cases 14, 15, 17, 20, three syncs: everything listed arrives, the rest stays as it was."""
    trainer, engine = Model(), Model()
    source, sink = bind_module(trainer, side="source"), bind_module(engine, side="sink")
    engine.inv_freq.fill_(17)
    engine.layers[0].cache.fill_(18)
    for step in range(3):
        for tensor in (*trainer.parameters(), *trainer.buffers()):
            tensor.add_(step)
        for name, tensor in engine.state_dict().items():
            tensor.fill_(-1 if name.endswith("map") else float("nan"))
        copy(source, sink)
        for name, tensor in trainer.state_dict().items():
            assert torch.equal(engine.state_dict()[name], tensor), name
        assert engine.head.weight is engine.embed.weight
        assert engine.inv_freq.eq(17).all()
        assert engine.layers[0].cache.eq(18).all()


def test_shared_module_is_tied_under_both_names() -> None:
    module = nn.Module()
    module.one = nn.Linear(2, 2)
    module.two = module.one
    layout = bind_module(module, side="sink").layout
    assert layout.ties == {"two.weight": "one.weight", "two.bias": "one.bias"}


def test_refresh_reads_replaced_parameters() -> None:
    module = nn.Linear(3, 2)
    binding = bind_module(module, side="source")
    module.weight.data = torch.full((2, 3), 4.0)
    assert binding.rebind()
    entry = binding.layout.entries[0]
    assert binding.view(entry.view, entry.box.shape, torch.float32).eq(4).all()
    module.weight = nn.Parameter(torch.full((2, 3), 5.0))
    assert binding.rebind()
    assert binding.view(entry.view, entry.box.shape, torch.float32).eq(5).all()
    module.weight = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(LayoutError, match="reshard") as caught:
        binding.rebind()
    assert caught.value.where["tensor"] == "weight"


def test_untied_later_is_refused() -> None:
    model = Model()
    binding = bind_module(model, side="source")
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    with pytest.raises(LayoutError, match="tie") as caught:
        binding.rebind()
    assert caught.value.where["tensor"] == "head.weight"


class Views(nn.Module):
    def __init__(self, **views: torch.Tensor) -> None:
        super().__init__()
        for name, view in views.items():
            self.register_buffer(name, view)


def test_sink_memory_must_be_written_once() -> None:
    """Case 29: the same memory under two names that are no tie is refused, for a sink only."""
    flat = torch.zeros(8, 6)
    legal = [
        {"a": flat[:4], "b": flat[4:]},
        {"a": flat[:, :3], "b": flat[:, 3:]},  # interleaved, apart
        {"a": flat[::2], "b": flat[1::2].T},
        {"a": flat[:, ::2].T, "b": flat[:, 1::2]},
        {"a": flat.T},
        {"a": flat, "b": flat},
        {"a": flat[0, 0], "b": flat[0, 1]},
    ]
    illegal = [
        {"a": flat, "b": flat[3]},
        {"a": flat[:, :4], "b": flat[:, 3:]},
        {"a": flat[::2], "b": flat[2::3]},
        {"a": flat, "b": flat.T},
        {"a": flat[:4].view(torch.int32), "b": flat[2:6]},
        {"a": flat[0, 0], "b": flat[0, :1]},
        {"a": flat[0].expand(3, 6)},
        {"a": flat.as_strided((3, 3), (2, 1))},
    ]
    for views in legal:
        bind_module(Views(**views), side="sink")
    for views in illegal:
        bind_module(Views(**views), side="source")
        with pytest.raises(LayoutError, match=r"memory|stride 0"):
            bind_module(Views(**views), side="sink")
