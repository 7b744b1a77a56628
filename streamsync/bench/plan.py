"""`streamsync bench plan`: what planning costs, from 48 ranks to thousands.

Layouts of whole clusters are made from configs, so that no weights and no GPU are needed. Every
rank joins one real hub over a socket of its own; some ranks of both sides plan with what it
answered; and all that the cluster's sinks would be sent is laid out as flows.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from streamsync.bench import flow
from streamsync.bench.cases import CASES, MODELS
from streamsync.bench.cluster import Cluster, join_cluster
from streamsync.bench.layouts import engine_side, trainer_side
from streamsync.bench.plan_result import PlanResult, PlanRow
from streamsync.bench.ranks import REPEATS, Planned, plan_sink, plan_source, quickest
from streamsync.bench.result import commit, machine, versions
from streamsync.bench.traffic import Traffic
from streamsync.config import Config
from streamsync.control.found import decode_found
from streamsync.errors import ConfigError
from streamsync.layout.outline import outline, outline_digest
from streamsync.models.model import read_model
from streamsync.models.parallelism import Parallelism
from streamsync.plan.plan import Rules
from streamsync.plan.question import question

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TextIO

    from streamsync.bench.cases import Case
    from streamsync.bench.cluster import Joined
    from streamsync.bench.layouts import Side
    from streamsync.bench.options import PlanOptions
    from streamsync.plan.plan import Plan, Share

_BUCKET_BYTES = Config().bucket_bytes
_NUM_SAMPLED = 4
"""Ranks of each side that plan in every row."""
_NOTE = (
    "Awex, quoted by the issue that asked for this, on the same kind of machine: 3.1 s and "
    "6.0 s + 12.6 s of planning, 36 MB of metadata a rank; its greedy choice of sources reaches "
    "4.1 x the mean for llama-70b, tp8 pp4 dp4 to tp16."
)


def main(options: PlanOptions) -> int:
    """Measures and writes the result; returns 1 when a byte would travel twice or never."""
    if options.json is not None and not options.json.parent.is_dir():
        raise ConfigError(f"can't write {options.json}: there is no folder {options.json.parent}")
    to_stdout = str(options.json) == "-"
    result = measure(options, tell=sys.stderr if to_stdout else sys.stdout)
    if options.json is not None:
        encoded = msgspec.json.format(msgspec.json.encode(result), indent=2)
        if to_stdout:
            print(encoded.decode())
        else:
            options.json.write_bytes(encoded + b"\n")
    wrong = [row for row in result.rows if row.wire_bytes != row.needed_bytes]
    for row in wrong:
        text = f"{row.wire_bytes} bytes planned, {row.needed_bytes} needed"
        print(f"streamsync: {row.model} {row.source} to {row.sink}: {text}", file=sys.stderr)
    return 1 if wrong else 0


def measure(options: PlanOptions, tell: TextIO) -> PlanResult:
    """Runs every case that `options` name, and tells each row as it is found."""
    cases = chosen(options)
    before = os.getloadavg()[0]
    rows = []
    for case in cases:
        row = measure_case(case)
        print(describe(row), file=tell, flush=True)
        rows.append(row)
    return PlanResult(
        rows=rows,
        bucket_bytes=_BUCKET_BYTES,
        note=_NOTE,
        load_average=(before, os.getloadavg()[0]),
        machine=machine(),
        versions=versions(),
        commit=commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def chosen(options: PlanOptions) -> list[Case]:
    """The cases that `options` name; raises `ConfigError` when there is none."""
    cases = [
        case
        for case in CASES
        if (not options.quick or case.is_quick)
        and (not options.model or options.model == case.model)
        and (not options.rows or options.rows.replace(":", "→") == case.ranks)
    ]
    if not cases:
        models, ranks = sorted(MODELS), dict.fromkeys(case.ranks for case in CASES)
        raise ConfigError(
            f"no row is of model {options.model or 'any'} with ranks {options.rows or 'any'}"
            f"{', and quick' if options.quick else ''}; models: {', '.join(models)}; ranks: "
            f"{', '.join(ranks)}"
        )
    return cases


def describe(row: PlanRow) -> str:
    """A row for a person."""
    return (
        f"{row.model} {row.source_ranks} ({row.source}) to {row.sink_ranks} ({row.sink}): a rank "
        f"plans in {row.rank_seconds:.3f} s ({row.rank_cpu_seconds:.3f} s CPU) with "
        f"{row.metadata_bytes_per_rank / 1e6:.2f} MB, all join in {row.cluster_join_seconds:.1f} s "
        f"(hub {row.hub_seconds_total:.1f} s CPU, {row.hub_peak_bytes / 1e6:.0f} MB); balance "
        f"{row.balance_max_over_mean:.3f}, makespan {row.makespan_over_bound:.3f}, wire "
        f"{row.wire_over_needed:g}"
    )


def measure_case(case: Case) -> PlanRow:
    """One row."""
    model = read_model(MODELS[case.model])
    engines = Parallelism.parse(case.sink)
    sources = trainer_side(model, Parallelism.parse(case.source))
    sinks = engine_side(model, engines)
    outlines = [outline(layout) for layout in sources.layouts]
    joined = join_cluster(
        Cluster(
            sources=sources.numbers,
            sinks=sinks.numbers,
            num_replicas=engines.replicas,
            outlines=outlines,
            questions=[question(layout, Rules()) for layout in sinks.layouts],
        )
    )
    traffic = Traffic.of(sinks, joined, _BUCKET_BYTES)
    flows, wire_bytes = traffic.flows, int(traffic.flows.nbytes.sum())
    egress = np.bincount(flows.sources, flows.nbytes, minlength=len(sources.numbers))
    alike = defaultdict(list)
    for rank, number in enumerate(sources.numbers):
        alike[outline_digest(outlines[number])].append(rank)
    planned_sinks, planned_sources = _plan_samples(sources, sinks, joined, traffic)
    planned = planned_sinks + planned_sources
    return PlanRow(
        model=case.model,
        source=case.source,
        sink=case.sink,
        num_tensors=len(model.tensors),
        source_ranks=len(sources.numbers),
        sink_ranks=engines.num_ranks,
        rank_seconds=max(rank.seconds for rank in planned),
        rank_cpu_seconds=max(rank.cpu_seconds for rank in planned),
        sink_rank_seconds=max(rank.seconds for rank in planned_sinks),
        source_rank_seconds=max(rank.seconds for rank in planned_sources),
        sampled_sinks=len(planned_sinks),
        sampled_sources=len(planned_sources),
        repeats=REPEATS,
        num_pieces=max(rank.num_pieces for rank in planned),
        metadata_bytes_per_rank=max(rank.metadata_bytes for rank in planned),
        answer_bytes=max(map(len, joined.answers.values())),
        hub_seconds_total=joined.hub_cpu_seconds,
        hub_peak_bytes=joined.hub_peak_bytes,
        cluster_join_seconds=joined.seconds,
        join_ranks_cpu_seconds=joined.ranks_cpu_seconds,
        num_asked=joined.num_asked,
        balance_max_over_mean=max(
            float(egress[ranks].max() / max(egress[ranks].mean(), 1.0)) for ranks in alike.values()
        ),
        egress_max_over_mean=float(egress.max() / egress.mean()),
        makespan_over_bound=flow.makespan(*flows) / flow.bound(*flows),
        num_flows=len(flows.nbytes),
        needed_bytes=traffic.needed_bytes,
        wire_bytes=wire_bytes,
        wire_over_needed=wire_bytes / traffic.needed_bytes,
    )


def _plan_samples(
    sources: Side, sinks: Side, joined: Joined, traffic: Traffic
) -> tuple[list[Planned], list[Planned]]:
    """What planning takes ranks of both sides: sinks spread over ranks and replicas, the source
    that most sinks ask, the one that sends most, and sources spread over ranks."""
    num_replicas, width = len(joined.slots), len(sinks.numbers)

    def plan(sink: int) -> tuple[Plan, list[bytes]]:
        replica, rank = divmod(sink, width)
        number = sinks.numbers[rank]
        return plan_sink(
            f"engine-{replica}/{rank}",
            sinks.layouts[number],
            joined.answers[number],
            joined.slots[replica],
            _BUCKET_BYTES,
        )

    planned_sinks = []
    for sink in spread(width * num_replicas, _NUM_SAMPLED):
        seconds, used, (found, told) = quickest(partial(plan, sink))
        answer = joined.answers[sinks.numbers[sink % width]]
        planned_sinks.append(
            Planned(seconds, used, len(answer) + sum(map(len, told)), _num_pieces(found.shares))
        )
    asked_of: defaultdict[int, list[int]] = defaultdict(list)
    egress: Counter[int] = Counter()
    for source, sink, nbytes in zip(*(column.tolist() for column in traffic.flows), strict=True):
        asked_of[source].append(sink)
        egress[source] += nbytes
    chosen = {max(asked_of, key=lambda rank: len(asked_of[rank])), egress.most_common(1)[0][0]}
    chosen.update(spread(len(sources.numbers), max(1, _NUM_SAMPLED - len(chosen))))
    names = [info.name for info in decode_found(joined.answers[0]).sources]
    planned_sources = []
    for rank in sorted(chosen):
        shares = []
        told = []
        for sink in asked_of[rank]:
            found, messages = plan(sink)
            for share, message in zip(found.shares, messages, strict=True):
                if share.source == names[rank]:
                    shares.append(share)
                    told.append(message)
        layout = sources.layouts[sources.numbers[rank]]
        seconds, used, described = quickest(partial(plan_source, names[rank], layout, told))
        planned_sources.append(
            Planned(seconds, used, len(described) + sum(map(len, told)), _num_pieces(shares))
        )
    return planned_sinks, planned_sources


def spread(number: int, most: int) -> list[int]:
    """At most `most` of the numbers below `number`, at equal distances, the first and last too."""
    if number <= most:
        return list(range(number))
    return sorted({round(k * (number - 1) / max(most - 1, 1)) for k in range(most)})


def _num_pieces(shares: Iterable[Share]) -> int:
    return sum(len(bucket.pieces) for share in shares for bucket in share.buckets)
