"""What vLLM's loaders did on every rank of real engines (tests/vllm/recordings), as sinks here."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch

from streamsync.layout.binding import Binding
from streamsync.layout.overlap import overlaps
from streamsync.layout.region import Box, Entry, Layout, View, contiguous_strides
from streamsync.plan.holders import holders_of
from streamsync.plan.plan import Rules
from streamsync.plan.planner import make_plan
from tests.vllm import recordings
from tests.vllm.models import CONFIGS, Cut, cuts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.vllm.recordings import Engine, Recorded

families = pytest.mark.parametrize("family", CONFIGS)


@cache
def recorded(family: str) -> Recorded:
    return recordings.read(family)


def boxes(layout: Layout) -> dict[str, list[Box]]:
    """The boxes of each tensor, in order."""
    found: dict[str, list[Box]] = {}
    for entry in layout.entries:
        found.setdefault(layout.tensors[entry.tensor].name, []).append(entry.box)
    return {name: sorted(them, key=lambda box: box.start) for name, them in found.items()}


@families
def test_recordings_are_of_these_models(family: str) -> None:
    """Write them again (tests/vllm/record.py) when a model here or vLLM changes."""
    assert recorded(family).config == CONFIGS[family]
    assert [engine.cut for engine in recorded(family).engines] == cuts(family)


@families
def test_ranks_of_an_engine_hold_the_model_together(family: str) -> None:
    """Cases 5, 7: every element of every tensor has a place on some rank of every engine, and no
    two elements have one place; pipeline stages share no layer."""
    for engine in recorded(family).engines:
        layouts = recorded(family).layouts(engine)
        seen = {x.name: torch.zeros(x.shape, dtype=torch.bool) for x in recorded(family).tensors}
        layers: list[set[str]] = [set() for _ in range(engine.pp)]
        for rank, layout in enumerate(layouts):
            num_storages = 1 + max(entry.view.storage for entry in layout.entries)
            storages = [torch.empty(1, device="meta") for _ in range(num_storages)]
            assert overlaps(Binding(layout=layout, storages=storages)) == []
            for name, them in boxes(layout).items():
                for box in them:
                    seen[name][tuple(map(slice, box.start, box.stop))] = True
                if ".layers." in name:
                    layers[rank // engine.tp].add(name.split(".")[2])
        assert all(mask.all() for mask in seen.values())
        assert sum(map(len, layers)) == len(set().union(*layers)) == 2


def expected(family: str, cut: Cut, rank: int) -> dict[str, Box]:
    """What a rank of vLLM holds, said once more by rule: the box of every tensor.

    Columns (rows of the matrix) of projections into heads and features, rows of those out of them;
    whole experts with expert parallelism; a vocabulary that is padded to 64 and then cut; KV heads
    that are repeated where there are fewer than ranks; everything else whole.
    """
    config = CONFIGS[family]
    stage, r = divmod(rank, cut.tp)
    first, last = stage == 0, stage == cut.pp - 1
    per_stage = config["num_hidden_layers"] // cut.pp
    experts = next((config[k] for k in EXPERTS if k in config), 0)
    found: dict[str, Box] = {}
    for spec in recorded(family).tensors:
        parts = spec.name.split(".")
        if "layers" in parts:
            here = int(parts[2]) // per_stage == stage
        elif family in EVERYWHERE:
            here = True
        elif "embed_tokens" in parts:
            here = first or (last and config["tie_word_embeddings"])
        else:
            here = last
        dim, num_parts, part = None, cut.tp, r
        if parts[-2] in ("q_proj", "gate_proj", "up_proj", "w1", "w3", "q_b_proj", "kv_b_proj"):
            dim = 0
        elif parts[-2] in ("o_proj", "down_proj", "w2"):
            dim = 1
        elif parts[-2] in ("k_proj", "v_proj"):
            dim, num_parts = 0, min(cut.tp, config["num_key_value_heads"])
            part = r * num_parts // cut.tp
        elif parts[-2] in ("embed_tokens", "lm_head"):
            dim = 0
        if "experts" in parts and cut.ep:
            dim = None
            here &= int(parts[parts.index("experts") + 1]) // (experts // cut.tp) == r
        if not here:
            continue
        start, shape = [0] * len(spec.shape), list(spec.shape)
        if dim is not None:
            rows = spec.shape[dim]
            padded = -(-rows // 64) * 64 if parts[-2] in ("embed_tokens", "lm_head") else rows
            size = padded // num_parts
            start[dim] = part * size
            shape[dim] = min(size, rows - start[dim])
        found[spec.name] = Box(tuple(start), tuple(shape))
    return found


EVERYWHERE = ("qwen3_moe", "mixtral")
"""Models of vLLM whose every stage holds the embedding, the last norm and the head."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@families
def test_every_rank_holds_what_the_rule_says(family: str) -> None:
    """Cases 3, 4, 7: never a part of a KV head, an expert's number is the global one, and every
    stage has its own layers; exactly these boxes on every rank of every engine."""
    for engine in recorded(family).engines:
        for rank, layout in enumerate(recorded(family).layouts(engine)):
            wanted = {name: [box] for name, box in expected(family, engine.cut, rank).items()}
            assert boxes(layout) == wanted, (engine.cut, rank)


