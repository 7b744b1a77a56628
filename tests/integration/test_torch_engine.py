"""A torch module behind gates: real threads, live memory, bit-for-bit outputs."""

from __future__ import annotations

import contextlib
import copy
import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn import functional

from streamsync.engines.torch_module import TorchEngine
from streamsync.errors import EngineError, PoisonedStepError, QuarantinedError, VersionError
from streamsync.layout.binding import torch_dtype
from streamsync.layout.group import group_of
from streamsync.layout.module import bind_module
from streamsync.types import Version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

LONG = 20.0
IDS = torch.tensor([[1, 2, 4]])
EMBED, LAYER_0, LAYER_1, NORM, HEAD = "embed", "layers.0", "layers.1", "norm", "head"
GROUPS = (EMBED, LAYER_0, LAYER_1, NORM, HEAD)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.register_buffer("bias", torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.silu(self.up(x)) + self.bias


class Model(nn.Module):
    def __init__(self, seed: int, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def version(step: int) -> Version:
    return Version(1, step)


def write(engine: TorchEngine, group: str, values: dict[str, torch.Tensor]) -> None:
    """What the load stage does with a group."""
    binding = engine.binding()
    for entry in binding.layout.entries:
        spec = binding.layout.tensors[entry.tensor]
        if group_of(spec.name) == group:
            live = binding.view(entry.view, entry.box.shape, torch_dtype(spec.dtype))
            live.copy_(values[spec.name])
    engine.post_load(group)


def land(engine: TorchEngine, step: int, group: str, values: dict[str, torch.Tensor]) -> None:
    write(engine, group, values)
    engine.open_gate(version(step), group)


def sync(engine: TorchEngine, step: int, groups: Iterable[str], model: nn.Module) -> None:
    engine.arm(version(step), tuple(groups), whole=False, deadline=LONG)
    for group in groups:
        land(engine, step, group, model.state_dict())
    engine.commit(version(step))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "what the test waits for did not happen"
        time.sleep(0.001)


def until_waiting(engine: TorchEngine, count: int = 1) -> None:
    until(lambda: engine.statistics().num_waiting == count)


def run(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS)


class Stop:
    """A hook that stops one forward right behind `module`, until `go`."""

    def __init__(self, module: nn.Module) -> None:
        self.inside, self.go = threading.Event(), threading.Event()
        self._handle = module.register_forward_hook(self._stop)

    def _stop(self, *_: object) -> None:
        self._handle.remove()
        self.inside.set()
        assert self.go.wait(LONG)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.fixture
def model() -> Model:
    return Model(0)


@pytest.fixture
def engine(model: Model) -> Iterator[TorchEngine]:
    engine = TorchEngine(model)
    run(model)  # from here on every gate is trusted
    yield engine
    engine.close()


def test_a_running_forward_ends_on_the_old_version_and_the_next_walks_the_gates(
    model: Model, engine: TorchEngine, pool: ThreadPoolExecutor
) -> None:
    old, new = run(Model(0)), Model(1)
    stop = Stop(model.layers[0])
    running = pool.submit(run, model)
    assert stop.inside.wait(LONG)
    arm = pool.submit(engine.arm, version(1), GROUPS, whole=False, deadline=LONG)
    with pytest.raises(TimeoutError):
        arm.result(0.02)
    stop.go.set()
    assert torch.equal(running.result(LONG), old)
    arm.result(LONG)
    seen: list[str] = []
    for name in GROUPS:
        module = model.get_submodule(name)
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
    following = pool.submit(lambda: (run(model), engine.version))
    for number, group in enumerate(GROUPS):
        until_waiting(engine)
        assert seen == list(GROUPS[:number])
        land(engine, 1, group, new.state_dict())
        until(lambda number=number: len(seen) == number + 1)
    until_waiting(engine)
    assert not following.done(), "outputs left before COMMIT"
    engine.commit(version(1))
    output, stamp = following.result(LONG)
    assert torch.equal(output, run(new))
    assert stamp == version(1)


def test_three_versions_in_random_order_each_equal_to_a_fresh_model(
    model: Model, engine: TorchEngine, pool: ThreadPoolExecutor
) -> None:
    shuffle = random.Random(7).sample
    for step in (1, 2, 3):
        new = Model(step)
        engine.arm(version(step), GROUPS, whole=False, deadline=LONG)
        forward = pool.submit(run, model)
        for group in shuffle(GROUPS, len(GROUPS)):
            land(engine, step, group, new.state_dict())
        engine.commit(version(step))
        assert torch.equal(forward.result(LONG), run(new))
        assert torch.equal(run(model), run(new))
        assert engine.version == version(step)
    assert engine.statistics().num_active == 0


def test_apply_version_waits_for_every_group_at_the_first_gate(
    model: Model, engine: TorchEngine, pool: ThreadPoolExecutor
) -> None:
    new, seen = Model(1), threading.Event()
    model.embed.register_forward_hook(lambda *_: seen.set())
    engine.arm(version(1), GROUPS, whole=True, deadline=LONG)
    forward = pool.submit(run, model)
    for group in GROUPS:
        until_waiting(engine)
        assert not seen.is_set()
        land(engine, 1, group, new.state_dict())
    assert seen.wait(LONG)
    engine.commit(version(1))
    assert torch.equal(forward.result(LONG), run(new))


def test_disarm_goes_on_with_the_old_weights(
    model: Model, engine: TorchEngine, pool: ThreadPoolExecutor
) -> None:
    engine.arm(version(1), GROUPS, whole=False, deadline=LONG)
    forward = pool.submit(run, model)
    until_waiting(engine)
    engine.disarm(version(1))
    assert torch.equal(forward.result(LONG), run(Model(0)))
    sync(engine, 2, GROUPS, Model(2))
    assert torch.equal(run(model), run(Model(2)))


def test_quarantine_in_mid_forward_lets_no_output_leave_and_the_next_version_heals(
    model: Model, engine: TorchEngine, pool: ThreadPoolExecutor
) -> None:
    """Case 35: a failure half way through serves nothing until a full transfer healed it."""
    outputs: list[torch.Tensor] = []
    model.register_forward_hook(lambda _m, _a, output: outputs.append(output))
    engine.arm(version(1), GROUPS, whole=False, deadline=LONG)
    in_gate = pool.submit(run, model)
    for group in GROUPS[:3]:
        land(engine, 1, group, Model(1).state_dict())
    until_waiting(engine)
    engine.quarantine("source 1 lost")
    with pytest.raises(PoisonedStepError, match="source 1 lost"):
        in_gate.result(LONG)
    with pytest.raises(VersionError):
        engine.open_gate(version(1), NORM)
    waiting = pool.submit(run, model)
    until_waiting(engine)
    assert outputs == []
    sync(engine, 2, GROUPS, Model(2))
    assert torch.equal(waiting.result(LONG), run(Model(2)))
    assert len(outputs) == 1


def test_a_forward_behind_its_last_gate_is_poisoned_before_user_hooks_see_its_output(
    model: Model, pool: ThreadPoolExecutor
) -> None:
    leaked = threading.Event()
    model.register_forward_hook(lambda *_: leaked.set())  # before the engine's own hooks
    engine = TorchEngine(model)
    engine.arm(version(1), GROUPS, whole=False, deadline=LONG)
    for group in GROUPS:
        land(engine, 1, group, Model(1).state_dict())
    forward = pool.submit(run, model)
    until_waiting(engine)  # for COMMIT
    engine.quarantine("another rank failed")
    with pytest.raises(PoisonedStepError):
        forward.result(LONG)
    assert not leaked.is_set()


def test_pre_hooks_of_the_user_read_behind_the_gate(model: Model, pool: ThreadPoolExecutor) -> None:
    seen: list[torch.Tensor] = []
    model.norm.register_forward_pre_hook(lambda norm, _: seen.append(norm.weight.detach().clone()))
    engine = TorchEngine(model)
    run(model)
    new = Model(1).state_dict()
    new["norm.weight"] = torch.full((8,), 7.0)
    engine.arm(version(1), GROUPS, whole=False, deadline=LONG)
    for group in GROUPS[:3]:
        land(engine, 1, group, new)
    forward = pool.submit(run, model)
    until_waiting(engine)
    for group in GROUPS[3:]:
        land(engine, 1, group, new)
    engine.commit(version(1))
    forward.result(LONG)
    assert torch.equal(seen[-1], new["norm.weight"])


def test_outputs_are_held_when_the_model_swallows_what_skipped_a_hook(
    pool: ThreadPoolExecutor,
) -> None:
    """torch runs no hook after a KeyboardInterrupt, so the layer's own leave never comes."""

    class Stubborn(Model):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            output = super().forward(ids)
            with contextlib.suppress(KeyboardInterrupt):
                self.layers[0](torch.ones(8))
            return output

    model = Stubborn(0)
    engine = TorchEngine(model)

    def interrupt(_module: nn.Module, args: tuple[torch.Tensor]) -> None:
        if args[0].dim() == 1:
            raise KeyboardInterrupt

    model.layers[0].up.register_forward_pre_hook(interrupt)
    engine.arm(version(1), GROUPS, whole=False, deadline=LONG)
    for group in GROUPS:
        land(engine, 1, group, Model(1).state_dict())
    forward = pool.submit(run, model)
    until_waiting(engine)
    assert not forward.done()
    engine.commit(version(1))
    assert torch.equal(forward.result(LONG), run(Model(1)))
    assert engine.statistics().num_active == 0


def test_a_part_called_alone_waits_for_tensors_that_only_the_model_holds(
    pool: ThreadPoolExecutor,
) -> None:
    class Listed(Model):
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            self.extra = nn.ParameterList([torch.ones(2)])

    model = Listed(0)
    engine = TorchEngine(model)
    run(model)
    engine.arm(version(1), ("extra",), whole=False, deadline=LONG)
    called = threading.Event()
    model.head.register_forward_pre_hook(lambda *_: called.set())  # runs behind the gate
    head = pool.submit(model.head, torch.ones(1, 8))
    until_waiting(engine)
    assert not called.is_set(), "the head did not wait for the list"
    land(engine, 1, "extra", {"extra.0": torch.zeros(2)})
    engine.commit(version(1))
    head.result(LONG)


def test_gate_and_quarantine_deadlines_raise_typed_errors() -> None:
    model = Model(0)
    engine = TorchEngine(model, gate_seconds=0.05)
    run(model)
    engine.arm(version(1), GROUPS, whole=False, deadline=LONG)
    land(engine, 1, EMBED, Model(1).state_dict())
    with pytest.raises(EngineError, match=r"group layers\.0 did not land"):
        run(model)
    engine.quarantine("no source left")
    with pytest.raises(QuarantinedError, match="no source left"):
        run(model)
    sync(engine, 2, GROUPS, Model(2))
    assert torch.equal(run(model), run(Model(2)))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("at", ["layers.1", ""])
def test_an_exception_inside_a_forward_leaves_no_forward_running(
    model: Model, engine: TorchEngine, at: str, error: type[BaseException]
) -> None:
    def fail(*_: object) -> None:
        raise error("in the model")

    handle = model.get_submodule(at).register_forward_hook(fail)
    with pytest.raises(error, match="in the model"):
        run(model)
    handle.remove()
    assert torch.equal(run(model), run(Model(0)))
    assert engine.statistics().num_active == 0
    sync(engine, 1, GROUPS, Model(1))
    assert torch.equal(run(model), run(Model(1)))


def test_a_pre_hook_of_the_user_that_raises_leaves_no_forward_running(
    model: Model, engine: TorchEngine
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("not today")

    for prepend in (False, True):
        handle = model.register_forward_pre_hook(fail, prepend=prepend)
        with pytest.raises(RuntimeError, match="not today"):
            run(model)
        handle.remove()
        assert engine.statistics().num_active == 0


class Fill(nn.Module):
    """Shows its weight as the forward sees it, and passes on what the ones before it showed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64))

    def forward(self, seen: list[torch.Tensor]) -> list[torch.Tensor]:
        return [*seen, self.weight.detach().clone()]


class Filled(nn.Module):
    """A model whose output holds every weight that the forward read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Fill() for _ in range(6))

    def forward(self) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        for layer in self.layers:
            seen = layer(seen)
        return torch.stack(seen)


FILLED = tuple(f"layers.{n}" for n in range(6))


def filled(k: int) -> dict[str, torch.Tensor]:
    return {f"{group}.weight": torch.full((64,), float(k)) for group in FILLED}


def is_torn(output: torch.Tensor) -> bool:
    return bool(output.min() != output.max())


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_no_output_ever_mixes_two_versions(num_threads: int, whole: bool) -> None:
    model = Filled()
    engine = TorchEngine(model)
    order, done = random.Random(3), threading.Event()

    def generate() -> list[tuple[float, Version | None]]:
        results = []
        while not done.is_set():
            output = model()
            assert not is_torn(output), output
            results.append((float(output.max()), engine.version))
        return results

    with ThreadPoolExecutor(num_threads) as pool:
        forwards = [pool.submit(generate) for _ in range(num_threads)]
        try:
            for step in range(1, 41):
                engine.arm(version(step), FILLED, whole=whole, deadline=LONG)
                for group in order.sample(FILLED, len(FILLED)):
                    land(engine, step, group, filled(step))
                    time.sleep(0)
                engine.commit(version(step))
        finally:
            done.set()
        for forward in forwards:
            for value, stamp in forward.result(LONG):
                assert value == (0 if stamp is None else stamp.step)


def torn_by(engine: TorchEngine, model: Filled, pool: ThreadPoolExecutor) -> bool:
    """One update in the worst order: a forward stands before layer 4 when layer 3 is written."""
    model()
    sync(engine, 1, FILLED, _with(filled(1)))
    engine.arm(version(2), FILLED, whole=False, deadline=LONG)
    for group in FILLED[:3]:
        land(engine, 2, group, filled(2))
    forward: Future[torch.Tensor] = pool.submit(model)
    until_waiting(engine)
    for group in FILLED[3:]:
        land(engine, 2, group, filled(2))
    engine.commit(version(2))
    return is_torn(forward.result(LONG))


def _with(values: dict[str, torch.Tensor]) -> nn.Module:
    model = Filled()
    model.load_state_dict(values)
    return model


def test_a_skipped_gate_tears_so_the_check_can_fail(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Filled()
    engine = TorchEngine(model)
    assert not torn_by(engine, model, pool)
    model = Filled()
    engine = TorchEngine(model)
    pass_gate = engine._gates.pass_gate
    monkeypatch.setattr(engine._gates, "pass_gate", lambda groups: pass_gate(groups - {"layers.3"}))
    assert torn_by(engine, model, pool)


def test_a_tied_head_and_its_embedding_land_once(pool: ThreadPoolExecutor) -> None:
    """Case 12: tied at the sink; the head reads what landed with the embedding."""
    model = Model(0, tied=True)
    engine = TorchEngine(model)
    run(model)
    for step in (1, 2, 3):
        new = Model(step, tied=True)
        engine.arm(version(step), GROUPS[:-1], whole=False, deadline=LONG)
        forward = pool.submit(run, model)
        for group in reversed(GROUPS[:-1]):
            land(engine, step, group, new.state_dict())
        engine.commit(version(step))
        assert torch.equal(forward.result(LONG), run(new))


def test_a_head_called_alone_waits_for_the_memory_it_is_tied_to(pool: ThreadPoolExecutor) -> None:
    model = Model(0, tied=True)
    engine = TorchEngine(model)
    x = torch.ones(1, 8)
    run(model)
    engine.arm(version(1), GROUPS[:-1], whole=False, deadline=LONG)
    head = pool.submit(model.head, x)
    until_waiting(engine)
    assert engine.statistics().num_active == 1, "a part called alone is a forward too"
    for group in GROUPS[:-1]:
        land(engine, 1, group, Model(1).state_dict())
    engine.commit(version(1))
    assert torch.equal(head.result(LONG), Model(1, tied=True).head(x))


def test_a_module_that_is_read_without_being_called_is_waited_for_at_the_start(
    pool: ThreadPoolExecutor,
) -> None:
    class Functional(Model):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            return functional.linear(self.norm(x), self.head.weight)

    model = Functional(0)
    engine = TorchEngine(model)
    run(model)
    engine.arm(version(1), GROUPS, whole=False, deadline=LONG)
    forward = pool.submit(run, model)
    for group in GROUPS:  # the head comes last and its gate never sees a call
        until_waiting(engine)
        assert engine.statistics().closed
        land(engine, 1, group, Model(1).state_dict())
    engine.commit(version(1))
    assert torch.equal(forward.result(LONG), run(Model(1)))


def test_forward_as_a_block_keeps_several_calls_on_one_version(
    model: Model, engine: TorchEngine, pool: ThreadPoolExecutor
) -> None:
    def twice() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad(), engine.forward():
            heads.append(model.head.weight.clone())  # no hook sees this
            return model(IDS), model.forward(IDS)

    heads: list[torch.Tensor] = []

    stop = Stop(model)
    block = pool.submit(twice)
    assert stop.inside.wait(LONG)
    arm = pool.submit(engine.arm, version(1), GROUPS, whole=False, deadline=LONG)
    stop.go.set()
    assert all(torch.equal(output, run(Model(0))) for output in block.result(LONG))
    arm.result(LONG)
    block = pool.submit(twice)
    for group in GROUPS:
        until_waiting(engine)
        land(engine, 1, group, Model(1).state_dict())
    engine.commit(version(1))
    assert all(torch.equal(output, run(Model(1))) for output in block.result(LONG))
    assert torch.equal(heads[1], Model(1).head.weight)


def test_a_model_that_calls_itself_is_one_forward(pool: ThreadPoolExecutor) -> None:
    class Twice(Model):
        def forward(self, ids: torch.Tensor, again: bool = True) -> torch.Tensor:
            first = super().forward(ids)
            return first + self(ids, again=False) if again else first

    model = Twice(0)
    engine = TorchEngine(model)
    run(model)
    engine.arm(version(1), GROUPS, whole=False, deadline=LONG)
    forward = pool.submit(run, model)
    for group in GROUPS:
        land(engine, 1, group, Model(1).state_dict())
    engine.commit(version(1))
    assert torch.equal(forward.result(LONG), 2 * run(Model(1)))
    assert engine.statistics().num_active == 0


def test_weights_made_under_inference_mode_can_be_updated() -> None:
    with torch.inference_mode():
        model = Model(0)
    engine = TorchEngine(model)
    sync(engine, 1, GROUPS, Model(1))
    with torch.inference_mode():
        assert torch.equal(model(IDS), Model(1)(IDS))


def test_a_partial_version_leaves_the_other_gates_open(model: Model, engine: TorchEngine) -> None:
    sync(engine, 1, (LAYER_1,), Model(1))
    expected = Model(0)
    expected.layers[1].load_state_dict(Model(1).layers[1].state_dict())
    assert torch.equal(run(model), run(expected))


class Derived(nn.Module):
    """A layer that multiplies with a transposed copy of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3))
        self.register_buffer("transposed", torch.zeros(3, 4), persistent=False)
        self.calls = 0

    def refresh(self) -> None:
        self.calls += 1
        self.transposed.copy_(self.weight.t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.transposed


def test_derived_tensors_are_refreshed_once_per_sync_and_keep_their_address() -> None:
    """Case 18: derived tensors refreshed by a hook keep their address over three syncs."""
    model = nn.Sequential(Derived(), nn.Linear(4, 2))
    layer = model[0]
    engine = TorchEngine(model, post_load={"0": layer.refresh})
    address = layer.transposed.data_ptr()
    with pytest.raises(VersionError, match="no version is armed"):
        engine.post_load("0")
    for step in (1, 2, 3):
        torch.manual_seed(step)
        new = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
        engine.arm(version(step), ("0", "1"), whole=False, deadline=LONG)
        write(engine, "0", new)
        engine.post_load("0")
        engine.open_gate(version(step), "0")
        land(engine, step, "1", new)
        engine.commit(version(step))
        assert layer.calls == step
        assert layer.transposed.data_ptr() == address
        x = torch.ones(2, 3)
        expected = functional.linear(x @ new["0.weight"].t(), new["1.weight"], new["1.bias"])
        with torch.no_grad():
            assert torch.equal(model(x), expected)


def test_a_hook_that_fails_or_moves_a_tensor_is_an_engine_error() -> None:
    model = nn.Sequential(Derived(), nn.Linear(4, 2))

    def move() -> None:
        model[0].transposed = model[0].weight.detach().t().contiguous()

    engine = TorchEngine(model, post_load={"0": move, "1": lambda: 1 / 0})
    engine.arm(version(1), ("0", "1"), whole=False, deadline=LONG)
    with pytest.raises(EngineError, match=r"replaced 0\.transposed"):
        engine.post_load("0")
    with pytest.raises(EngineError, match="hook of 1 failed: division by zero"):
        engine.post_load("1")


def test_what_can_not_work_is_refused_when_the_engine_is_made() -> None:
    with pytest.raises(EngineError, match=r"no gate guards embed\.weight"):
        TorchEngine(Model(0), binding=bind_module(Model(0), side="sink"))
    with pytest.raises(EngineError, match=r"a hook for layers\.7"):
        TorchEngine(Model(0), post_load={"layers.7": lambda: None})
    engine = TorchEngine(Model(0))
    with pytest.raises(EngineError, match=r"does not have: layers\.7"):
        engine.arm(version(1), (EMBED, "layers.7"), whole=False, deadline=LONG)


def test_a_skipped_gate_is_refused_when_the_engine_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from streamsync.engines import torch_module

    place = torch_module.place_gates
    monkeypatch.setattr(torch_module, "place_gates", lambda *a: place(*a)[:-1])
    with pytest.raises(EngineError, match=r"no gate guards head\.weight"):
        TorchEngine(Model(0))


class FakeEvent:
    """Stands for a CUDA event: done after a few looks, or never."""

    looks_left = 3

    def record(self, stream: object) -> None:
        assert stream == "compute"

    def query(self) -> bool:
        type(self).looks_left -= 1
        return type(self).looks_left <= 0


def test_arming_waits_for_the_kernels_of_finished_forwards(
    model: Model, engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    engine._streams = {"compute"}
    engine.arm(version(1), GROUPS, whole=False, deadline=LONG)
    assert FakeEvent.looks_left == 0
    engine.disarm(version(1))
    monkeypatch.setattr(FakeEvent, "looks_left", 1 << 30)
    with pytest.raises(EngineError, match="kernels of the old version still run on compute"):
        engine.arm(version(2), GROUPS, whole=False, deadline=0.02)
    assert engine.statistics().armed is None
    assert torch.equal(run(model), run(Model(0)))


@pytest.mark.gpu
def test_eager_cuda_forwards_end_before_the_first_write(pool: ThreadPoolExecutor) -> None:
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(8))).cuda()
    engine = TorchEngine(model)
    groups = tuple(str(n) for n in range(8))
    x = torch.randn(4096, 4096, device="cuda")

    def forward() -> torch.Tensor:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            output = model(x)
            torch.cuda.current_stream().synchronize()
            return output

    for step in (1, 2, 3):
        before = forward()
        with torch.no_grad():
            queued = [model(x) for _ in range(20)]  # still running when arm comes
        engine.arm(version(step), groups, whole=False, deadline=LONG)
        following = pool.submit(forward)
        new = {n: torch.randn_like(w) / 64 for n, w in model.state_dict().items()}
        for group in groups:
            write(engine, group, new)
            torch.cuda.current_stream().synchronize()
            engine.open_gate(version(step), group)
        engine.commit(version(step))
        assert all(torch.equal(output, before) for output in queued)
        expected = x
        for group in groups:
            expected = functional.linear(expected, new[f"{group}.weight"])
        assert torch.equal(following.result(LONG), expected)


def test_close_leaves_a_plain_module_and_copies_are_never_gated() -> None:
    model = Model(0)
    engine = TorchEngine(model)
    engine.arm(version(1), GROUPS, whole=False, deadline=LONG)
    assert torch.equal(run(copy.deepcopy(model)), run(Model(0)))
    assert engine.statistics().num_waits == 0
    engine.close()
    engine.close()
    assert torch.equal(run(model), run(Model(0)))
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert all(not module._forward_hooks for module in model.modules())
