"""Real FSDP2 models, sharded in many ways, synced to fused engines of other cuts, bit for bit."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from streamsync import CastRule, Config, Hub, PlanError, Rules
from streamsync.layout.region import TensorSpec
from tests.fsdp.messages import Counted, Job
from tests.fsdp.scenarios import NUM_RANKS, Scenario

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from streamsync import Subscriber
    from tests.fsdp.scenarios import Model
    from tests.torchrun import Trainer
    from tests.tp_engine import TpEngine

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("transformers", "safetensors")),
        reason="needs transformers and safetensors",
    ),
]

SIZES = (1, 2, 3, 4, 8)
STEPS = 3
SECONDS = 120.0  # of each wait; the machine may be loaded


def replicas_of(scenario: Scenario, sizes: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Replicas by name, with the options of their engines: of every size; with experts dealt out
    where there are any; with an `lm_head` of their own where the source ties it, or the reverse."""
    dtype = getattr(torch, scenario.engine_dtype)
    if scenario.refused:
        return {"tp1": {"size": 1, "dtype": dtype}}
    if scenario.bucket_bytes:
        return {f"{n} bytes": {"size": 2, "dtype": dtype} for n in scenario.bucket_bytes}
    made: dict[str, dict[str, Any]] = {f"tp{n}": {"size": n, "dtype": dtype} for n in sizes}
    if scenario.model == "qwen3-moe":
        made["ep3"] = {"size": 3, "dtype": dtype, "expert_parallel": True}
    if scenario.is_tied:
        made["untied"] = {"size": 2, "dtype": dtype, "tied": False}
    elif scenario.model == "llama":
        made["tied"] = {"size": 2, "dtype": dtype, "tied": True}
    return made


def engines_of(scenario: Scenario, sizes: Sequence[int]) -> dict[str, list[TpEngine]]:
    from tests.tp_engine import tp_engines

    specs = specs_of(scenario)
    head = TensorSpec("lm_head.weight", specs["model.embed_tokens.weight"].shape, scenario.dtype)
    return {
        name: tp_engines(
            scenario.config, {**specs, head.name: head} if name == "untied" else specs, **options
        )
        for name, options in replicas_of(scenario, sizes).items()
    }


def rules_of(scenario: Scenario, replica: str) -> Rules:
    casts: tuple[CastRule, ...] = ()
    if scenario.dtype != scenario.engine_dtype and not scenario.refused:
        casts = (CastRule(source=scenario.dtype, sink=scenario.engine_dtype),)
    ties = {"lm_head.weight": "model.embed_tokens.weight"} if replica == "untied" else {}
    unused = ("lm_head.weight",) if replica == "tied" else ()
    return Rules(casts=casts, ties=ties, unused=unused)


def sync(
    scenarios: list[Scenario],
    folder: Path,
    *,
    sizes: Sequence[int] = SIZES,
    num_ranks: int = NUM_RANKS,
) -> None:
    """Runs the job: three syncs each; every rank of every replica must hold the checkpoint."""
    from tests.torchrun import Trainer

    secret = secrets.token_hex(16)
    with ExitStack() as stack:
        hubs = [stack.enter_context(Hub(secret=secret)) for _ in scenarios]
        job = Job(
            scenarios=scenarios,
            hubs=[hub.address for hub in hubs],
            num_replicas=[len(replicas_of(scenario, sizes)) for scenario in scenarios],
            secret=secret,
            steps=STEPS,
            seconds=SECONDS,
        )
        trainer = stack.enter_context(Trainer("tests.fsdp.job", job, folder, num_ranks))
        for scenario, hub in zip(scenarios, hubs, strict=True):
            engines = engines_of(scenario, sizes)  # while the trainer starts
            with ExitStack() as running:
                subscribers = subscribe(running, scenario, engines, hub.address, secret)
                if scenario.refused:
                    check_refused(scenario, engines, subscribers, trainer)
                    continue
                counts = [
                    msgspec.json.decode(
                        trainer.file(f"{scenario.name}/{rank}.json", SECONDS).read_bytes(),
                        type=list[Counted],
                    )
                    for rank in range(scenario.num_ranks)
                ]
                for subscriber in subscribers:
                    subscriber.wait(STEPS, SECONDS)
            check(scenario, engines, counts, folder)
        trainer.finish(SECONDS)


def specs_of(scenario: Scenario) -> dict[str, TensorSpec]:
    """The tensors of the checkpoint, read from a model without memory."""
    from transformers import AutoModelForCausalLM

    from streamsync.layout.transformers import checkpoint_specs

    config = scenario.config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    token_map = TensorSpec("model.token_map", (config.vocab_size,), "int64")
    return {spec.name: spec for spec in (*checkpoint_specs(model), token_map)}


def subscribe(
    running: ExitStack,
    scenario: Scenario,
    replicas: Mapping[str, list[TpEngine]],
    hub: str,
    secret: str,
) -> list[Subscriber]:
    from tests.tp_engine import replica

    subscribers: list[Subscriber] = []
    for (name, engines), nbytes in zip(
        replicas.items(), scenario.bucket_bytes or [4096] * len(replicas), strict=True
    ):
        subscribers += running.enter_context(
            replica(
                engines,
                hub=hub,
                secret=secret,
                name=name,
                config=Config(
                    transport=scenario.transport,  # type: ignore[arg-type]
                    copy_threads=1,
                    bucket_bytes=nbytes,
                ),
                rules=rules_of(scenario, name),
            )
        )
    return subscribers


