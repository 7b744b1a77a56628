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
from streamsync.plan.plan import Rules
from streamsync.plan.planner import make_plan
from tests.vllm import recordings
from tests.vllm.models import CONFIGS, cuts

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


@families
def test_key_heads_are_never_cut(family: str) -> None:
    """Case 3: with fewer KV heads than ranks each rank has a whole one, so that ranks share it."""
    config = CONFIGS[family]
    heads, dim = config["num_key_value_heads"], config["head_dim"]
    for engine in recorded(family).engines:
        layouts = recorded(family).layouts(engine)
        for layout in layouts:
            for name, them in boxes(layout).items():
                if name.endswith(("k_proj.weight", "v_proj.weight")):
                    (box,) = them
                    assert box.shape[0] == max(1, heads // engine.tp) * dim
                    assert box.start[0] % dim == 0


@families
def test_experts_go_whole_with_expert_parallelism(family: str) -> None:
    """Case 4: rank r has the experts from r * per_rank on, whole; without it a slice of all."""
    for engine in recorded(family).engines:
        for rank, layout in enumerate(recorded(family).layouts(engine)):
            experts = {
                (int(name.split(".experts.")[1].split(".")[0]), box.shape == spec.shape)
                for spec in layout.tensors
                if ".experts." in (name := spec.name)
                for box in boxes(layout)[name]
            }
            if not experts:
                continue
            config = CONFIGS[family]
            total = config.get("num_experts") or config.get("num_local_experts")
            total = total or config["n_routed_experts"]
            per_rank = total // engine.tp if engine.ep else total
            first = rank % engine.tp * per_rank if engine.ep else 0
            assert {number for number, _ in experts} == set(range(first, first + per_rank))
            assert {whole for _, whole in experts} == {engine.ep or engine.tp == 1}


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
            sources=sources,
            rules=Rules(),
            bucket_bytes=10_000,
        )
        came = {x.name: torch.zeros(x.shape, dtype=torch.uint8) for x in sink.tensors}
        for share in plan.sink_shares:
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
        assert sum(share.nbytes for share in plan.sink_shares) == needed_bytes
