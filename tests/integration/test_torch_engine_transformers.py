"""`generate()` of a transformers model across armed updates, unmodified."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from streamsync.engines.torch_module import TorchEngine
from streamsync.errors import PoisonedStepError
from streamsync.layout.binding import torch_dtype
from streamsync.layout.group import group_of
from streamsync.layout.module import bind_module
from streamsync.types import Version

if TYPE_CHECKING:
    from collections.abc import Callable

transformers = pytest.importorskip("transformers")

LONG = 30.0
PROMPT = torch.tensor([[1, 5, 9]])
NEW_TOKENS = 8


def llama(seed: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.5,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).eval()


def generate(model: Any) -> torch.Tensor:
    mask = torch.ones_like(PROMPT)
    return model.generate(
        PROMPT,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )


class Trace:
    """Counts tokens, and stops `generate` inside the third forward until told to go on.

    Made before the engine: hooks that came later run when the forward has left.
    """

    def __init__(self, model: Any) -> None:
        self.num_tokens, self.third, self.go = 0, threading.Event(), threading.Event()
        model.register_forward_hook(self._count)

    def _count(self, *_: object) -> None:
        self.num_tokens += 1
        if self.num_tokens == 3:
            self.third.set()
            assert self.go.wait(LONG)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "what the test waits for did not happen"
        time.sleep(0.001)


def swapped(before: Any, after: Any, num_before: int) -> torch.Tensor:
    """What `before` generates, its weights replaced between two forwards and its KV cache kept."""
    count = 0

    def swap(*_: object) -> None:
        nonlocal count
        if count == num_before:
            before.load_state_dict(after.state_dict())
        count += 1

    before.register_forward_pre_hook(swap)
    return generate(before)


def armed(model: Any) -> tuple[TorchEngine, tuple[str, ...]]:
    engine = TorchEngine(model, binding=bind_module(model, side="sink"))
    layout = engine.binding().layout
    names = (spec.name for spec in layout.tensors if spec.name not in layout.ties)
    return engine, tuple(dict.fromkeys(map(group_of, names)))


def land(engine: TorchEngine, version: Version, group: str, new: Any) -> None:
    values, binding = new.state_dict(), engine.binding()
    for entry in binding.layout.entries:
        spec = binding.layout.tensors[entry.tensor]
        if group_of(spec.name) == group:
            live = binding.view(entry.view, entry.box.shape, torch_dtype(spec.dtype))
            live.copy_(values[spec.name])
    engine.open_gate(version, group)


def test_generate_goes_on_through_an_armed_update() -> None:
    model, new, version = llama(0), llama(1), Version(1, 1)
    expected = swapped(llama(0), new, 3)
    assert not torch.equal(expected, generate(llama(0)))
    trace = Trace(model)
    engine, groups = armed(model)
    assert groups == ("model.embed_tokens", *(f"model.layers.{n}" for n in range(3)), "model.norm")
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(generate, model)
        assert trace.third.wait(LONG)
        arm = pool.submit(engine.arm, version, groups, whole=False, deadline=LONG)
        until(lambda: engine._gates._arming is not None)
        trace.go.set()
        arm.result(LONG)
        for group in groups:
            until(lambda: engine.statistics().num_waiting == 1)
            land(engine, version, group, new)
        until(lambda: engine.statistics().num_waiting == 1)
        assert trace.num_tokens == 3, "a token of the uncommitted version left"
        engine.commit(version)
        assert torch.equal(answer.result(LONG), expected)
        assert trace.num_tokens == NEW_TOKENS
    assert torch.equal(generate(model), generate(new))
    assert engine.version == version


def test_generate_raises_when_the_version_can_not_finish_and_works_after_healing() -> None:
    model, new, version = llama(0), llama(2), Version(1, 2)
    trace = Trace(model)
    engine, groups = armed(model)
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(generate, model)
        assert trace.third.wait(LONG)
        arm = pool.submit(engine.arm, Version(1, 1), groups, whole=False, deadline=LONG)
        until(lambda: engine._gates._arming is not None)
        trace.go.set()
        arm.result(LONG)
        land(engine, Version(1, 1), groups[0], llama(1))
        until(lambda: engine.statistics().num_waiting == 1)
        engine.quarantine("the trainer died")
        with pytest.raises(PoisonedStepError, match="the trainer died"):
            answer.result(LONG)
    engine.arm(version, groups, whole=False, deadline=LONG)
    for group in groups:
        land(engine, version, group, new)
    engine.commit(version)
    assert torch.equal(generate(model), generate(new))
