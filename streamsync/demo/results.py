"""What a run of the demo showed, as numbers: the object that `--json` writes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from streamsync.demo.instructions import PROMPTS
from streamsync.demo.ledger import ENGINE
from streamsync.demo.timeline import stage_overlap, stall, token_times
from streamsync.types import STAGE_NAMES, StageReport, SyncReport

if TYPE_CHECKING:
    from streamsync.demo.ledger import Ledger
    from streamsync.demo.options import DemoOptions


class SyncResult(msgspec.Struct, frozen=True, kw_only=True):
    """One version's way from the trainer's parameters to the engine's.

    `seconds` run from the first source's start to the engine's COMMIT, `bytes` were counted by the
    transport. `first_layer_seconds` is the engine's; `publish_blocked_seconds` the slowest rank's.
    `stall_seconds` is the longest gap between tokens during the sync minus the median gap,
    `overlap` the share of the time in which at least two stages worked at once. Stages are sums
    over ranks.
    """

    version: str
    step: int
    bytes: int
    needed_bytes: int
    wire_bytes: int
    seconds: float
    gb_per_s: float
    first_layer_seconds: float
    publish_blocked_seconds: float
    stall_seconds: float
    overlap: float
    mismatched_tensors: int
    stages: dict[str, StageReport]


class DemoResults(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run. `needed_bytes` and `wire_bytes` are those of one sync (they are the same for
    all; if one sync moved other bytes than it needed, those of that one). `answers[k]` are the
    answers of version k to `prompts`, in their order. `failures` says why `ok` is false.
    """

    ok: bool
    failures: list[str]
    model: str
    num_parameters: int
    source_ranks: int
    sink_ranks: int
    transport: str
    needed_bytes: int
    wire_bytes: int
    tokens_generated: int
    prompts: Sequence[str]
    answers: Sequence[Sequence[str]]
    syncs: list[SyncResult]


def sync_result(ledger: Ledger, index: int) -> SyncResult:
    """The numbers of sync `index`, which every rank has given its account of."""
    sink = ledger.installed[index].report
    sources = list(ledger.published[index].values())
    began = min(report.started_at for report in sources)
    ended = max(began, sink.started_at + sink.seconds)
    wire_bytes = sum(report.wire_bytes for report in sources)
    seconds = ended - began
    return SyncResult(
        version=str(sink.version),
        step=sink.version.step,
        bytes=wire_bytes,
        needed_bytes=sink.needed_bytes,
        wire_bytes=wire_bytes,
        seconds=seconds,
        gb_per_s=wire_bytes / seconds / 1e9 if seconds else 0.0,
        first_layer_seconds=sink.first_layer_seconds,
        publish_blocked_seconds=max(report.publish_blocked_seconds for report in sources),
        stall_seconds=stall(token_times(ledger.events[ENGINE]), began, ended),
        overlap=stage_overlap(ledger.all_events(), sink.version),
        mismatched_tensors=len(ledger.mismatched[index]),
        stages={name: _summed(name, [*sources, sink]) for name in STAGE_NAMES},
    )


def demo_results(options: DemoOptions, ledger: Ledger) -> DemoResults:
    """All numbers, and the verdict."""
    syncs = [sync_result(ledger, index) for index in range(options.syncs)]
    answers = [ledger.answers[ledger.installed[i].report.version] for i in range(options.syncs)]
    reports = [r for i in range(options.syncs) for r in ledger.published[i].values()]
    failures = _failures(options, ledger, syncs, answers)
    shown = next((sync for sync in syncs if sync.wire_bytes != sync.needed_bytes), syncs[-1])
    return DemoResults(
        ok=not failures,
        failures=failures,
        model=options.model,
        num_parameters=ledger.num_parameters,
        source_ranks=options.source_ranks,
        sink_ranks=1,
        transport=", ".join(sorted({report.transport for report in reports})),
        needed_bytes=shown.needed_bytes,
        wire_bytes=shown.wire_bytes,
        tokens_generated=ledger.num_tokens,
        prompts=PROMPTS,
        answers=answers,
        syncs=syncs,
    )


def _failures(
    options: DemoOptions,
    ledger: Ledger,
    syncs: Sequence[SyncResult],
    answers: Sequence[Sequence[str]],
) -> list[str]:
    found: list[str] = []
    for index, sync in enumerate(syncs):
        if names := ledger.mismatched[index]:
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            found.append(f"version {sync.version}: {len(names)} tensors differ ({shown})")
        received = ledger.installed[index].report.wire_bytes
        for side, wire_bytes in (("sent", sync.wire_bytes), ("received", received)):
            if wire_bytes != sync.needed_bytes:
                found.append(
                    f"version {sync.version}: {side} {wire_bytes} bytes, needed {sync.needed_bytes}"
                )
    if options.model != "tiny" and len(answers) > 1 and answers[0] == answers[-1]:
        found.append("the last version's answers are the first one's")
    return found


def _summed(name: str, reports: Sequence[SyncReport]) -> StageReport:
    stages = [report.stages[name] for report in reports if name in report.stages]
    return StageReport(
        busy_seconds=sum(stage.busy_seconds for stage in stages),
        blocked_seconds=sum(stage.blocked_seconds for stage in stages),
        bytes=sum(stage.bytes for stage in stages),
    )
