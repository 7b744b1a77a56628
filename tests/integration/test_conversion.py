"""Whole syncs that quantise: real sessions, several ranks on both sides, three versions each."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from streamsync.config import Config
from streamsync.errors import PlanError
from streamsync.layout.landing import Landing
from streamsync.layout.region import Box
from streamsync.plan.conversion import QuantRule
from streamsync.plan.explain import explain
from streamsync.plan.plan import CastRule, Rules
from streamsync.testing.job import LocalJob
from tests.fp8_reference import reference
from tests.shards import Rank, slices
from tests.sync_rig import StillEngine, bits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BLOCK = (128, 128)
WIDE = {
    "layers.0.mlp.gate_proj.weight": (320, 200),
    "layers.0.mlp.down_proj.weight": (200, 320),
    "layers.1.mlp.gate_proj.weight": (320, 200),
    "layers.1.mlp.down_proj.weight": (200, 320),
}
PLAIN = {
    "layers.0.norm.weight": (200,),
    "layers.0.mlp.gate.e_score_correction_bias": (8,),
    "layers.1.norm.weight": (200,),
}
FP8 = Rules(quantise=(QuantRule(pattern="layers.*_proj.weight"),))


def model(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All of a version: projections in `dtype`, the rest in float32."""
    generator = torch.Generator().manual_seed(step)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in PLAIN.items()}
    for name, shape in WIDE.items():
        tensors[name] = (torch.randn(shape, generator=generator) * 3).to(dtype)
        tensors[name][:128, :128] *= step  # a block of zeros in version 0
    tensors["layers.0.mlp.gate.e_score_correction_bias"][:2] = torch.tensor([0.5001, 0.5003])
    return tensors


def quantised(
    tensors: Mapping[str, torch.Tensor], block: tuple[int, int] = BLOCK, suffix: str = "_scale_inv"
) -> dict[str, torch.Tensor]:
    """What the sinks must hold."""
    wanted = {name: tensors[name] for name in PLAIN}
    for name in WIDE:
        rows, columns = (min(b, n) for b, n in zip(block, tensors[name].shape, strict=True))
        wanted[name], wanted[name + suffix] = reference(tensors[name], (rows, columns))
    return wanted


def sources(cuts: Mapping[str, tuple[int, Sequence[int]]], dtype: torch.dtype) -> list[Rank]:
    """PP 2 x TP: each projection cut along a dim, norms and biases at every rank of their stage."""
    num_shards = len(next(iter(cuts.values()))[1]) + 1
    ranks = []
    for stage in range(2):
        for shard in range(num_shards):
            rank = Rank()
            for name, shape in {**PLAIN, **WIDE}.items():
                if not name.startswith(f"layers.{stage}."):
                    continue
                kind = name.split(".")[-2]
                boxes = (
                    slices(shape, *cuts[kind])[shard:][:1] if kind in cuts else [Box.whole(shape)]
                )
                rank.add(name, shape, dtype if name in WIDE else torch.float32, boxes)
            ranks.append(rank)
    return ranks


