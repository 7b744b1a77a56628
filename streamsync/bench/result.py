"""What `streamsync bench pipeline --json` writes. Pure but for `machine` and `versions`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

import msgspec

from streamsync.bench.bare import BARES
from streamsync.bench.moves import ROOFS
from streamsync.types import STAGE_NAMES, StageReport, SyncReport

if TYPE_CHECKING:
    from streamsync.bench.options import PipelineOptions
    from streamsync.config import TransportName


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One measured sync and the passes right after it, in seconds.

    `seconds` run from the call of `publish` to COMMIT seen at the source, `publish_seconds` to the
    return of `publish`; `roof_seconds` and `bare_seconds` from the start of a pass until the source
    knows that the sink has everything. The CPU seconds are those of both processes.
    """

    seconds: float
    publish_seconds: float
    roof_seconds: float
    bare_seconds: float
    cpu_seconds: float
    roof_cpu_seconds: float
    source: SyncReport
    sink: SyncReport


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    transport: str
    bytes: int
    bucket_bytes: int
    pool_bytes: int
    tensors: int
    digest: bool
    apply: str
    cast: bool
    syncs: int


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it was measured. `cores` are those that the process may use."""

    cpu: str
    cores: int
    memory_bytes: int


class PipelineResult(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds` and what follows from it are medians over `samples`, `stages` means of one sync.

    `bytes` is what one sync moves; GB are 10^9 bytes. `peak_pool_bytes` is the larger one of the
    two ranks'. `wire_bytes` was counted by the transport in the last sync.
    """

    transport: str
    bytes: int
    wire_bytes: int
    seconds: float
    gb_per_s: float
    roof_gb_per_s: float
    ratio_to_roof: float
    bare_gb_per_s: float
    cpu_seconds_per_gb: float
    roof_cpu_seconds_per_gb: float
    roof: str
    bare: str
    peak_pool_bytes: int
    stages: dict[str, StageReport]
    digest: bool
    mismatched_tensors: int
    samples: Sequence[Sample]
    options: Options
    machine: Machine
    versions: dict[str, str]
    commit: str
    date: str


def make_result(
    options: PipelineOptions,
    transport: TransportName,
    nbytes: int,
    mismatched_tensors: int,
    samples: Sequence[Sample],
    date: str,
) -> PipelineResult:
    """The result of a run over `transport` (never `auto`)."""
    seconds = median(sample.seconds for sample in samples)
    roof_seconds = median(sample.roof_seconds for sample in samples)
    read = ", one read of the bytes on each side" if options.digest else ""
    reports = [report for sample in samples for report in (sample.source, sample.sink)]
    return PipelineResult(
        transport=transport,
        bytes=nbytes,
        wire_bytes=samples[-1].source.wire_bytes,
        seconds=seconds,
        gb_per_s=nbytes / seconds / 1e9,
        roof_gb_per_s=nbytes / roof_seconds / 1e9,
        ratio_to_roof=roof_seconds / seconds,
        bare_gb_per_s=nbytes / median(sample.bare_seconds for sample in samples) / 1e9,
        cpu_seconds_per_gb=median(sample.cpu_seconds for sample in samples) / nbytes * 1e9,
        roof_cpu_seconds_per_gb=median(sample.roof_cpu_seconds for sample in samples)
        / nbytes
        * 1e9,
        roof=f"one copy out of the source's tensors, one into the sink's{read}; between them "
        f"{ROOFS[transport]}; blocks of at most {options.bucket_bytes} bytes, all of it at once",
        bare=BARES[transport],
        peak_pool_bytes=max(report.peak_pool_bytes for report in reports),
        stages={name: _mean([r.stages[name] for r in reports if name in r.stages])
                for name in STAGE_NAMES},
        digest=options.digest,
        mismatched_tensors=mismatched_tensors,
        samples=samples,
        options=Options(**{name: getattr(options, name) for name in Options.__struct_fields__}),
        machine=machine(),
        versions=versions(),
        commit=commit(),
        date=date,
    )  # fmt: skip


def _mean(stages: Sequence[StageReport]) -> StageReport:
    return StageReport(
        busy_seconds=fmean(stage.busy_seconds for stage in stages),
        blocked_seconds=fmean(stage.blocked_seconds for stage in stages),
        bytes=round(fmean(stage.bytes for stage in stages)),
    )


def machine() -> Machine:
    """This machine, without its name."""
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return Machine(
        cpu=found[1] if found else platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def versions() -> dict[str, str]:
    """Python's version and those of the packages that count; `ucxx` is empty when absent."""
    found = {"python": platform.python_version()}
    for name, packages in (
        ("torch", ["torch"]),
        ("streamsync", ["streamsync"]),
        ("ucxx", ["ucxx-cu12", "ucxx-cu13", "ucxx"]),
    ):
        found[name] = next(filter(None, map(_version, packages)), "")
    if not found["streamsync"]:
        import streamsync

        found["streamsync"] = streamsync.__version__
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """The commit that runs, with `+` when files differ from it; empty outside of a checkout."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "HEAD"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        changed = subprocess.run(
            ["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
