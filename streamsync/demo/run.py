"""The demo from start to end: hub here, trainer and engine as children, checks, numbers."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from streamsync.control.hub import Hub
from streamsync.demo.crew import ChildFailed, Crew, Sender
from streamsync.demo.instructions import PROMPTS
from streamsync.demo.ledger import ENGINE, Ledger
from streamsync.demo.link import failure_kind
from streamsync.demo.messages import (
    Answered,
    Begin,
    Happened,
    Hello,
    Proceed,
    Setup,
    Stop,
    ToParent,
)
from streamsync.demo.models import prepare
from streamsync.demo.results import DemoResults, demo_results
from streamsync.demo.screen import PlainScreen, Screen, checked_line, summary
from streamsync.demo.timeline import joined_trace
from streamsync.errors import ConfigError, MissingExtraError, StreamsyncError

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamsync.demo.options import DemoOptions

_SILENCE_SECONDS: Final = 240.0
"""Importing torch, or one optimizer step, on a machine that is busy with something else."""

_FIRST_RANK: Final = Sender("trainer", 0)

_DRAW_SECONDS: Final = 0.2

_FIRST_TOKENS: Final = 3
"""Before the first sync, so that there are gaps to compare its stall with."""

_CHILD_ENVIRONMENT: Final = {
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""A thread a process (the cores are few and busy), nothing beyond this machine is asked."""


def main(options: DemoOptions) -> int:
    """Runs the demo; returns the exit code: 0 all well, 1 a check or a process failed.

    Raises `ConfigError`, `PlanError`, `LayoutError` or `ControlError` for what the user can cure.
    Nothing is left running then, nor when interrupted (130).
    """
    _check_extras(options)
    ledger = Ledger(options.source_ranks)
    screen = _screen(options, ledger)
    try:
        with screen:
            if options.model == "smollm2":
                screen.line("preparing SmolLM2-135M-Instruct (converted once, then cached)")
            folder = prepare(options.model)
            results, trace = asyncio.run(_run(options, folder, ledger, screen))
            for line in summary(results, trace):
                screen.line(line)
    except StreamsyncError as error:
        kind = error.kind if isinstance(error, ChildFailed) else failure_kind(error)
        if kind == "input":
            raise
        if isinstance(error, ChildFailed) and kind == "bug":
            print(error.trace, file=sys.stderr)
        print(f"streamsync: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("streamsync: interrupted", file=sys.stderr)
        return 130
    if options.json is not None:
        _write_json(options, results)
    return 0 if results.ok else 1


async def _run(
    options: DemoOptions, folder: str, ledger: Ledger, screen: Screen
) -> tuple[DemoResults, str]:
    """Everything that needs the children; returns the results and the trace's path."""
    task = asyncio.current_task()
    assert task is not None
    # Like Ctrl-C: the children and the scratch folder must go with this process.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    secret = secrets.token_urlsafe(32)
    with (
        tempfile.TemporaryDirectory(prefix="streamsync-demo-") as scratch,
        Hub(host="127.0.0.1", port=0, secret=secret) as hub,
    ):
        setup = Setup(
            hub=hub.address,
            secret=secret,
            transport=options.transport,
            model=options.model,
            folder=folder,
            scratch=scratch,
            apply=options.apply,
            syncs=options.syncs,
            num_source_ranks=options.source_ranks,
        )
        async with Crew(Path(scratch)) as crew:
            await _Direction(options, crew, ledger, screen, setup).run()
    return demo_results(options, ledger), _write_trace(options, ledger)


class _Direction:
    """Tells the children what to do next, by what they have said."""

    def __init__(
        self, options: DemoOptions, crew: Crew, ledger: Ledger, screen: Screen, setup: Setup
    ) -> None:
        self._options = options
        self._crew = crew
        self._ledger = ledger
        self._screen = screen
        self._setup = setup
        self._heard = asyncio.Condition()

    async def run(self) -> None:
        """The whole play. Raises the children's failures."""
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._listen()), tasks.create_task(self._draw())]
                await self._direct()
                for task in running:
                    task.cancel()
        except* StreamsyncError as failures:
            raise failures.exceptions[0] from None

    async def _direct(self) -> None:
        options, ledger, crew = self._options, self._ledger, self._crew
        self._screen.line(
            f"starting {options.source_ranks} trainer processes (torchrun, FSDP2, fp32) and "
            "one engine process (bf16, random weights)"
        )
        await crew.start(
            "trainer",
            [
                *("torch.distributed.run", "--nproc-per-node", str(options.source_ranks)),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
                *("--local-addr", "127.0.0.1", "-m", "streamsync.demo.trainer"),
            ],
            _CHILD_ENVIRONMENT,
        )
        await crew.start("engine", ["streamsync.demo.engine"], _CHILD_ENVIRONMENT)
        await self._until(lambda: len(ledger.ready) == options.source_ranks + 1)
        self._screen.line(f"{ledger.num_parameters / 1e6:,.1f} M parameters; generating")
        crew.tell("engine", Begin())
        await self._until(lambda: ledger.num_tokens >= _FIRST_TOKENS)
        for index in range(options.syncs):
            crew.tell("trainer", Proceed(index=index))
            await self._until(lambda index=index: ledger.is_installed(index))  # type: ignore[misc]
            await self._compare(index)
            await self._until(lambda index=index: ledger.is_answered(index))  # type: ignore[misc]
        await self._until(lambda: ledger.is_published(options.syncs - 1))
        crew.tell("engine", Stop())
        await self._until(lambda: len(ledger.done) == options.source_ranks + 1)

    async def _compare(self, index: int) -> None:
        """Compares the two copies of sync `index`, then deletes them."""
        from streamsync.demo.exactness import mismatched

        shards = [Path(path) for path in self._ledger.copies[index].values()]
        parameters = Path(self._ledger.installed[index].path)
        self._ledger.mismatched[index] = await asyncio.to_thread(mismatched, shards, parameters)
        for path in (*shards, parameters):
            path.unlink()
        self._screen.line(checked_line(self._ledger, index))

    async def _listen(self) -> None:
        async for sender, message in self._crew.hear(_SILENCE_SECONDS):
            self._ledger.take(sender, message)
            self._narrate(sender, message)
            if isinstance(message, Hello):
                self._crew.tell_one(sender, self._setup)
            async with self._heard:
                self._heard.notify_all()

    async def _draw(self) -> None:
        while True:
            self._screen.refresh()
            await asyncio.sleep(_DRAW_SECONDS)

    def _narrate(self, sender: Sender, message: ToParent) -> None:
        match message:
            case Happened(event=event) if event.name == "train" and sender.rank == 0:
                self._screen.line(f"trainer    {event.text}, {event.seconds:.1f} s")
            case Happened(event=event) if event.name == "publish" and sender == _FIRST_RANK:
                self._screen.line(
                    f"trainer    step {event.version and event.version.step} published, "
                    f"blocked {event.seconds:.2f} s"
                )
            case Happened(event=event) if event.name == "committed" and sender == ENGINE:
                self._screen.line(f"engine     version {event.version} committed")
            case Answered():
                step, answer = message.version.step, message.answers[0]
                self._screen.line(f"engine     step {step} answers: {PROMPTS[0]} {answer}")

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._heard:
            await self._heard.wait_for(condition)


