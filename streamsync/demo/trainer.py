"""One trainer rank under torchrun: FSDP2 in fp32, some AdamW steps, a new version, again."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from streamsync.config import Config
from streamsync.demo.exactness import write_shards
from streamsync.demo.instructions import Tokenizer, batch, example, instructions
from streamsync.demo.link import Link, run_child
from streamsync.demo.messages import Copied, Proceed, Published, Ready, Setup
from streamsync.demo.models import DemoModel, demo_model
from streamsync.observability.probe import Event, Probe
from streamsync.publisher import Publisher

_SETUP_SECONDS = 60.0
_REPLICA_SECONDS = 180.0
_PROCEED_SECONDS = 600.0
_COLLECTIVE_SECONDS = 300.0


class Trainer:
    """The sharded model, its optimizer and its share of the instructions."""

    def __init__(self, model: DemoModel, rank: int, num_ranks: int) -> None:
        self.module = model.trainer_model()
        self.num_parameters = sum(p.numel() for p in self.module.parameters())
        self.num_steps = 0
        mesh = init_device_mesh("cpu", (num_ranks,))
        layers: list[nn.Module] = list(self.module.model.layers)  # type: ignore[union-attr, arg-type]
        for layer in (*layers, self.module):
            fully_shard(layer, mesh=mesh)
        self._optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=model.learning_rate, weight_decay=0.0
        )
        tokenizer: Tokenizer = model.tokenizer()
        self._examples = [example(i, tokenizer, model.example_tokens) for i in instructions()]
        self._rank, self._num_ranks, self._batch_size = rank, num_ranks, model.batch_size

    def step(self) -> float:
        """One optimizer step over the next examples; returns this rank's loss before it."""
        chosen = batch(
            self.num_steps, self._rank, self._num_ranks, self._batch_size, len(self._examples)
        )
        ids, labels = (torch.tensor([self._examples[i][k] for i in chosen]) for k in (0, 1))
        loss: torch.Tensor = self.module(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.num_steps += 1
        return loss.item()


def work(link: Link) -> None:
    """Trains and publishes as the parent's `Setup` and `Proceed` say."""
    setup = link.receive(Setup, _SETUP_SECONDS)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = demo_model(setup.model, setup.folder)
    trainer = Trainer(model, rank, num_ranks)
    probe = Probe()
    probe.subscribe(link.event)
    with Publisher(
        trainer.module,
        hub=setup.hub,
        secret=setup.secret,
        rank=rank,
        num_ranks=num_ranks,
        group="trainer",
        config=Config(transport=setup.transport),
        probe=probe,
    ) as publisher:
        link.send(Ready(num_parameters=trainer.num_parameters))
        publisher.wait_for_replicas(1, timeout=_REPLICA_SECONDS)
        for index in range(setup.syncs):
            link.receive(Proceed, _PROCEED_SECONDS)
            # Before publish(), so that the copy also proves that publishing left the source alone.
            path = Path(setup.scratch) / f"shards-{index}-{rank}.safetensors"
            write_shards(trainer.module, path)
            link.send(Copied(index=index, path=str(path)))
            version = publisher.publish(trainer.num_steps)
            if index + 1 < setup.syncs:
                # The bytes of this version may still be on their way: that's what publish() is for.
                for _ in range(model.steps_per_sync):
                    began = time.monotonic()
                    loss = trainer.step()
                    seconds = time.monotonic() - began
                    text = f"step {trainer.num_steps} loss {loss:.2f}"
                    probe.emit(Event(name="train", started_at=began, seconds=seconds, text=text))
            publisher.wait(version)
            link.send(Published(index=index, report=publisher.report(version)))


def main() -> int:
    """A torchrun worker's whole life."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])

    def grouped(link: Link) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=_COLLECTIVE_SECONDS))
        try:
            work(link)
        finally:
            dist.destroy_process_group()

    return run_child("trainer", rank, grouped)


if __name__ == "__main__":
    raise SystemExit(main())
