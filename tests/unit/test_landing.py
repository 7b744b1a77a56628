"""Landings: transforms, the loader that gets opaque tensors, and when each is due."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from streamsync.engines.placement import place_gates, unguarded
from streamsync.errors import EngineError, LayoutError, PlanError
from streamsync.layout.landing import Landing, Transform, check_transform
from streamsync.layout.recorder import Recording, record_loader
from streamsync.layout.region import TensorSpec
from streamsync.stages.landings import Landings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Weights = Iterable[tuple[str, torch.Tensor]]

NAMES = {"layers.0.gate": (4, 6), "layers.0.up": (4, 6), "layers.0.down": (6, 4)}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(8, 6))
        self.down = nn.Parameter(torch.zeros(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Packed(nn.Module):
    """An engine whose kernel wants `gate_up` in tiles of two rows, column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])

    def load_weights(self, weights: Weights) -> None:
        layer = self.layers[0]
        places = {
            "layers.0.gate": layer.gate_up.data[:4],
            "layers.0.up": layer.gate_up.data[4:],
            "layers.0.down": layer.down.data,
        }
        for name, weight in weights:
            places[name].copy_(weight)

    def post_process(self) -> None:
        self.layers[0].gate_up.data = packed(self.layers[0].gate_up.data)


def packed(plain: torch.Tensor) -> torch.Tensor:
    return plain.unflatten(0, (-1, 2)).transpose(1, 2).flatten(1).half()


TRANSFORM = Transform(
    parameter="layers.0.gate_up", land=lambda staged, live: live.copy_(packed(staged))
)


def specs(names: Mapping[str, tuple[int, ...]] = NAMES) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, shape, "float32") for name, shape in names.items()}


def checkpoint(names: Mapping[str, tuple[int, ...]] = NAMES) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in names.items()}


def recorded(engine: Packed, *transforms: Transform) -> Recording:
    return record_loader(engine, specs(), engine.load_weights, transforms=transforms)


def stage(recording: Recording, tensors: Mapping[str, torch.Tensor]) -> None:
    layout = recording.binding.layout
    for entry in layout.entries:
        where = tuple(slice(a, b) for a, b in zip(entry.box.start, entry.box.stop, strict=True))
        view = recording.binding.view(entry.view, entry.box.shape, torch.float32)
        view.copy_(tensors[layout.tensors[entry.tensor].name][where])


def fresh(tensors: Mapping[str, torch.Tensor]) -> Packed:
    engine = Packed()
    engine.load_weights(tensors.items())
    engine.post_process()
    return engine


def test_a_transformed_parameter_is_staged_and_packed_where_it_is() -> None:
    """Cases 18, 19: three syncs, each from what landed and not from its own output; the packed
    parameter (of another shape and dtype) keeps its address, and equals a fresh engine's."""
    engine = Packed()
    recording = recorded(engine, TRANSFORM)
    assert recording.opaque == {}
    assert recording.unwritten == {}
    assert recording.binding.staging_bytes == 8 * 6 * 4
    engine.load_weights(checkpoint().items())
    engine.post_process()
    (landing,) = recording.binding.landings
    assert landing.names == ("layers.0.gate", "layers.0.up")
    assert landing.groups == {"layers.0"}
    recording.binding.rebind()  # the packed parameter is not the binding's any more
    address = engine.layers[0].gate_up.data_ptr()
    for _ in range(3):
        new = checkpoint()
        stage(recording, new)
        landing.land()
        for mine, theirs in zip(engine.parameters(), fresh(new).parameters(), strict=True):
            assert torch.equal(mine, theirs)
    assert engine.layers[0].gate_up.data_ptr() == address


def test_the_memory_before_packing_is_not_kept() -> None:
    engine = Packed()
    plain = engine.layers[0].gate_up.data_ptr()
    binding = recorded(engine, TRANSFORM).binding
    assert plain not in binding.addresses()