# ---- as sinks


def random_sources(family: str, seed: int) -> dict[str, Layout]:
    """The checkpoint over three ranks: every tensor cut anywhere along a dim, or replicated."""
    draw = random.Random(seed)
    tensors = recorded(family).tensors
    held: list[list[Entry]] = [[], [], []]
    for number, spec in enumerate(tensors):
        dim = draw.randrange(len(spec.shape))
        at = sorted(draw.randint(0, spec.shape[dim]) for _ in range(2))
        ends = [0, *at, spec.shape[dim]] if draw.random() < 0.8 else None
        for rank, entries in enumerate(held):
            box = Box.whole(spec.shape)
            if ends is not None:
                start, shape = list(box.start), list(box.shape)
                start[dim], shape[dim] = ends[rank], ends[rank + 1] - ends[rank]
                box = Box(tuple(start), tuple(shape))
            if box.numel:
                view = View(number, 0, contiguous_strides(box.shape))
                entries.append(Entry(number, box, view))
    return {
        f"trainer/{rank}": Layout(tensors=tensors, entries=tuple(entries))
        for rank, entries in enumerate(held)
    }


def overlapping(sources: dict[str, Layout], sink: Layout) -> dict[str, Layout]:
    """What a sink rank learns of its sources: the tensors that it needs something of."""
    needed = {spec.name for spec in sink.tensors}
    return {
        rank: Layout(
            tensors=tuple(spec for spec in layout.tensors if spec.name in needed),
            entries=tuple(
                Entry(numbers[e.tensor], e.box, e.view)
                for e in layout.entries
                if e.tensor in numbers
            ),
        )
        for rank, layout in sources.items()
        for known in [[n for n, spec in enumerate(layout.tensors) if spec.name in needed]]
        for numbers in [{n: i for i, n in enumerate(known)}]
    }


def sampled(family: str) -> Iterator[tuple[Engine, int, Layout]]:
    """A rank of each engine, another one for each."""
    for number, engine in enumerate(recorded(family).engines):
        rank = (3 * number + 1) % len(engine.ranks)
        yield engine, rank, recorded(family).layouts(engine)[rank]


@families
def test_any_cut_of_the_checkpoint_reaches_vllm(family: str) -> None:
    """Planned from sources cut at random, every byte that a rank holds comes once, from a source
    that has it."""
    for number, (engine, rank, sink) in enumerate(sampled(family)):
        sources = overlapping(random_sources(family, number), sink)
        plan = make_plan(
            sink=f"engine/{rank}",
            sink_layout=sink,
            holders=holders_of(sources),
            rules=Rules(),
            bucket_bytes=10_000,
        )
        came = {x.name: torch.zeros(x.shape, dtype=torch.uint8) for x in sink.tensors}
        for share in plan.shares:
            held = boxes(sources[share.source])
            for bucket in share.buckets:
                for piece in bucket.pieces:
                    name = share.tensors[piece.tensor].name
                    assert any(box.contains(piece.box) for box in held[name])
                    came[name][tuple(map(slice, piece.box.start, piece.box.stop))] += 1
        wanted = {x.name: torch.zeros(x.shape, dtype=torch.uint8) for x in sink.tensors}
        for name, them in boxes(sink).items():
            for box in them:
                wanted[name][tuple(map(slice, box.start, box.stop))] = 1
        assert all(torch.equal(came[name], wanted[name]) for name in wanted), (engine.cut, rank)
        needed_bytes = sum(int(wanted[x.name].sum()) * x.itemsize for x in sink.tensors)
        assert sum(share.nbytes for share in plan.shares) == needed_bytes
