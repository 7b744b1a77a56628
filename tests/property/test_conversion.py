"""Conversions by geometry, and whole plans of them: any cut on either side gives the same bytes."""

from __future__ import annotations

from itertools import pairwise, product

import torch
from hypothesis import given
from hypothesis import strategies as st

from streamsync.digest.compiled import compile_bucket
from streamsync.layout.region import Box
from streamsync.plan.conversion import Conversion, QuantRule
from streamsync.plan.holders import holders_of
from streamsync.plan.plan import Rules
from streamsync.plan.planner import make_plan
from streamsync.plan.resolve import resolve
from streamsync.stages.copies import prepare_copies
from streamsync.stages.wide import stage_wide
from tests.fp8_reference import reference
from tests.shards import Rank


def boxes_in(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    """Boxes of a tensor that are not empty."""
    cuts = [
        st.tuples(st.integers(0, n - 1), st.integers(1, n)).map(
            lambda p: (min(p[0], p[1] - 1), max(p[0] + 1, p[1]))
        )
        for n in shape
    ]
    return st.tuples(*cuts).map(
        lambda dims: Box(tuple(a for a, _ in dims), tuple(z - a for a, z in dims))
    )


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(a, z) for a, z in zip(box.start, box.stop, strict=True))))


@st.composite
def geometries(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = draw(st.lists(st.integers(1, 9), min_size=2, max_size=3).map(tuple))
    block = tuple(min(draw(st.integers(1, 5)), n) for n in shape[-2:])
    return shape, (1,) * (len(shape) - 2) + block


@given(st.data(), geometries())
def test_a_piece_is_made_of_exactly_the_blocks_that_it_touches(
    data: st.DataObject, geometry: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    shape, block = geometry
    values = Conversion("values", shape, block)
    piece = data.draw(boxes_in(shape))
    touched = {tuple(i // b for i, b in zip(e, block, strict=True)) for e in elements(piece)}
    assert elements(values.blocks(piece)) == touched
    needed = elements(values.source_box(piece))
    assert needed == {
        e
        for e in elements(Box.whole(shape))
        if tuple(i // b for i, b in zip(e, block, strict=True)) in touched
    }
    scales = Conversion("scales", shape, block)
    assert scales.source_box(values.blocks(piece)) == values.source_box(piece)


@given(st.data(), geometries())
def test_a_shard_can_make_exactly_the_blocks_that_it_holds_whole(
    data: st.DataObject, geometry: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    shape, block = geometry
    values = Conversion("values", shape, block)
    held = data.draw(boxes_in(shape))
    whole = {
        index
        for index in elements(Box.whole(values.grid))
        if elements(values.elements(Box(index, (1,) * len(index)))) <= elements(held)
    }
    found = values.whole_blocks(held)
    assert (set() if found is None else elements(found)) == whole


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_scales_of_rows_may_lack_their_last_dim(
    rows: int, columns: int, data: st.DataObject
) -> None:
    scales = Conversion("scales", (rows, columns), (1, columns))
    assert scales.wire_shapes == ((rows, 1), (rows,))
    box = data.draw(boxes_in((rows,)))
    wide = Box((*box.start, 0), (*box.shape, 1))
    assert scales.source_box(box) == scales.source_box(wide)
    assert scales.wire_box(wide, 1) == box


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """The whole of a matrix, cut into a grid at random."""
    dims = []
    for n in shape:
        inner = draw(st.sets(st.integers(1, n - 1), max_size=2)) if n > 1 else set()
        dims.append(sorted({0, n, *inner}))
    (rows, columns) = dims
    return [Box((a, c), (b - a, d - c)) for a, b in pairwise(rows) for c, d in pairwise(columns)]


def holding(name: str, shape: tuple[int, ...], dtype: torch.dtype, boxes: list[Box]) -> Rank:
    rank = Rank()
    rank.add(name, shape, dtype, boxes)
    return rank


@given(st.data())
def test_any_cut_on_either_side_gives_the_reference(data: st.DataObject) -> None:
    """Case 6, 19: every fp8 byte and every scale of every sink equals the whole-tensor reference,
    whatever the cuts, the replicas and the bucket size; each byte needed travels once."""
    shape = data.draw(st.tuples(st.integers(1, 14), st.integers(1, 14)))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    rule = data.draw(
        st.one_of(
            st.builds(
                QuantRule, block=st.tuples(st.integers(1, 6), st.integers(1, 6)), scale=st.just("s")
            ),
            st.just(QuantRule(scheme="fp8_channel", scale="s")),
        )
    )
    block = rule.block_of(shape)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    values, scales = reference(whole, block)
    wanted = {"a.w": values, "s": scales}

    held = data.draw(cuts(shape))
    sources = {}
    for replica in range(data.draw(st.integers(1, 2))):
        for number, box in enumerate(held):
            rank = holding("a.w", shape, dtype, [box])
            rank.fill({"a.w": whole})
            sources[f"t/{number + len(held) * replica}"] = rank
    mine = data.draw(st.lists(st.sampled_from(data.draw(cuts(shape))), min_size=1, unique=True))
    sink = holding("a.w", shape, torch.float8_e4m3fn, mine)
    grid = tuple(scales.shape)
    sink.add("s", grid, torch.float32, data.draw(st.just([Box.whole(grid)])))
    bindings = {name: rank.binding() for name, rank in sources.items()}
    bound = sink.binding()
    plan = make_plan(
        sink="e/0",
        sink_layout=bound.layout,
        holders=holders_of({name: b.layout for name, b in bindings.items()}),
        rules=Rules(quantise=(rule,)),
        bucket_bytes=data.draw(st.sampled_from([1, 7, 64, 1 << 20])),
    )
    staged = stage_wide(plan, bound)
    moved = 0
    for share in plan.shares:
        source = bindings[share.source]
        gathers = prepare_copies(
            share, resolve(share, source.layout, at_source=True), source, at_source=True
        )
        scatters = prepare_copies(
            share, resolve(share, staged.layout, at_source=False), staged, at_source=False
        )
        for bucket, gather, scatter in zip(share.buckets, gathers, scatters, strict=True):
            payload = torch.full((bucket.nbytes,), 0xAA, dtype=torch.uint8)
            gather.gather(payload)
            scatter.scatter(payload)
            digest = compile_bucket(share, bucket)
            loaded = scatter.loaded_digest(digest, torch.empty_like(payload))
            assert loaded == digest.run(payload.numpy())
            moved += bucket.nbytes
    for landing in staged.landings:
        landing.land()
    assert sink.wrong(wanted) == []
    assert all(rank.wrong({"a.w": whole}) == [] for rank in sources.values())
    assert moved == plan.needed_bytes
    if not plan.wide:
        assert moved == sum(box.numel for box in mine) + 4 * scales.numel()