def test_tied_parameters_are_transformed_once() -> None:
    engine = Packed()
    engine.layers.append(Layer())
    engine.layers[1].gate_up = engine.layers[0].gate_up
    recording = recorded(engine, TRANSFORM)
    assert len(recording.binding.landings) == 1
    assert recording.unwritten == {"layers.1.down": 24}


def test_check_transform() -> None:
    """A transform that does what the engine does passes; any other is found before a sync."""
    tensors = checkpoint()
    engine = fresh(tensors)
    before = [p.clone() for p in engine.parameters()]

    def check(land) -> None:
        twin = Packed()
        transform = Transform(parameter="layers.0.gate_up", land=land)
        binding = recorded(twin, transform).binding
        check_transform(binding, transform, tensors, engine)

    check(TRANSFORM.land)
    with pytest.raises(EngineError, match="1 of 96 bytes differ"):
        check(lambda staged, live: live.copy_(packed(staged)).view(torch.uint8)[0, :1].add_(1))
    with pytest.raises(EngineError, match="of 96 bytes differ"):  # a row left out
        check(lambda staged, live: live[1:].copy_(packed(staged)[1:]))
    with pytest.raises(EngineError, match="no transform"):
        check_transform(recorded(Packed()).binding, TRANSFORM, tensors, engine)
    assert all(torch.equal(a, b) for a, b in zip(before, engine.parameters(), strict=True))


def test_a_transform_that_replaces_its_parameter_is_refused() -> None:
    engine = Packed()

    def replace(staged: torch.Tensor, live: torch.Tensor) -> None:
        engine.layers[0].gate_up.data = packed(staged)

    transform = Transform(parameter="layers.0.gate_up", land=replace)
    (landing,) = recorded(engine, transform).binding.landings
    with pytest.raises(EngineError, match="replaced it; write it in place"):
        landing.land()


def test_transforms_that_can_not_be() -> None:
    with pytest.raises(LayoutError, match="names no parameter"):
        recorded(Packed(), Transform(parameter="layers.0.qkv", land=print))
    engine = Packed()
    with pytest.raises(LayoutError, match="let the transform do both") as refused:
        record_loader(
            engine,
            specs(),
            lambda weights: engine.load_weights((name, w * 2) for name, w in weights),
            transforms=[TRANSFORM],
        )
    assert refused.value.where["tensor"] in NAMES


# ---- opaque tensors


def test_a_loader_that_raises_is_quoted() -> None:
    engine = Packed()

    def load(weights: Weights) -> None:
        got = {name: weight * 2 for name, weight in weights}
        engine.load_weights(got.items())
        if not next(iter(got.values())).is_meta:
            raise ValueError("scale out of range")

    recording = record_loader(engine, specs(), load)
    stage(recording, checkpoint())
    (landing,) = recording.binding.landings
    with pytest.raises(EngineError, match=r"layers\.0\.gate, .* of layers\.0: ValueError: scale"):
        landing.land()


def test_what_a_loader_replaces_stays_where_it_is() -> None:
    """Case 18: also a loader that makes new parameters leaves all addresses as they were."""
    engine = Packed()
    layer = engine.layers[0]

    def load(weights: Weights) -> None:
        got = dict(weights)
        layer.down = nn.Parameter(got["layers.0.down"])
        layer.gate_up = nn.Parameter(torch.cat([got["layers.0.gate"], got["layers.0.up"]]))

    recording = record_loader(engine, specs(), load)
    assert set(recording.opaque) == set(NAMES)
    addresses = [p.data_ptr() for p in engine.parameters()]
    for _ in range(3):
        new = checkpoint()
        stage(recording, new)
        for landing in recording.binding.landings:
            landing.land()
        assert [p.data_ptr() for p in engine.parameters()] == addresses
        wanted = Packed()
        wanted.load_weights(new.items())
        assert all(map(torch.equal, engine.parameters(), wanted.parameters()))

    def load_other(weights: Weights) -> None:
        layer.down = nn.Parameter(dict(weights)["layers.0.down"].flatten())

    (landing,) = record_loader(engine, specs(), load_other).binding.landings
    with pytest.raises(EngineError, match=r"replaces layers\.0\.down by torch\.float32\[24\]"):
        landing.land()
    assert [p.data_ptr() for p in engine.parameters()] == addresses


