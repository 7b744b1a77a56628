"""Real Megatron-Core models, cut in many ways, synced to replicas of other cuts, bit for bit."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING

import msgspec
import pytest

from streamsync import Config, Hub
from tests.megatron.messages import Counted, Job
from tests.megatron.scenarios import NUM_RANKS, Scenario

if TYPE_CHECKING:
    from pathlib import Path

    from streamsync.plan.plan import Rules

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("megatron", "mbridge", "safetensors")),
        reason="needs megatron-core, mbridge and safetensors",
    ),
]

SIZES = (1, 2, 3, 4, 8)
STEPS = 3
SECONDS = 120.0  # of each wait; the machine may be loaded


def sync(
    scenarios: list[Scenario],
    folder: Path,
    *,
    transport: str = "auto",
    rules: Rules | None = None,
) -> None:
    """Runs the job: three syncs each; every rank of every replica must hold the reference."""
    from tests.megatron.sinks import Replicas, expected, replicas_of
    from tests.megatron.trainer import Trainer

    secret = secrets.token_hex(16)
    config = Config(transport=transport, copy_threads=1)
    with ExitStack() as stack:
        hubs = [stack.enter_context(Hub(secret=secret)) for _ in scenarios]
        job = Job(
            scenarios=scenarios,
            hubs=[hub.address for hub in hubs],
            secret=secret,
            num_replicas=len(SIZES),
            steps=STEPS,
            seconds=SECONDS,
            transport=transport,
        )
        trainer = stack.enter_context(Trainer(job, folder))
        for scenario, hub in zip(scenarios, hubs, strict=True):
            first = trainer.file(f"{scenario.name}/0.safetensors", SECONDS)
            engines = replicas_of(first, scenario.config, SIZES)
            with Replicas(engines, hub=hub.address, secret=secret, config=config) as replicas:
                replicas.wait(STEPS - 1, SECONDS)
                counts = [
                    msgspec.json.decode(
                        trainer.file(f"{scenario.name}/{rank}.json", SECONDS).read_bytes(),
                        type=list[Counted],
                    )
                    for rank in range(NUM_RANKS)
                ]
            for step in range(STEPS):
                wanted = expected(first.with_name(f"{step}.safetensors"), scenario.config, SIZES)
                for size, ranks in engines.items():
                    for rank, engine in enumerate(ranks):
                        where = f"{scenario.name}, step {step}, rank {rank} of {size}"
                        assert engine.kept[step] == wanted[size][rank], where
                needed = sum(
                    rank.binding().layout.nbytes for ranks in engines.values() for rank in ranks
                )
                assert sum(count[step].wire_bytes for count in counts) == needed, scenario.name
                assert sum(count[step].needed_bytes for count in counts) == needed, scenario.name
        trainer.finish(SECONDS)


def test_resharding(tmp_path: Path) -> None:
    """Cases 1, 2, 3, 4, 7, 12, 14: grouped heads fewer than ranks, experts, pipeline and virtual
    stages, tied embeddings on two stages; sinks begin as NaN."""
    sync(
        [
            Scenario(model="llama", tp=4, etp=4, spoils=True),
            Scenario(model="llama-tied", tp=2, pp=2, vpp=2, etp=2),
            Scenario(model="qwen3-moe", tp=2, ep=2),
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
]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_every_cut(tmp_path: Path, transport: str) -> None:
    """Cases 1 to 4, 7, 9, 12, 14, 15 on every family and every kind of parallelism."""
    sync(WIDE, tmp_path, transport=transport)
