"""The trainer: `torchrun --nproc-per-node 4 -m tests.megatron.job FOLDER`.

Walks the scenarios of FOLDER/job.json in one set of processes. For each it builds the real model,
proves the reference export, and publishes `steps` versions of changed values; the expected tensors
of every version lie in FOLDER/<scenario>/<step>.safetensors, and what the ranks counted in
FOLDER/<scenario>/<rank>.json.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save

from streamsync import Config, PlanError, Publisher, bind_megatron
from tests.megatron.build import build, fill, mpu, tensors
from tests.megatron.messages import Counted, Job
from tests.megatron.reference import export, logits_errors, mbridge_export, same_bits, spoiled

if TYPE_CHECKING:
    from tests.megatron.scenarios import Scenario

LOGITS_TOLERANCE = 1e-5


def main(folder: Path) -> None:
    job = msgspec.json.decode((folder / "job.json").read_bytes(), type=Job)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for number, scenario in enumerate(job.scenarios):
        run(job, number, folder / scenario.name)
        dist.barrier()
        mpu.destroy_model_parallel()
    dist.destroy_process_group()


def run(job: Job, number: int, folder: Path) -> None:
    scenario, rank = job.scenarios[number], dist.get_rank()
    chunks = build(scenario)
    fill(scenario, chunks, 0)
    exported = export(scenario, chunks)
    prove(scenario, chunks, exported)
    expect(folder, 0, exported)
    binding = bind_megatron(chunks, scenario.config)
    counted = []
    with Publisher(
        binding,
        hub=job.hubs[number],
        secret=job.secret,
        rank=rank,
        num_ranks=dist.get_world_size(),
        config=Config(transport=job.transport, bucket_bytes=job.bucket_bytes, copy_threads=1),
    ) as publisher:
        if scenario.refused:
            say(folder / f"{rank}.txt", refusal(publisher, job.seconds).encode())
            return
        publisher.wait_for_replicas(job.num_sizes + scenario.has_draft, timeout=job.seconds)
        for step in range(job.steps):
            if step:
                fill(scenario, chunks, step)
                expect(folder, step, export(scenario, chunks))
            if step == 1:
                move(chunks)
            before = digest(chunks)
            version = publisher.publish(step)
            publisher.wait(version, timeout=job.seconds)
            assert digest(chunks) == before, "a sync changed the source"
            report = publisher.report(version)
            counted.append(Counted(needed_bytes=report.needed_bytes, wire_bytes=report.wire_bytes))
    say(folder / f"{rank}.json", msgspec.json.encode(counted))


def refusal(publisher: Publisher, seconds: float) -> str:
    """What this rank is told of an engine that can't be served."""
    try:
        publisher.wait_for_replicas(1, timeout=seconds)
    except PlanError as error:
        return str(error)
    raise AssertionError("the engines were to be refused")


def move(chunks: list[torch.nn.Module]) -> None:
    """Puts all weights elsewhere, as an optimizer does that offloads and reloads them."""
    for _, tensor, _ in tensors(chunks):
        tensor.data = tensor.data.clone()


def prove(
    scenario: Scenario, chunks: list[torch.nn.Module], exported: dict[str, torch.Tensor]
) -> None:
    """That the export is the model: by logits in fp32, where wrong exports must show too, and by
    mbridge where that can run. All ranks call it; rank 0 judges."""
    if scenario.dtype == "float32":
        wrong = spoiled(scenario.config, exported) if exported and scenario.spoils else {}
        for what, error in zip(
            ("as it is", *wrong) if exported else (),
            logits_errors(scenario, chunks, exported, *wrong.values()),
            strict=True,
        ):
            right = what == "as it is"
            fine = error <= LOGITS_TOLERANCE if right else error > 1000 * LOGITS_TOLERANCE
            assert fine, f"{scenario.name}, {what}: logits differ by {error}"
    if scenario.mbridge:
        theirs = mbridge_export(scenario, chunks)
        other = [n for n, t in exported.items() if not same_bits(t, theirs[n])]
        assert not other, f"{scenario.name}: mbridge exports other {other}"


def expect(folder: Path, step: int, exported: dict[str, torch.Tensor]) -> None:
    """Rank 0 writes what the sinks must hold of `step`."""
    if not exported:
        return
    folder.mkdir(exist_ok=True)
    say(folder / f"{step}.safetensors", save(exported))


def say(path: Path, content: bytes) -> None:
    """Writes a file that appears complete."""
    path.with_suffix(".part").write_bytes(content)
    path.with_suffix(".part").rename(path)


def digest(chunks: list[torch.nn.Module]) -> str:
    """Of every bit that this rank's model holds."""
    whole = hashlib.sha256()
    for name, tensor, _ in tensors(chunks):
        whole.update(name.encode())
        whole.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return whole.hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # Megatron's leftovers (process groups, CUDA stand-ins) are not worth waiting for.
    sys.stdout.flush()
    os._exit(0)
