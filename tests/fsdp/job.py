"""The trainer: `torchrun --nproc-per-node 4 -m tests.fsdp.job FOLDER`.

Walks the scenarios of FOLDER/job.json in one set of processes. For each it builds the real model
and publishes `steps` versions, each after a step of the optimizer. In FOLDER/<scenario> appear the
checkpoint of every version (<step>.safetensors), what each rank counted (<rank>.json), and what it
was told of engines that can't be served (<rank>.txt).
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from streamsync import Config, PlanError, Publisher
from tests.fsdp.build import Training
from tests.fsdp.messages import Counted, Job


def main(folder: Path) -> None:
    job = msgspec.json.decode((folder / "job.json").read_bytes(), type=Job)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for number, scenario in enumerate(job.scenarios):
        training = Training(scenario)
        if training.model is not None:
            publish(job, number, training, folder / scenario.name)
        dist.barrier()
    dist.destroy_process_group()


def publish(job: Job, number: int, training: Training, folder: Path) -> None:
    assert training.model is not None
    scenario, rank = job.scenarios[number], dist.get_rank()
    training.save(folder / "0.safetensors")
    counted = []
    with Publisher(
        training.model,
        hub=job.hubs[number],
        secret=job.secret,
        rank=rank,
        num_ranks=scenario.num_ranks,
        config=Config(transport=scenario.transport, copy_threads=1),  # type: ignore[arg-type]
    ) as publisher:
        if scenario.refused:
            say(folder / f"{rank}.txt", refusal(publisher, job.seconds).encode())
            return
        publisher.wait_for_replicas(job.num_replicas[number], timeout=job.seconds)
        for step in range(job.steps):
            if step:
                training.step(step)
                training.save(folder / f"{step}.safetensors")
            before = training.digest()
            version = publisher.publish(step)
            publisher.wait(version, timeout=job.seconds)
            assert training.digest() == before, "a sync changed the source"
            report = publisher.report(version)
            counted.append(Counted(needed_bytes=report.needed_bytes, wire_bytes=report.wire_bytes))
        # Case 21: nothing was stepped, so the engines must end with the same bits.
        publisher.wait(publisher.publish(job.steps), timeout=job.seconds)
    say(folder / f"{rank}.json", msgspec.json.encode(counted))


def refusal(publisher: Publisher, seconds: float) -> str:
    """What this rank is told of an engine that can't be served."""
    try:
        publisher.wait_for_replicas(1, timeout=seconds)
    except PlanError as error:
        return str(error)
    raise AssertionError("the engines were to be refused")


def say(path: Path, content: bytes) -> None:
    """Writes a file that appears complete."""
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".part").write_bytes(content)
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
