"""Which modules get a gate, for which groups."""

from __future__ import annotations

import copy

import torch
from torch import nn

from streamsync.engines.placement import place_gates, unguarded
from streamsync.layout.binding import Binding
from streamsync.layout.module import bind_module
from streamsync.layout.region import Box, Entry, Layout, TensorSpec, View


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.register_buffer("bias", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(self.norm(x)) + self.bias


class Body(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.norm = nn.LayerNorm(3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Model(nn.Module):
    def __init__(self, *, num_layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.model = Body(num_layers)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.model.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.model(ids))


def gates(model: nn.Module, binding: Binding | None = None) -> dict[str, set[str]]:
    binding = bind_module(model, side="sink") if binding is None else binding
    scopes = place_gates(model, binding)
    assert unguarded(binding, scopes) == []
    return {scope.name: set(scope.groups) for scope in scopes}


def test_embedding_layers_norm_and_head_get_gates_and_what_is_around_is_watched() -> None:
    assert gates(Model()) == {
        "": set(),
        "model": set(),
        "model.embed": {"model.embed"},
        "model.layers.0": {"model.layers.0"},
        "model.layers.1": {"model.layers.1"},
        "model.norm": {"model.norm"},
        "head": {"head"},
    }


def test_a_list_of_one_layer_is_no_gate_because_nobody_calls_it() -> None:
    assert "model.layers" not in gates(Model(num_layers=1))
    assert gates(Model(num_layers=1))["model.layers.0"] == {"model.layers.0"}


def test_a_tied_head_waits_for_the_embedding() -> None:
    """Case 12: tied tensors are one memory."""
    assert gates(Model(tied=True))["head"] == {"model.embed"}


def test_tensors_of_the_root_and_of_lists_are_waited_for_at_the_start() -> None:
    class Odd(Model):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.extra = nn.ParameterList([torch.ones(2), torch.ones(3)])
            self.model.shift = nn.Parameter(torch.ones(1))

    placed = gates(Odd())
    assert placed[""] == {"scale", "extra"}
    assert placed["model"] == {"model"}
    assert gates(nn.Linear(2, 2)) == {"": {"weight", "bias"}}


def test_non_persistent_buffers_need_no_gate_of_their_own() -> None:
    model = Model()
    model.model.register_buffer("angles", torch.ones(4), persistent=False)
    assert gates(model)["model"] == set()


def test_a_fused_tensor_waits_for_each_of_its_parts() -> None:
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 2, bias=False))
    names = ("attn.q", "attn.k", "out")
    layout = Layout(
        tensors=tuple(
            TensorSpec(f"{name}.weight", shape, "float32")
            for name, shape in zip(names, ((4, 4), (2, 4), (2, 6)), strict=True)
        ),
        entries=(
            Entry(0, Box.whole((4, 4)), View(0, 0, (4, 1))),
            Entry(1, Box.whole((2, 4)), View(0, 16, (4, 1))),
            Entry(2, Box.whole((2, 6)), View(1, 0, (6, 1))),
        ),
    )
    binding = Binding(layout=layout, storages=(model[0].weight, model[1].weight))
    assert gates(model, binding) == {"": set(), "0": {"attn.q", "attn.k"}, "1": {"out"}}


def test_parameters_cut_from_one_storage_keep_groups_apart() -> None:
    model = Model()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    begin = 0
    for parameter in model.parameters():
        parameter.data = flat[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()
    assert gates(model) == gates(Model())


def test_empty_tensors_need_no_gate() -> None:
    """Case 24: shapes (0,) and (0, 4)."""
    model = Model()
    model.register_parameter("none", nn.Parameter(torch.empty(0, 4)))
    assert gates(model)[""] == set()


def test_memory_of_another_model_or_outside_any_module_is_named() -> None:
    model, other = Model(), Model()
    binding = bind_module(other, side="sink")
    assert len(unguarded(binding, place_gates(model, binding))) == len(binding.layout.tensors)
    linear = nn.Linear(2, 2)
    binding = bind_module(linear, side="sink")
    linear.weight.data = torch.zeros(2, 2)
    assert unguarded(binding, place_gates(linear, binding)) == ["weight"]
    linear.weight.data = binding.storages[0].detach()[:1]  # half of it is nobody's
    assert unguarded(binding, place_gates(linear, binding)) == ["weight"]


def test_a_gate_that_is_left_out_is_found() -> None:
    model = Model()
    binding = bind_module(model, side="sink")
    scopes = place_gates(model, binding)
    for skipped in scopes:
        kept = tuple(scope for scope in scopes if scope is not skipped)
        names = [f"{skipped.name}.{name}" for name in skipped.module.state_dict() if skipped.groups]
        assert sorted(unguarded(binding, kept)) == sorted(names)


def test_a_deep_copy_is_another_model() -> None:
    model = Model()
    binding = bind_module(model, side="sink")
    assert unguarded(binding, place_gates(copy.deepcopy(model), binding)) != []
