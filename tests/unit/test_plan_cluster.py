"""Plans of all sinks of a cluster together: level egress, few sessions, buckets in common."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from streamsync.layout.region import Box, Entry, Layout, TensorSpec, View, contiguous_strides
from streamsync.plan.holders import holders_of
from streamsync.plan.plan import Plan, Rules
from streamsync.plan.planner import make_plan

NUM_LAYERS = 8
BUCKET_BYTES = 1 << 10


def model() -> list[tuple[int, TensorSpec, int | None]]:
    """(layer, tensor, dim that tensor parallelism cuts), of about 1 MiB."""
    found: list[tuple[int, TensorSpec, int | None]] = [
        (0, TensorSpec("model.embed_tokens.weight", (512, 64), "bfloat16"), 0)
    ]
    for i in range(NUM_LAYERS):
        at = f"model.layers.{i}"
        found += [
            (i, TensorSpec(f"{at}.input_layernorm.weight", (64,), "bfloat16"), None),
            (i, TensorSpec(f"{at}.self_attn.q_proj.weight", (64, 64), "bfloat16"), 0),
            (i, TensorSpec(f"{at}.self_attn.o_proj.weight", (64, 64), "bfloat16"), 1),
            (i, TensorSpec(f"{at}.mlp.up_proj.weight", (512, 64), "bfloat16"), 0),
            (i, TensorSpec(f"{at}.mlp.down_proj.weight", (64, 512), "bfloat16"), 1),
        ]
    last = NUM_LAYERS - 1
    found.append((last, TensorSpec("lm_head.weight", (512, 64), "bfloat16"), 0))
    return found


def shard(tp: int, num_tp: int, stage: int = 0, num_stages: int = 1) -> Layout:
    """What a rank of tensor and pipeline parallelism holds; it lists no more than that."""
    tensors = []
    entries = []
    for layer, spec, dim in model():
        if layer * num_stages // NUM_LAYERS != stage:
            continue
        start, shape = [0] * len(spec.shape), list(spec.shape)
        if dim is not None:
            shape[dim] //= num_tp
            start[dim] = tp * shape[dim]
        box = Box(tuple(start), tuple(shape))
        entries.append(Entry(len(tensors), box, View(0, 0, contiguous_strides(box.shape))))
        tensors.append(spec)
    return Layout(tensors=tuple(tensors), entries=tuple(entries))


def trainer(num_tp: int, num_stages: int, num_copies: int) -> dict[str, Layout]:
    return {
        f"trainer/{(stage * num_copies + copy) * num_tp + tp}": shard(tp, num_tp, stage, num_stages)
        for stage in range(num_stages)
        for copy in range(num_copies)
        for tp in range(num_tp)
    }


def plans(sources: dict[str, Layout], num_tp: int, num_replicas: int) -> dict[str, Plan]:
    holders = holders_of(sources)
    return {
        f"engine-{replica}/{tp}": make_plan(
            sink=f"engine-{replica}/{tp}",
            sink_layout=shard(tp, num_tp),
            holders=holders,
            rules=Rules(),
            bucket_bytes=BUCKET_BYTES,
            slot=(replica, num_replicas),
        )
        for replica in range(num_replicas)
        for tp in range(num_tp)
    }


def worst_ratio(sources: dict[str, Layout], egress: Counter[str]) -> float:
    """The most that a rank sends, over the mean of those that hold the same."""
    alike: defaultdict[object, list[int]] = defaultdict(list)
    for rank, layout in sources.items():
        alike[layout.tensors, layout.entries].append(egress[rank])
    return max(max(sent) * len(sent) / sum(sent) for sent in alike.values())


@pytest.mark.parametrize(("num_tp", "num_replicas"), [(16, 1), (4, 2), (8, 3), (2, 8)])
def test_copies_of_a_shard_send_equally_much(num_tp: int, num_replicas: int) -> None:
    """Trainers of TP8, PP4 and DP4; the first holder of everything would send 4 times the mean."""
    sources = trainer(8, 4, 4)
    egress: Counter[str] = Counter()
    for plan in plans(sources, num_tp, num_replicas).values():
        assert plan.needed_bytes == sum(share.nbytes for share in plan.shares)
        for share in plan.shares:
            egress[share.source] += share.nbytes
    assert worst_ratio(sources, egress) <= 1.05
    first = Counter({rank: egress[rank] * (int(rank[8:]) % 32 < 8) for rank in sources})
    assert worst_ratio(sources, first) > 3.9


def test_many_replicas_hold_few_sessions() -> None:
    """A sink needs 4 stages of one shard, of which there are 16 copies each."""
    sources = trainer(2, 4, 16)
    for plan in plans(sources, 2, 16).values():
        assert len(plan.shares) == 4


def test_replicas_that_one_rank_feeds_have_their_buckets_in_common() -> None:
    sources = trainer(2, 2, 3)
    digests: defaultdict[str, list[int]] = defaultdict(list)
    for plan in plans(sources, 2, 6).values():
        for share in plan.shares:
            digests[share.source].append(share.digest)
    assert {len(found) for found in digests.values()} == {2}
    assert {len(set(found)) for found in digests.values()} == {1}


def test_early_layers_come_from_every_copy() -> None:
    """A lone sink that takes from four copies does not wait for one of them with each layer."""
    sources = trainer(1, 1, 4)
    (plan,) = plans(sources, 1, 1).values()
    assert len(plan.shares) == 4
    first = plan.groups[1]
    for share in plan.shares:
        of_first = sum(b.nbytes for b in share.buckets if share.groups[b.group] == first)
        assert of_first == pytest.approx(share.nbytes / 9, rel=0.5)