def _check_extras(options: DemoOptions) -> None:
    for module in ("safetensors", "transformers"):
        if find_spec(module) is None:
            raise MissingExtraError("the demo", "demo")
    if options.transport == "ucx" and find_spec("ucxx") is None:
        raise MissingExtraError("transport ucx", "ucx")


def _screen(options: DemoOptions, ledger: Ledger) -> Screen:
    stream = sys.stderr if options.json_to_stdout else sys.stdout
    if options.live and stream.isatty() and find_spec("rich") is not None:
        from streamsync.demo.live import LiveScreen

        return LiveScreen(options, ledger, stream)
    return PlainScreen(stream)


def _write_trace(options: DemoOptions, ledger: Ledger) -> str:
    trace = joined_trace(
        (str(sender), ledger.pids[sender], events) for sender, events in ledger.events.items()
    )
    path = options.trace
    if path is None:
        with tempfile.NamedTemporaryFile(
            prefix="streamsync-demo-", suffix=".trace.json", delete=False
        ) as file:
            path = Path(file.name)
    _write(path, msgspec.json.encode(trace))
    return str(path)


def _write_json(options: DemoOptions, results: DemoResults) -> None:
    data = msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n"
    if options.json_to_stdout:
        sys.stdout.write(data.decode())
        sys.stdout.flush()
    elif options.json is not None:
        _write(options.json, data)


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror}") from error
