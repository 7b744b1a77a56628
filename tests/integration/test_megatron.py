"""Real Megatron-Core models, cut in many ways, synced to replicas of other cuts, bit for bit."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING

import msgspec
import pytest

from streamsync import CastRule, Config, Hub, PlanError, Rules
from tests.megatron.messages import Counted, Job
from tests.megatron.scenarios import NUM_RANKS, Scenario

if TYPE_CHECKING:
    from pathlib import Path

    from streamsync.config import TransportName
    from tests.megatron.sinks import Replicas
    from tests.torchrun import Trainer

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("megatron", "mbridge", "safetensors")),
        reason="needs megatron-core, mbridge and safetensors",
    ),
]

SIZES = (1, 2, 3, 4, 8)
STEPS = 3
BF16 = Rules(casts=(CastRule(source="float32", sink="bfloat16"),))
ENVIRONMENT = {
    "PYTHONWARNINGS": "ignore",  # Megatron misses TransformerEngine and Apex, many times
    "TORCHDYNAMO_DISABLE": "1",  # Megatron compiles activations; that takes longer than all
}
SECONDS = 120.0  # of each wait; the machine may be loaded


def sync(scenarios: list[Scenario], folder: Path, *, transport: TransportName = "auto") -> None:
    """Runs the job: three syncs each; every rank of every replica must hold the reference."""
    from safetensors.torch import load_file

    from tests.megatron.sinks import Replicas, replicas_of
    from tests.torchrun import Trainer

    secret = secrets.token_hex(16)
    config = Config(transport=transport, copy_threads=1)
    with ExitStack() as stack:
        hubs = [stack.enter_context(Hub(secret=secret)) for _ in scenarios]
        job = Job(
            scenarios=scenarios,
            hubs=[hub.address for hub in hubs],
            secret=secret,
            num_sizes=len(SIZES),
            steps=STEPS,
            seconds=SECONDS,
            transport=transport,
        )
        trainer = stack.enter_context(
            Trainer("tests.megatron.job", job, folder, NUM_RANKS, ENVIRONMENT)
        )
        for scenario, hub in zip(scenarios, hubs, strict=True):
            name = scenario.name
            first = trainer.file(f"{name}/0.safetensors", SECONDS)
            engines = replicas_of(scenario, first, (1,) if scenario.refused else SIZES)
            with Replicas(
                engines,
                hub=hub.address,
                secret=secret,
                config=config,
                rules=BF16 if scenario.engine_dtype and not scenario.refused else Rules(),
            ) as replicas:
                if scenario.refused:
                    check_refused(replicas, trainer, name)
                    continue
                replicas.wait(STEPS - 1, SECONDS)
                counts = [
                    msgspec.json.decode(
                        trainer.file(f"{name}/{rank}.json", SECONDS).read_bytes(),
                        type=list[Counted],
                    )
                    for rank in range(NUM_RANKS)
                ]
            needed = sum(e.binding().layout.nbytes for ranks in engines.values() for e in ranks)
            for step in range(STEPS):
                checkpoint = load_file(first.with_name(f"{step}.safetensors"))
                for replica, ranks in engines.items():
                    for rank, engine in enumerate(ranks):
                        where = f"{name}, step {step}, {replica}/{rank}"
                        assert engine.kept[step] == engine.expected(checkpoint), where
                assert sum(count[step].wire_bytes for count in counts) == needed, name
                assert sum(count[step].needed_bytes for count in counts) == needed, name
        trainer.finish(SECONDS)


def check_refused(replicas: Replicas, trainer: Trainer, name: str) -> None:
    """Both sides say what does not fit, and no engine was written."""
    for subscriber in replicas.subscribers:
        with pytest.raises(PlanError, match=r"float32.*bfloat16"):
            subscriber.wait(0, SECONDS)
    for rank in range(NUM_RANKS):
        assert "float32" in trainer.file(f"{name}/{rank}.txt", SECONDS).read_text()
    for ranks in replicas.engines.values():
        assert not any(engine.kept for engine in ranks)
        assert all(p.isnan().all() for engine in ranks for p in engine.model.parameters())


def test_resharding(tmp_path: Path) -> None:
    """Cases 1 to 4, 7, 8, 12, 14 to 16: fewer groups of heads than ranks, experts, pipeline and
    virtual stages, tied embeddings on two stages, float32 cast by rule except for router biases,
    and refused without it; sinks begin as NaN."""
    sync(
        [
            Scenario(model="llama", tp=4, etp=4, spoils=True),
            Scenario(model="llama-tied", tp=2, pp=2, vpp=2, etp=2),
            Scenario(model="qwen3-moe", tp=2, ep=2),
            Scenario(model="deepseek-v3", tp=2, ep=2, etp=2, engine_dtype="bfloat16"),
            Scenario(
                model="llama",
                tp=2,
                pp=2,
                etp=2,
                first_stage_layers=1,
                refused=True,
                engine_dtype="bfloat16",
            ),
        ],
        tmp_path,
    )


WIDE = [
    Scenario(model="llama", tp=2, pp=2, first_stage_layers=1, etp=2),
    Scenario(model="llama-tied", pp=4, dtype="bfloat16", wrapped=True),
    Scenario(model="llama-tied", tp=4, etp=4),
    Scenario(model="qwen2", tp=2, pp=2, etp=2),
    Scenario(model="qwen2", tp=4, etp=4, dtype="bfloat16"),
    Scenario(model="qwen3", tp=2, pp=2, vpp=2, etp=2),
    Scenario(model="qwen3", tp=2, etp=2, dtype="bfloat16", wrapped=True),
    Scenario(model="qwen3-moe", tp=2, ep=2, etp=2),
    Scenario(model="qwen3-moe", tp=4, ep=4),
    Scenario(model="qwen3-moe", pp=2, vpp=2, ep=2),
    Scenario(model="qwen3-moe", tp=2, pp=2, etp=2, grouped=True),
    Scenario(model="qwen3-moe", tp=2, ep=2, etp=2, grouped=True),
    Scenario(model="mixtral", tp=2, ep=2),
    Scenario(model="mixtral", ep=4, dtype="bfloat16", wrapped=True),
    Scenario(model="deepseek-v3", tp=2, pp=2, etp=2),
    Scenario(model="deepseek-v3", tp=4, ep=2, etp=2),
    Scenario(model="deepseek-v3-mtp", tp=2, pp=2, vpp=2, etp=2),
    Scenario(model="deepseek-v3-mtp", ep=4, dtype="bfloat16", wrapped=True),
    Scenario(model="deepseek-v3", tp=2, ep=2, engine_dtype="bfloat16"),
    Scenario(model="qwen3", tp=4, etp=4, dtype="bfloat16", engine_dtype="bfloat16"),
    Scenario(model="qwen3", tp=2, pp=2, etp=2, engine_dtype="bfloat16", refused=True),
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_every_cut(tmp_path: Path, transport: str) -> None:
    """Cases 1 to 4, 7 to 9, 12, 14 to 16 on every family and every kind of parallelism."""
    sync(WIDE, tmp_path, transport=transport)
