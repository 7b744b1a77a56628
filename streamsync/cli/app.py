"""Commands and their options. What a command does is imported when it runs."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Annotated, Literal

import typer

import streamsync
from streamsync.bench.options import PipelineOptions, PlanOptions, parse_bytes
from streamsync.config import TransportName
from streamsync.demo.options import DemoOptions, ModelName
from streamsync.errors import ConfigError
from streamsync.types import Apply

SECRET_VARIABLE = "STREAMSYNC_SECRET"

app = typer.Typer(
    name="streamsync",
    help="Streams new weights from a trainer into engines that keep generating.",
    no_args_is_help=True,
    add_completion=False,
    # Errors of ours are said in one line by `main`; others deserve Python's own traceback.
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measures streamsync against its roof.", no_args_is_help=True)
app.add_typer(bench, name="bench")
layout = typer.Typer(help="Looks at layouts without a weight or a process.", no_args_is_help=True)
app.add_typer(layout, name="layout")

Transport = Annotated[TransportName, typer.Option(help="What carries the bytes.")]
ApplyMode = Annotated[Apply, typer.Option(help="Install layer by layer, or whole versions.")]
Json = Annotated[Path | None, typer.Option(help="Write the results there; - is stdout.")]


def _print_version(value: bool) -> None:
    if value:
        print(f"streamsync {streamsync.__version__}")
        raise typer.Exit


@app.callback()
def _streamsync(
    debug: Annotated[
        bool, typer.Option("--debug", help="Log everything; show tracebacks of errors.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="And exit.")
    ] = False,
) -> None:
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("streamsync").setLevel(logging.DEBUG if debug else logging.WARNING)


@app.command()
def demo(
    syncs: Annotated[int, typer.Option(help="Versions to train and deliver.")] = 3,
    model: Annotated[ModelName, typer.Option(help="tiny: random weights, seconds.")] = "smollm2",
    transport: Transport = "auto",
    source_ranks: Annotated[int, typer.Option(help="Trainer processes.")] = 2,
    apply: ApplyMode = "layer",
    json: Json = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace there.")] = None,
    live: Annotated[bool, typer.Option(help="A live view, in a terminal.")] = True,
) -> None:
    """Trains a small language model while another process generates from it."""
    options = DemoOptions(
        syncs=syncs,
        model=model,
        transport=transport,
        source_ranks=source_ranks,
        apply=apply,
        json=json,
        trace=trace,
        live=live,
    )
    from streamsync.demo import run

    raise typer.Exit(run.main(options))


@bench.command()
def pipeline(
    transport: Transport = "auto",
    bytes_: Annotated[
        int,
        typer.Option("--bytes", parser=parse_bytes, metavar="BYTES", help="What one sync moves."),
    ] = PipelineOptions().bytes,
    bucket_bytes: Annotated[
        int, typer.Option(parser=parse_bytes, metavar="BYTES", help="Largest bucket.")
    ] = PipelineOptions().bucket_bytes,
    pool_bytes: Annotated[
        int,
        typer.Option(parser=parse_bytes, metavar="BYTES", help="Host memory for leases, per rank."),
    ] = PipelineOptions().pool_bytes,
    tensors: Annotated[int, typer.Option(help="Tensors of the synthetic model.")] = (
        PipelineOptions().tensors
    ),
    digest: Annotated[Literal["on", "off"], typer.Option(help="Prove the landed bytes.")] = "on",
    apply: ApplyMode = "layer",
    cast: Annotated[
        bool, typer.Option("--cast", help="From float32 to bfloat16, not from bfloat16.")
    ] = False,
    syncs: Annotated[int, typer.Option(help="Measured syncs; one more goes before.")] = (
        PipelineOptions().syncs
    ),
    json: Json = None,
) -> None:
    """Moves a synthetic model from one process to another, beside the barest program that does."""
    options = PipelineOptions(
        transport=transport,
        bytes=bytes_,
        bucket_bytes=bucket_bytes,
        pool_bytes=pool_bytes,
        tensors=tensors,
        digest=digest == "on",
        apply=apply,
        cast=cast,
        syncs=syncs,
        json=json,
    )
    from streamsync.bench import pipeline as benchmark

    raise typer.Exit(benchmark.main(options))


@bench.command("plan")
def bench_plan(
    model: Annotated[str, typer.Option(help="Only rows of this model.")] = "",
    rows: Annotated[str, typer.Option(help="Only rows with so many ranks, as 512:256.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Only small clusters: seconds.")] = False,
    json: Json = None,
) -> None:
    """Plans for clusters of up to thousands of ranks, which all join one hub."""
    options = PlanOptions(model=model, rows=rows, quick=quick, json=json)
    from streamsync.bench import plan as benchmark

    raise typer.Exit(benchmark.main(options))


@app.command()
def plan(
    model: Annotated[Path, typer.Option(help="A config.json, or the folder that it is in.")],
    source: Annotated[str, typer.Option(help="The trainer: 'tp8 pp8 ep32 dp4', 'fsdp32'.")],
    sink: Annotated[str, typer.Option(help="The engines: 'tp16 ep16 replicas2'.")],
    rank: Annotated[int, typer.Option(min=0, help="Whose plan, of all engines' ranks.")] = 0,
    explain: Annotated[bool, typer.Option("--explain", help="All of it, for a person.")] = False,
    json: Json = None,
) -> None:
    """Plans a sync for one rank of an engine, without a weight or a process."""
    from streamsync.cli import plan as planning

    options = planning.Options(model, source, sink, rank, explain, json)
    raise typer.Exit(planning.main(options))


@layout.command("check")
def layout_check(
    config: Annotated[Path, typer.Argument(help="A config.json, or the folder that it is in.")],
    source: Annotated[str, typer.Option(help="How the trainer cuts the model.")] = "tp1",
    sink: Annotated[str, typer.Option(help="How an engine cuts the model.")] = "tp1",
    json: Json = None,
) -> None:
    """Checks a model's rules: every tensor has a place, and is what the checkpoint says."""
    from streamsync.cli import layout as checking

    raise typer.Exit(checking.main(checking.Options(config, source, sink, json)))


@app.command()
def hub(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 0,
    secret_file: Annotated[
        Path | None,
        typer.Option(help=f"File holding the job's secret; else the variable {SECRET_VARIABLE}."),
    ] = None,
) -> None:
    """Runs the hub, where the ranks of one job find each other, until it is interrupted."""
    secret = read_secret(secret_file)
    stop = {signal.SIGINT, signal.SIGTERM}
    # Blocked before any other thread starts (numpy's and torch's do when they are imported), so
    # that only `sigwait` below ever takes them.
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    from streamsync.control.hub import Hub

    with Hub(host=host, port=port, secret=secret) as running:
        print(f"hub at {running.address}", flush=True)
        signal.sigwait(stop)


def read_secret(path: Path | None) -> str:
    """The job's secret, from `path` or the environment; raises `ConfigError` when there is none."""
    if path is not None:
        try:
            secret = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"can't read the secret file {path}: {error}") from error
        if not secret:
            raise ConfigError(f"the secret file {path} is empty; write the job's secret into it")
        return secret
    secret = os.environ.get(SECRET_VARIABLE, "")
    if not secret:
        raise ConfigError(f"the hub needs the job's secret: set {SECRET_VARIABLE} or --secret-file")
    return secret
