"""`streamsync plan`: the plan of one rank of a cluster that exists on paper."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamsync.config import Config
from streamsync.control.directory import Directory
from streamsync.layout.outline import Outline, outline, outline_digest
from streamsync.models.engine import engine_layout
from streamsync.models.model import read_model
from streamsync.models.parallelism import Parallelism
from streamsync.models.trainer import trainer_key, trainer_layout
from streamsync.plan.explain import explain
from streamsync.plan.plan import Rules
from streamsync.plan.planner import make_plan
from streamsync.plan.question import question

if TYPE_CHECKING:
    from pathlib import Path

    from streamsync.layout.region import Layout
    from streamsync.models.model import Model
    from streamsync.plan.holders import Holders
    from streamsync.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Options:
    """What the command was asked. `rank` counts the sinks of all replicas."""

    model: Path
    source: str
    sink: str
    rank: int
    explain: bool
    json: Path | None


def main(options: Options) -> int:
    """Plans and prints; raises the error that the rank itself would raise."""
    model = read_model(options.model)
    made = plan_rank(
        model, Parallelism.parse(options.source), Parallelism.parse(options.sink), options.rank
    )
    if options.json is not None:
        text = json.dumps(as_json(made), indent=2)
        if str(options.json) == "-":
            print(text)
        else:
            options.json.write_text(text + "\n")
    if options.explain or options.json is None:
        report = explain(made)
        print(
            report if options.explain else report.splitlines()[0],
            file=sys.stderr if str(options.json) == "-" else sys.stdout,
        )
    return 0


def plan_rank(model: Model, source: Parallelism, sink: Parallelism, rank: int) -> Plan:
    """The plan of sink `rank`, as it would be made among all the ranks of both sides."""
    layout = engine_layout(model, sink, rank)
    replica, own = divmod(rank, sink.replica_ranks)
    return make_plan(
        sink=f"engine{replica}/{own}",
        sink_layout=layout,
        holders=holders(model, source, layout),
        rules=Rules(),
        bucket_bytes=Config().bucket_bytes,
        slot=(replica, sink.replicas),
    )


def holders(model: Model, source: Parallelism, sink_layout: Layout) -> Holders:
    """What a hub would answer that sink: each different layout of the sources is made once."""
    directory = Directory()
    outlines: dict[tuple[int, ...], tuple[str, Outline]] = {}
    for rank in range(source.num_ranks):
        key = trainer_key(source, rank)
        if key not in outlines:
            content = outline(trainer_layout(model, source, rank))
            outlines[key] = outline_digest(content), content
        digest, content = outlines[key]
        if not directory.add(f"trainer/{rank}", rank, digest):
            directory.describe(content)
    return directory.holders(question(sink_layout, Rules()))


def as_json(plan: Plan) -> dict[str, Any]:
    """What `--json` writes."""
    return {
        "sink": plan.sink,
        "slot": list(plan.slot),
        "needed_bytes": plan.needed_bytes,
        "opaque_bytes": plan.opaque_bytes,
        "num_tensors": len(plan.tensors),
        "num_buckets": sum(len(share.buckets) for share in plan.shares),
        "num_pieces": sum(len(b.pieces) for share in plan.shares for b in share.buckets),
        "groups": list(plan.groups),
        "sources": [
            {
                "rank": share.source,
                "bytes": share.nbytes,
                "buckets": len(share.buckets),
                "tensors": len(share.tensors),
            }
            for share in plan.shares
        ],
    }