def sinks(cuts: Mapping[str, tuple[int, int]]) -> list[Rank]:
    """TP 2: each projection cut in two along a dim, and its scales with it: those of the blocks
    that a rank has a part of."""
    ranks = []
    for shard in range(2):
        rank = Rank()
        for name, shape in WIDE.items():
            dim, cut = cuts[name.split(".")[-2]]
            box = slices(shape, dim, [cut])[shard]
            rank.add(name, shape, torch.float8_e4m3fn, [box])
            first = [a // 128 for a in box.start]
            stop = [-(-z // 128) for z in box.stop]
            blocks = Box(tuple(first), tuple(z - a for a, z in zip(first, stop, strict=True)))
            grid = tuple(-(-n // 128) for n in shape)
            rank.add(f"{name}_scale_inv", grid, torch.float32, [blocks])
        for name, shape in PLAIN.items():
            rank.add(name, shape, torch.float32, [Box.whole(shape)])
        ranks.append(rank)
    return ranks


CUTS = {
    "rows at blocks": {"gate_proj": (0, [128]), "down_proj": (0, [128])},
    "columns at blocks": {"gate_proj": (1, [128]), "down_proj": (1, [256])},
    "rows inside of blocks": {"gate_proj": (0, [107, 214]), "down_proj": (0, [67, 134])},
    "columns inside of blocks": {"gate_proj": (1, [100]), "down_proj": (1, [160])},
    "nothing whole": {"gate_proj": (0, [80, 160, 288]), "down_proj": (1, [80, 160, 288])},
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_block_scales_from_any_shards_to_any(cut: str, dtype: torch.dtype) -> None:
    """Cases 7, 15, 19: names, shapes and values of every stage, weights and scales, three syncs;
    fp32 biases stay fp32."""
    trainers = sources(CUTS[cut], dtype)
    engines = sinks({"gate_proj": (0, 160), "down_proj": (1, 128)})
    config = Config(transport="tcp", bucket_bytes=20_000)
    with LocalJob(config) as job:
        job.add_sources([rank.binding() for rank in trainers])
        subscribers = job.add_replica([StillEngine(rank.binding()) for rank in engines], rules=FP8)
        job.wait_for_replicas()
        for step in range(3):
            tensors = model(step, dtype)
            for rank in trainers:
                rank.fill(tensors)
            version = job.sync(step)
            wanted = quantised(tensors)
            assert [rank.wrong(wanted) for rank in engines] == [[], []]
            assert [rank.wrong(tensors) for rank in trainers] == [[]] * len(trainers)
            for subscriber in subscribers:
                assert subscriber.version == version
                assert subscriber.reports[-1].wire_bytes == subscriber.plan.needed_bytes
        plans = [subscriber.plan for subscriber in subscribers]
        fp8 = sum(memory.nbytes for rank in engines for p in rank.parts.values() for _, memory in p)
        wide = any(plan.wide for plan in plans)
        assert wide == ("at blocks" not in cut)
        assert (sum(plan.needed_bytes for plan in plans) == fp8) == (not wide)
        told = "\n".join(map(explain, plans))
        assert ("quantised at the sink" in told) == wide
        assert ("quantised at the source" in told) == (cut != "nothing whole")


@pytest.mark.parametrize("cut", ["rows at blocks", "nothing whole"])
def test_an_engine_that_repacks_its_fp8_weights(cut: str) -> None:
    """Case 19: it repacks the weights of each version, whoever quantised them."""
    trainers = sources(CUTS[cut], torch.bfloat16)
    engine = Rank()
    packed: dict[str, torch.Tensor] = {}
    landings = []
    for name, shape in WIDE.items():
        grid = tuple(-(-n // 128) for n in shape)
        engine.add(name, shape, torch.float8_e4m3fn, [Box.whole(shape)])
        engine.add(f"{name}_scale_inv", grid, torch.float32, [Box.whole(grid)])
        ((_, staged),) = engine.parts[name]
        live = packed[name] = torch.zeros(shape[::-1], dtype=torch.float8_e4m3fn)
        landing = Landing(
            names=(name, f"{name}_scale_inv"),
            staging=(staged,),
            module=nn.Module(),
            parameters=(),
            work=partial(live.copy_, staged.t()),
        )
        landings.append(landing)
    for name, shape in PLAIN.items():
        engine.add(name, shape, torch.float32, [Box.whole(shape)])
    binding = engine.binding()
    binding.landings = tuple(landings)
    with LocalJob(Config(transport="memory")) as job:
        job.add_sources([rank.binding() for rank in trainers])
        job.add_replica([StillEngine(binding)], rules=FP8)
        job.wait_for_replicas()
        for step in range(3):
            tensors = model(step, torch.bfloat16)
            for rank in trainers:
                rank.fill(tensors)
            job.sync(step)
            wanted = quantised(tensors)
            assert engine.wrong(wanted) == []
            assert [n for n, live in packed.items() if bits(live.t()) != bits(wanted[n])] == []


@pytest.mark.parametrize("dims", [1, 2])
def test_a_scale_for_each_row(dims: int) -> None:
    trainers = sources(CUTS["rows inside of blocks"], torch.bfloat16)
    engine = Rank()
    for name, shape in WIDE.items():
        engine.add(name, shape, torch.float8_e4m3fn, [Box.whole(shape)])
        grid = (shape[0], 1)[:dims]
        engine.add(f"{name}_scale", grid, torch.float32, [Box.whole(grid)])
    for name, shape in PLAIN.items():
        engine.add(name, shape, torch.float32, [Box.whole(shape)])
    rules = Rules(quantise=(QuantRule(scheme="fp8_channel"),))
    with LocalJob(Config(transport="memory")) as job:
        job.add_sources([rank.binding() for rank in trainers])
        (subscriber,) = job.add_replica([StillEngine(engine.binding())], rules=rules)
        job.wait_for_replicas()
        for step in range(3):
            tensors = model(step, torch.bfloat16)
            for rank in trainers:
                rank.fill(tensors)
            job.sync(step)
            wanted = quantised(tensors, (1, 1 << 20), "_scale")
            if dims == 1:
                wanted = {n: t.squeeze(-1) if n.endswith("scale") else t for n, t in wanted.items()}
            assert engine.wrong(wanted) == []
        assert not subscriber.plan.wide


def test_fp8_that_the_trainer_holds_already_is_copied() -> None:
    """Case 19: weights and scales are two plain tensors then."""
    tensors = quantised(model(1, torch.bfloat16))
    trainer, engine = Rank(), Rank()
    for rank in (trainer, engine):
        for name, tensor in tensors.items():
            rank.add(name, tuple(tensor.shape), tensor.dtype, [Box.whole(tuple(tensor.shape))])
    trainer.fill(tensors)
    with LocalJob(Config(transport="memory")) as job:
        job.add_sources([trainer.binding()])
        (subscriber,) = job.add_replica([StillEngine(engine.binding())], rules=FP8)
        job.wait_for_replicas()
        job.sync(0)
        assert engine.wrong(tensors) == []
        assert not any(tensor.conversion for tensor in subscriber.plan.tensors)


def test_norms_and_biases_keep_float32_where_the_sink_does() -> None:
    """Cases 15 and 16: 0.5001 and 0.5003 are one number in bf16; the rest is cast by a rule."""
    tensors = {n: t.float() for n, t in model(2, torch.float32).items()}
    trainer, engine = Rank(), Rank()
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        trainer.add(name, shape, torch.float32, [Box.whole(shape)])
        dtype = torch.bfloat16 if name in WIDE else torch.float32
        engine.add(name, shape, dtype, [Box.whole(shape)])
    trainer.fill(tensors)
    rules = Rules(casts=(CastRule(source="float32", sink="bfloat16", pattern="*_proj.weight"),))
    with LocalJob(Config(transport="memory")) as job:
        job.add_sources([trainer.binding()])
        job.add_replica([StillEngine(engine.binding())], rules=rules)
        job.wait_for_replicas()
        job.sync(0)
    wanted = {n: t.bfloat16() if n in WIDE else t for n, t in tensors.items()}
    assert engine.wrong(wanted) == []
    (_, bias), *_ = engine.parts["layers.0.mlp.gate.e_score_correction_bias"]
    assert bias[0] != bias[1]


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (Rules(), "add QuantRule"),
        (Rules(quantise=(QuantRule(scheme="fp8_channel"),)), "no tensor called"),
        (Rules(quantise=(QuantRule(block=(64, 64)),)), r"\[3, 2\].*\[5, 4\]"),
    ],
)
def test_rules_that_do_not_fit_are_refused(rules: Rules, text: str) -> None:
    trainers, engines = (
        sources(CUTS["rows at blocks"], torch.bfloat16),
        sinks({"gate_proj": (0, 160), "down_proj": (1, 128)}),
    )
    with LocalJob(Config(transport="memory")) as job:
        job.add_sources([rank.binding() for rank in trainers])
        subscribers = job.add_replica(
            [StillEngine(rank.binding()) for rank in engines], rules=rules
        )
        with pytest.raises(PlanError, match=text):
            subscribers[0].wait(0, timeout=30)


def test_a_wrong_byte_in_staging_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 42: what waits to be quantised is proved before it is: a flipped bit fails the sync."""
    from streamsync.stages.copies import BucketCopies

    trainers = sources(CUTS["nothing whole"], torch.bfloat16)
    engines = sinks({"gate_proj": (0, 160), "down_proj": (1, 128)})
    real = BucketCopies.scatter

    def scatter(self: BucketCopies, payload: torch.Tensor) -> None:
        payload[0] ^= 1
        real(self, payload)

    with LocalJob(Config(transport="tcp")) as job:
        job.add_sources([rank.binding() for rank in trainers])
        job.add_replica([StillEngine(rank.binding()) for rank in engines], rules=FP8)
        job.wait_for_replicas()
        monkeypatch.setattr(BucketCopies, "scatter", scatter)
        version = job.publish(0)
        outcomes = job.publishers[0].wait(version, require=0)
        assert outcomes[0].state == "failed"
        assert "digest" in outcomes[0].text
