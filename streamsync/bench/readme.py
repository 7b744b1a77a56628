"""Writes the README's figures from results: `python -m streamsync.bench.readme BENCH DEMO [PLAN]`.

BENCH is what `streamsync bench pipeline --json` wrote, DEMO what `streamsync demo --json` wrote,
both on the machine that runs this: its name goes into the text. PLAN is what `streamsync bench plan
--json` wrote, on any machine: it names it.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import msgspec

from streamsync.bench.plan_result import PlanResult
from streamsync.errors import ConfigError, StreamsyncError

README = Path("README.md")
PLACE = re.compile(r"(<!-- figures -->\n).*(<!-- /figures -->\n)", re.DOTALL)

PLAN_PLACE = re.compile(r"(<!-- plan -->\n).*(<!-- /plan -->\n)", re.DOTALL)


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a pipeline result that is quoted."""

    transport: str
    bytes: int
    gb_per_s: float
    ratio_to_roof: float


class Sync(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one sync of the demo that is quoted."""

    seconds: float
    stall_seconds: float
    publish_blocked_seconds: float
    mismatched_tensors: int


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the demo's result that is quoted."""

    ok: bool
    model: str
    transport: str
    source_ranks: int
    needed_bytes: int
    syncs: list[Sync]


def describe(bench: BenchResult, demo: DemoResult, machine: str) -> str:
    """The figures as Markdown; raises `ConfigError` for a demo that failed: it proves nothing."""
    if not demo.ok or not demo.syncs or any(sync.mismatched_tensors for sync in demo.syncs):
        raise ConfigError("the demo's result is not ok; run it again and look at its output")
    stall = max(sync.stall_seconds for sync in demo.syncs)
    seconds = max(sync.seconds for sync in demo.syncs)
    blocked = max(sync.publish_blocked_seconds for sync in demo.syncs)
    return (
        f"- {bench.gb_per_s:.2f} GB/s over {bench.transport}, digests on: "
        f"{bench.ratio_to_roof:.0%} of the barest program that does the same job "
        f"(`streamsync bench pipeline --transport {bench.transport} --bytes {bench.bytes}`).\n"
        f"- {stall:.2f} s is the longest that generation stood still for a new version of "
        f"{demo.model} ({demo.needed_bytes / 1e6:.0f} MB from {demo.source_ranks} trainer ranks "
        f"over {demo.transport}, received in {seconds:.2f} s at most; `streamsync demo`).\n"
        f"- {blocked:.2f} s is the longest that `publish` kept a trainer rank from its next step "
        f"there.\n"
        f"\nMeasured on {machine}.\n"
    )


def describe_plan(result: PlanResult) -> str:
    """A table of clusters as Markdown; raises `ConfigError` where a byte would travel twice or
    never."""
    if any(row.wire_bytes != row.needed_bytes for row in result.rows):
        raise ConfigError("a plan of this result is wrong: not what is needed would travel")
    lines = [
        "| model | trainer ranks | engine ranks | a rank plans in | metadata a rank | all join in "
        "| busiest source / mean of its copies | makespan / bound |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.model} | {row.source_ranks} ({row.source}) | {row.sink_ranks} ({row.sink}) "
        f"| {row.rank_seconds:.3f} s | {row.metadata_bytes_per_rank / 1e6:.2f} MB "
        f"| {row.cluster_join_seconds:.1f} s | {row.balance_max_over_mean:.3f} "
        f"| {row.makespan_over_bound:.3f} |"
        for row in result.rows
    ]
    machine = f"{result.machine.cores} cores of {result.machine.cpu}"
    return "\n".join([*lines, "", f"Measured on {machine} (`streamsync bench plan`).", ""])


def name_machine() -> str:
    """This machine's processor and what of it may be used."""
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return (
        f"{len(os.sched_getaffinity(0))} cores of {found[1] if found else 'an unnamed processor'}"
    )


def main(arguments: list[str]) -> int:
    """Rewrites README.md in the current directory; returns the exit code."""
    if len(arguments) not in (2, 3):
        usage = "usage: python -m streamsync.bench.readme BENCH.json DEMO.json [PLAN.json]"
        print(usage, file=sys.stderr)
        return 2
    try:
        bench = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=BenchResult)
        demo = msgspec.json.decode(Path(arguments[1]).read_bytes(), type=DemoResult)
        figures = describe(bench, demo, name_machine())
        text, count = PLACE.subn(lambda found: found[1] + figures + found[2], README.read_text())
        if not count:
            raise ConfigError(f"{README} has no place marked for figures")
        if len(arguments) == 3:
            plan = msgspec.json.decode(Path(arguments[2]).read_bytes(), type=PlanResult)
            table = describe_plan(plan)
            text, count = PLAN_PLACE.subn(lambda found: found[1] + table + found[2], text)
            if not count:
                raise ConfigError(f"{README} has no place marked for the table of plans")
        README.write_text(text)
    except (OSError, msgspec.MsgspecError, StreamsyncError) as error:
        print(f"streamsync: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
