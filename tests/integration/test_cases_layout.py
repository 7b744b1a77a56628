"""Cases 10 to 13 and 17 over whole syncs: names, ties, parts and buffers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from streamsync.config import Config
from streamsync.engines.torch_module import TorchEngine
from streamsync.errors import PlanError
from streamsync.plan.plan import Rename, Rules, Waiver
from streamsync.testing.job import LocalJob
from tests.sync_rig import StillEngine, bits, differing, fill

NEEDED = {"model.embed.weight": (5, 3), "model.layers.0.weight": (3, 3), "model.norm.bias": (3,)}


def tensors(prefix: str = "", *, without: str = "", dtype: torch.dtype = torch.float32):
    return {
        prefix + name: torch.zeros(shape, dtype=dtype)
        for name, shape in NEEDED.items()
        if name != without
    }


def refusal_on_both_sides(
    source: dict[str, torch.Tensor], sink: dict[str, torch.Tensor], rules: Rules | None = None
) -> str:
    """What both sides say of a plan that can't be; they say the same, and nothing was written."""
    before = {name: bits(tensor) for name, tensor in sink.items()}
    with LocalJob(Config(transport="memory")) as job:
        job.add_sources([source])
        (subscriber,) = job.add_replica([StillEngine(sink)], rules=rules)
        with pytest.raises(PlanError) as at_sink:
            subscriber.wait(0, timeout=20)
        with pytest.raises(PlanError) as at_source:
            job.wait_for_replicas(timeout=20)
        assert at_sink.value.message in str(at_source.value)
        assert at_source.value.where["peer"] == "engine/0"
    assert {name: bits(tensor) for name, tensor in sink.items()} == before
    return str(at_source.value)


def test_a_prefix_needs_a_rule() -> None:
    """Case 10: `model.` here, `language_model.model.` there: refused with both lists; with a rule
    it works."""
    source, sink = tensors("language_model."), tensors()
    text = refusal_on_both_sides(source, sink)
    for name in NEEDED:
        assert name in text
        assert f"language_model.{name}" in text
    rules = Rules(renames=(Rename(source="language_model.model.", sink="model."),))
    with LocalJob(Config(transport="memory")) as job:
        job.add_sources([source])
        job.add_replica([StillEngine(sink)], rules=rules)
        job.wait_for_replicas()
        for step in range(3):
            fill(source, step)
            job.sync(step)
            assert differing(source, {f"language_model.{n}": t for n, t in sink.items()}) == []


def test_a_missing_tensor_needs_a_waiver() -> None:
    """Case 11: one of several tensors has no source: refused by its name; waived it stays as it was
    and the plan says so."""
    source, sink = tensors(without="model.norm.bias"), tensors()
    assert "model.norm.bias" in refusal_on_both_sides(source, sink)
    sink["model.norm.bias"].fill_(7)
    rules = Rules(waivers=(Waiver(pattern="model.norm.*", reason="computed by the engine"),))
    with LocalJob(Config(transport="memory")) as job:
        job.add_sources([source])
        (subscriber,) = job.add_replica([StillEngine(sink)], rules=rules)
        job.wait_for_replicas()
        for step in range(3):
            fill(source, step)
            job.sync(step)
            assert differing(source, {name: sink[name] for name in source}) == []
            assert (sink["model.norm.bias"] == 7).all()
        assert subscriber.plan is not None
        assert subscriber.plan.left == {"model.norm.bias": "computed by the engine"}


def test_a_part_must_be_declared() -> None:
    """Case 13: sources that send a part only are refused, unless the sink expects a part."""
    source, sink = {"model.layers.0.weight": torch.zeros(3, 3)}, tensors()
    assert "model.embed.weight" in refusal_on_both_sides(source, sink)
    with LocalJob(Config(transport="memory")) as job:
        job.add_sources([source])
        rules = Rules(subset=("model.layers.*",))
        (subscriber,) = job.add_replica([StillEngine(sink)], rules=rules)
        job.wait_for_replicas()
        for step in range(3):
            fill(source, step)
            job.sync(step)
            assert bits(source["model.layers.0.weight"]) == bits(sink["model.layers.0.weight"])
            assert not sink["model.embed.weight"].any()
        assert subscriber.plan is not None
        assert set(subscriber.plan.left) == set(NEEDED) - set(source)


def test_half_of_a_tensor_is_no_part() -> None:
    """Case 13: a subset is of whole tensors: a missing row of one that belongs to it is refused."""
    from tests.integration.test_cases_arming import rows

    held = torch.zeros(6, 4)
    sink = {"layers.0.weight": torch.zeros(6, 4)}
    with LocalJob(Config(transport="memory")) as job:
        job.add_sources([rows(held, 0, 4)])
        (subscriber,) = job.add_replica([StillEngine(sink)], rules=Rules(subset=("layers.*",)))
        with pytest.raises(PlanError, match=r"layers\.0\.weight"):
            subscriber.wait(0, timeout=20)


@pytest.mark.parametrize("what", ["shape", "dtype", "name"])
def test_what_does_not_fit_is_refused_with_both_sides_names(what: str) -> None:
    """Wrong shapes, dtypes and names: both sides say it, with what each side has."""
    source, sink = tensors(), tensors()
    name = "model.layers.0.weight"
    if what == "shape":
        sink[name] = torch.zeros(4, 3)
        said = ["[3, 3]", "[4, 3]"]
    elif what == "dtype":
        sink[name] = torch.zeros(3, 3, dtype=torch.int32)
        said = ["float32", "int32"]
    else:
        sink["model.layers.0.kernel"] = sink.pop(name)
        said = ["model.layers.0.kernel"]
    text = refusal_on_both_sides(source, sink)
    for part in (name, "engine/0", *said):
        assert part in text


class Head(nn.Module):
    """An embedding and a head, tied or not."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.head = nn.Linear(4, 11, bias=False)
        self.register_buffer("positions", torch.arange(4.0), persistent=False)
        self.register_buffer("scale", torch.ones(4), persistent=True)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[0](self.embed(ids) * self.scale) + self.positions
        return self.head(hidden)


@pytest.mark.parametrize(("source_tied", "sink_tied"), [(True, False), (False, True), (True, True)])
def test_every_copy_of_a_tied_tensor_is_refreshed(source_tied: bool, sink_tied: bool) -> None:
    """Case 12: tied at the source, at the sink, at both; three syncs, every copy each time.
    Case 17: a buffer that no checkpoint holds stays as it was; a persistent one travels."""
    source, sink = Head(tied=source_tied), Head(tied=sink_tied)
    with torch.no_grad():
        sink.positions.fill_(5)
        for parameter in sink.parameters():
            parameter.fill_(torch.nan)
    with LocalJob(Config(transport="memory", bucket_bytes=64)) as job:
        job.add_sources([source])
        (subscriber,) = job.add_replica([TorchEngine(sink)])
        job.wait_for_replicas()
        for step in range(3):
            with torch.no_grad():
                fill(dict(source.named_parameters()), step)
                source.scale.fill_(step)
                if sink_tied:  # one memory can't hold two values; the trainer keeps them equal
                    source.head.weight.copy_(source.embed.weight)
            job.sync(step)
            subscriber.wait(step)
            wanted = dict(source.named_parameters(remove_duplicate=False))
            got = dict(sink.named_parameters(remove_duplicate=False))
            assert {"head.weight", "embed.weight"} <= set(got)
            assert differing(wanted, got) == []
            assert (sink.scale == step).all()
            assert (sink.positions == 5).all()
