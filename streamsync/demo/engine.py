"""The engine process: a bf16 model that generates without pause while its weights are replaced."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from streamsync.config import Config
from streamsync.demo.exactness import write_parameters
from streamsync.demo.generation import Forward, Generator
from streamsync.demo.instructions import PROMPTS
from streamsync.demo.link import Link, run_child
from streamsync.demo.messages import Answered, Begin, Installed, Planned, Ready, Setup, Stop
from streamsync.demo.models import demo_model, version_steps
from streamsync.engines.torch_module import TorchEngine
from streamsync.observability.probe import Event, Probe
from streamsync.plan.plan import CastRule, Rules
from streamsync.subscriber import Subscriber

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from streamsync.types import Version

_SETUP_SECONDS = 60.0
_BEGIN_SECONDS = 300.0
_VERSION_SECONDS = 900.0
_JOIN_SECONDS = 5.0


class Watcher:
    """A thread that waits for each version and saves the parameters as they were committed.

    They are read straight from the live model: the trainer publishes no other version before the
    parent has compared this one. What goes wrong ends up in `error`.
    """

    def __init__(
        self,
        subscriber: Subscriber,
        module: nn.Module,
        steps: Sequence[int],
        setup: Setup,
        link: Link,
    ) -> None:
        self._subscriber, self._module, self._steps = subscriber, module, steps
        self._folder, self._link = Path(setup.scratch), link
        self._thread = threading.Thread(target=self._run, name="demo watcher", daemon=True)
        self.error: Exception | None = None

    def start(self) -> None:
        """Begins to wait."""
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Waits for the end of the thread."""
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            for index, step in enumerate(self._steps):
                version = self._subscriber.wait(step=step, timeout=_VERSION_SECONDS)
                self._report(index, version)
        except Exception as error:
            self.error = error

    def _report(self, index: int, version: Version) -> None:
        plan = self._subscriber.plan
        report = next(r for r in self._subscriber.reports if r.version == version)
        assert plan is not None
        if index == 0:
            self._link.send(Planned(groups=plan.groups, needed_bytes=plan.needed_bytes))
        path = self._folder / f"parameters-{index}.safetensors"
        write_parameters(self._module, path)
        self._link.send(Installed(index=index, report=report, path=str(path)))


def work(link: Link) -> None:
    """Generates until the parent says `Stop`."""
    setup = link.receive(Setup, _SETUP_SECONDS)
    model = demo_model(setup.model, setup.folder)
    module = model.engine_model().eval()
    probe = Probe()
    probe.subscribe(link.event)
    engine = TorchEngine(module)
    with Subscriber(
        engine,
        hub=setup.hub,
        secret=setup.secret,
        replica="engine",
        rank=0,
        num_ranks=1,
        apply=setup.apply,
        rules=Rules(casts=(CastRule(source="float32", sink="bfloat16"),)),
        config=Config(transport=setup.transport),
        probe=probe,
    ) as subscriber:
        link.send(Ready(num_parameters=sum(p.numel() for p in module.parameters())))
        # Until then the trainer, still being built, needs the cores more.
        link.receive(Begin, _BEGIN_SECONDS)
        watcher = Watcher(subscriber, module, version_steps(model, setup.syncs), setup, link)
        watcher.start()

        def on_forward(forward: Forward) -> None:
            probe.emit(
                Event(
                    name="step" if forward.text is None else "token",
                    started_at=forward.started_at,
                    seconds=forward.seconds,
                    version=forward.version,
                    text=forward.text or "",
                )
            )

        generator = Generator(
            module,
            model.tokenizer(),
            max_tokens=model.answer_tokens,
            stamp=lambda: engine.version,
            on_forward=on_forward,
        )
        generate(generator, link, lambda: link.has_message() or watcher.error is not None)
        if watcher.error is not None:
            raise watcher.error
        link.receive(Stop, 0.0)
        watcher.join(_JOIN_SECONDS)


def generate(generator: Generator, link: Link, stopped: Callable[[], bool]) -> None:
    """Asks the prompts over and over; tells the parent once when one version answered them all."""
    told: set[Version] = set()
    current: Version | None = None
    answers: dict[str, str] = {}
    for answer in generator.answers(itertools.cycle(PROMPTS), stopped):
        if answer.version is None or answer.version in told:
            continue
        if answer.version != current:
            current, answers = answer.version, {}
        answers[answer.question] = answer.text
        if len(answers) == len(PROMPTS):
            told.add(answer.version)
            link.send(Answered(version=current, answers=tuple(answers[p] for p in PROMPTS)))


def main() -> int:
    """The process's whole life."""
    torch.set_num_threads(1)
    return run_child("engine", 0, work)


if __name__ == "__main__":
    raise SystemExit(main())