def test_opaque_tensors_come_to_the_loader_by_group() -> None:
    """One call per group with that group's tensors in the checkpoint's order; tensors of two groups
    that make one parameter come together."""
    module = nn.Module()
    for name in ("a", "b", "tied"):
        module.register_parameter(name, nn.Parameter(torch.zeros(4)))
    names = ["layers.1.b", "layers.0.a2", "layers.0.a", "embed.w", "head.w"]
    calls: list[list[str]] = []

    def load(weights: Weights) -> None:
        calls.append([])
        for name, weight in weights:
            calls[-1].append(name)
            target = {"layers.1.b": module.b, "embed.w": module.tied, "head.w": module.tied}
            target.get(name, module.a).data.copy_(weight * 2)

    recording = record_loader(module, specs(dict.fromkeys(names, (4,))), load)
    calls.clear()
    landings = recording.binding.landings
    for landing in landings:
        landing.land()
    assert sorted(calls) == [["embed.w", "head.w"], ["layers.0.a2", "layers.0.a"], ["layers.1.b"]]
    assert {x.groups for x in landings} >= {frozenset({"embed", "head"})}
    assert {x.parameters for x in landings} == {("tied",), ("a",), ("b",)}


def test_gates_guard_what_a_landing_writes() -> None:
    """The parameter is waited for, not the staging memory, which no module owns."""
    engine = Packed()
    recording = recorded(engine, TRANSFORM)
    engine.post_process()
    scopes = place_gates(engine, recording.binding)
    assert unguarded(recording.binding, scopes) == []
    guarding = next(s for s in scopes if any(t is engine.layers[0].gate_up for t in s.tensors))
    assert guarding.groups == {"layers.0"}
    assert set(unguarded(recording.binding, scopes[:1])) == NAMES.keys()


# ---- when they are due


def landing(*names: str, makes: tuple[str, ...] = ()) -> Landing:
    return Landing(
        names=names, staging=(), module=nn.Module(), parameters=(), work=list, makes=makes
    )


def test_a_landing_waits_for_its_groups_and_gates_for_it() -> None:
    one, both = landing("layers.0.x"), landing("layers.0.y", "layers.1.y")
    order = Landings([one, both], {"layers.0.x", "layers.0.y", "layers.1.y", "norm.w"})
    assert order.landed("norm") == []
    assert order.openable() == ["norm"]
    assert order.landed("layers.0") == [one]
    assert order.openable() == []
    assert order.landed("layers.1") == [both]
    order.done(both)
    assert order.openable() == ["layers.1"]
    order.done(one)
    assert order.openable() == ["layers.0"]
    assert order.openable() == []


def test_a_sync_brings_all_of_a_landings_tensors_or_none() -> None:
    """Case 13."""
    both = landing("layers.0.x", "layers.1.y")
    assert Landings([both], {"norm.w"}).landed("layers.0") == []
    with pytest.raises(PlanError, match=r"leaves out layers\.1\.y"):
        Landings([both], {"layers.0.x"})


def test_a_landing_gets_what_one_before_it_makes() -> None:
    """What the sink quantises itself never travels under its own name."""
    made = landing("layers.0.w@wide", makes=("layers.0.w",))
    both = landing("layers.0.w", "layers.0.w_scale_inv")
    delivered = {"layers.0.w@wide", "layers.0.w_scale_inv"}
    assert Landings([made, both], delivered).landed("layers.0") == [made, both]
    with pytest.raises(PlanError, match=r"leaves out layers\.0\.w"):
        Landings([landing("layers.0.w@wide"), both], delivered)