def check(
    scenario: Scenario,
    replicas: Mapping[str, list[TpEngine]],
    counts: list[list[Counted]],
    folder: Path,
) -> None:
    from safetensors.torch import load_file

    from tests.tp_engine import expected

    needed = sum(e.binding().layout.nbytes for engines in replicas.values() for e in engines)
    last: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        checkpoint = load_file(folder / scenario.name / f"{step}.safetensors")
        assert checkpoint.keys() == specs_of(scenario).keys()
        changed = [n for n, t in last.items() if not torch.equal(t, checkpoint[n])]
        assert not last or len(changed) == len(last), "every tensor was to be trained"
        last = checkpoint
        for name, engines in replicas.items():
            for rank, engine in enumerate(engines):
                where = f"{scenario.name}, step {step}, {name}/{rank}"
                wanted = expected(engine.model, checkpoint)
                assert not any(t.isnan().any() for t in wanted.tensors().values())
                differing = [n for n, b in wanted.bits().items() if engine.kept[step][n] != b]
                assert not differing, f"{where}: {differing}"
                if step == STEPS - 1:  # published once more, unchanged
                    assert engine.kept[STEPS] == engine.kept[step], where
        assert sum(count[step].wire_bytes for count in counts) == needed, scenario.name
        assert sum(count[step].needed_bytes for count in counts) == needed, scenario.name


def check_refused(
    scenario: Scenario,
    replicas: Mapping[str, list[TpEngine]],
    subscribers: list[Subscriber],
    trainer: Trainer,
) -> None:
    """Both sides say what does not fit, and no engine was written."""
    for subscriber in subscribers:
        with pytest.raises(PlanError, match=rf"(?s){scenario.dtype}.*CastRule"):
            subscriber.wait(0, SECONDS)
    for rank in range(scenario.num_ranks):
        assert "CastRule" in trainer.file(f"{scenario.name}/{rank}.txt", SECONDS).read_text()
    for engines in replicas.values():
        for engine in engines:
            poisoned = engine.model.twin()
            poisoned.poison()
            assert not engine.kept
            assert engine.model.bits() == poisoned.bits()


def test_resharding(tmp_path: Path) -> None:
    """Cases 3, 4, 6, 12, 14, 16, 20, 21: 2, 3 and 4 ranks; tensor parallel shards cut again, copies
    of shards, shards in host memory, experts dealt out; tied sources into tied and untied engines;
    fp32 into bf16 by rule and refused without; an integer map; sinks begin as NaN."""
    sync(
        [
            Scenario(model="qwen3", num_ranks=3),
            Scenario(model="llama", tp=2),
            Scenario(model="qwen2-tied", copies=2, offload=True, engine_dtype="bfloat16"),
            Scenario(model="qwen3-moe", num_ranks=2),
            Scenario(model="qwen3-micro", num_ranks=3, bucket_bytes=(1, 6, 100, 1 << 20)),
            Scenario(model="llama", num_ranks=2, engine_dtype="bfloat16", refused=True),
        ],
        tmp_path,
    )


WIDE = [
    Scenario(model="llama"),
    Scenario(model="llama-tied", num_ranks=3),
    Scenario(model="llama-tied", tp=2),
    Scenario(model="llama", tp=2, forward=False),
    Scenario(model="qwen3", tp=2, offload=True),
    Scenario(model="qwen3", tp=4, forward=False),
    Scenario(model="qwen2-tied", tp=2, copies=2),
    Scenario(model="llama", tp=2, engine_dtype="bfloat16"),
    Scenario(model="llama-tied", copies=2, engine_dtype="bfloat16"),
    Scenario(model="qwen3", copies=4),
    Scenario(model="qwen3", num_ranks=2, offload=True),
    Scenario(model="qwen3", num_ranks=3, dtype="bfloat16", engine_dtype="bfloat16"),
    Scenario(model="qwen3-moe"),
    Scenario(model="qwen3-moe", num_ranks=3, engine_dtype="bfloat16"),
    Scenario(model="qwen3-moe", copies=2, offload=True),
    Scenario(model="qwen3-moe", ep=2, forward=False),
    Scenario(model="qwen3-moe", ep=2, expert_dim=1, forward=False),
    Scenario(model="qwen3-moe", ep=4, forward=False, engine_dtype="bfloat16"),
    Scenario(model="qwen3-micro", tp=2, forward=False, bucket_bytes=(1, 2, 5, 64, 1 << 20)),
    Scenario(model="qwen3-moe", num_ranks=2, engine_dtype="bfloat16", refused=True),
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_every_mesh(tmp_path: Path, transport: str) -> None:
    """Cases 3, 4, 6, 12, 14, 16, 20, 21 on every kind of mesh and both transports."""
    sync([replace(scenario, transport=transport) for scenario in WIDE], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_jobs_of_fewer_ranks(tmp_path: Path, num_ranks: int) -> None:
    """The whole job has as many ranks as the model."""
    models: tuple[Model, ...] = ("llama", "qwen2-tied", "qwen3-moe")
    scenarios = [Scenario(model=model, num_ranks=num_ranks) for model in models]
    sync(scenarios, tmp_path, num_ranks=num_ranks)
