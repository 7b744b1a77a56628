"""What `streamsync bench plan --json` writes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from streamsync.bench.result import Machine


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster: a model, a trainer that cuts it one way and engines that cut it another.

    A rank's planning is all of it, with what it decodes and encodes. A sink: the question made, the
    hub's answer decoded, the plan, its shares encoded for the sources and found in its own layout.
    A source: its outline made and encoded, every share that sinks ask of it decoded, checked and
    found in its layout. `rank_seconds` is the worst rank of those sampled on both sides, of which
    each planned `repeats` times and counts with its quickest; `num_pieces` and
    `metadata_bytes_per_rank` (all that it sends and receives to plan) are the largest.

    The hub ran in a process of its own; every rank joined it and asked over a CURVE socket.
    `cluster_join_seconds` run from the first connect to the last answer and share this machine's
    cores with the processes that acted for the ranks (`join_ranks_cpu_seconds`);
    `hub_seconds_total` are the hub's CPU seconds, `hub_peak_bytes` what its memory grew by.

    All sinks of the cluster together: `balance_max_over_mean` compares, in each set of sources that
    hold the same, the rank that sends most with the set's mean, and is the worst set's (1 where
    nobody is replicated). `egress_max_over_mean` does so for all sources: pipeline stages hold
    unequal parts of a model, which no choice among replicas can level. `makespan_over_bound`: all
    flows at once, by `flow.makespan`, over `flow.bound`. `wire_over_needed` is exact.
    """

    model: str
    source: str
    sink: str
    num_tensors: int
    source_ranks: int
    sink_ranks: int
    rank_seconds: float
    rank_cpu_seconds: float
    sink_rank_seconds: float
    source_rank_seconds: float
    sampled_sinks: int
    sampled_sources: int
    repeats: int
    num_pieces: int
    metadata_bytes_per_rank: int
    answer_bytes: int
    hub_seconds_total: float
    hub_peak_bytes: int
    cluster_join_seconds: float
    join_ranks_cpu_seconds: float
    num_asked: int
    balance_max_over_mean: float
    egress_max_over_mean: float
    makespan_over_bound: float
    num_flows: int
    needed_bytes: int
    wire_bytes: int
    wire_over_needed: float


class PlanResult(msgspec.Struct, frozen=True, kw_only=True):
    """`load_average` is the machine's over one minute, before the first row and after the last:
    above 1 others used its cores, and seconds by the clock say less."""

    rows: Sequence[PlanRow]
    bucket_bytes: int
    note: str
    load_average: tuple[float, float]
    machine: Machine
    versions: dict[str, str]
    commit: str
    date: str
