"""Any plan, executed with arrays, delivers exactly the source's content; any hole is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamsync.errors import PlanError
from streamsync.layout.region import Box, Entry, Layout, TensorSpec, View
from streamsync.plan.check import check_share
from streamsync.plan.plan import Piece, Plan, Rules
from streamsync.plan.planner import make_plan

NAMES = [
    "model.embed.weight",
    "model.layers.0.a.weight",
    "model.layers.0.b.weight",
    "model.layers.1.a.weight",
    "head.weight",
]


def strided(array: np.ndarray, view: View, shape: tuple[int, ...]) -> np.ndarray:
    """The view of a storage, as numpy sees it."""
    size = array.itemsize
    strides = [step * size for step in view.strides]
    return np.ndarray(shape, array.dtype, array.data, view.offset * size, strides)


def values(spec: TensorSpec) -> np.ndarray:
    """A tensor whose every element is unlike all others."""
    first = 1 + 10_000 * NAMES.index(spec.name)
    numel = math.prod(spec.shape)
    return np.arange(first, first + numel, dtype="uint16").reshape(spec.shape)


@st.composite
def slabs(draw: st.DrawFn, box: Box) -> list[Box]:
    """`box` as disjoint boxes: cut at random places along random dims, empty ones included."""
    if not box.shape or not draw(st.booleans()):
        return [box]
    dim = draw(st.integers(0, len(box.shape) - 1))
    at = draw(st.integers(0, box.shape[dim]))
    parts = []
    for a, n in ((0, at), (at, box.shape[dim] - at)):
        start = (*box.start[:dim], box.start[dim] + a, *box.start[dim + 1 :])
        parts += draw(slabs(Box(start, (*box.shape[:dim], n, *box.shape[dim + 1 :]))))
    return parts


@st.composite
def memory(draw: st.DrawFn, shape: tuple[int, ...], storage: int) -> tuple[View, int]:
    """A view of `shape` in a storage of its own (dims in any order, with gaps), and its size."""
    order = draw(st.permutations(range(len(shape))))
    offset = draw(st.integers(0, 3))
    strides = [0] * len(shape)
    step = draw(st.integers(1, 2))
    for d in order:
        strides[d] = step
        step = step * max(shape[d], 1) + draw(st.integers(0, 1))
    reach = sum((max(n, 1) - 1) * s for n, s in zip(shape, strides, strict=True))
    return View(storage, offset, tuple(strides)), offset + reach + 1


@st.composite
def rank(draw: st.DrawFn, specs: list[TensorSpec], held: list[tuple[int, Box]]):
    """The layout of a rank that holds `held`, and its storages, which are all zeros."""
    entries, storages = [], []
    for tensor, box in held:
        view, numel = draw(memory(box.shape, len(storages)))
        entries.append(Entry(tensor, box, view))
        storages.append(np.zeros(numel, "uint16"))
    return Layout(tensors=tuple(specs), entries=tuple(entries)), storages


@st.composite
def jobs(draw: st.DrawFn):
    """(specs, sources, sink): every tensor is covered by each of one or two sets of sources."""
    shape = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    specs = [TensorSpec(name, draw(shape), "uint16") for name in names]
    ranks = [f"trainer/{k}" for k in range(draw(st.integers(1, 4)))]
    held: dict[str, list[tuple[int, Box]]] = {name: [] for name in ranks}
    needed: list[tuple[int, Box]] = []
    for i, spec in enumerate(specs):
        for _ in range(draw(st.integers(1, 2))):
            for box in draw(slabs(Box.whole(spec.shape))):
                item = (i, box)
                name = draw(st.sampled_from(ranks))
                if item not in held[name]:
                    held[name].append(item)
        needed += [(i, box) for box in draw(slabs(Box.whole(spec.shape))) if draw(st.booleans())]
    sources = {name: draw(rank(specs, held[name])) for name in ranks}
    for layout, storages in sources.values():
        for entry in layout.entries:
            spec, box = specs[entry.tensor], entry.box
            index = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
            strided(storages[entry.view.storage], entry.view, box.shape)[...] = values(spec)[index]
    return specs, sources, draw(rank(specs, needed))


def wire(piece: Piece, storages: list[np.ndarray]) -> np.ndarray:
    return strided(storages[piece.view.storage], piece.view, piece.box.shape)


def execute(plan: Plan, sources, storages: list[np.ndarray]) -> list[np.ndarray]:
    """Runs every bucket through packed bytes; returns how often each sink element was written."""
    writes = [np.zeros(len(s), int) for s in storages]
    for out, into in zip(plan.source_shares, plan.sink_shares, strict=True):
        assert out.digest == into.digest
        for packed, landed in zip(out.buckets, into.buckets, strict=True):
            payload = np.full(packed.nbytes, 0xEE, np.uint8)
            at = 0
            for piece in packed.pieces:
                assert piece.offset == at
                data = np.ascontiguousarray(wire(piece, sources[out.source][1])).reshape(-1)
                payload[at : at + data.nbytes] = data.view(np.uint8)
                at += data.nbytes
            assert at == packed.nbytes
            for piece in landed.pieces:
                data = payload[piece.offset : piece.offset + 2 * piece.box.numel].view("uint16")
                wire(piece, storages)[...] = data.reshape(piece.box.shape)
                wire(piece, writes)[...] += 1
    return writes


@settings(deadline=None, max_examples=25)
@given(jobs(), st.integers(1, 64) | st.just(1 << 20))
def test_any_plan_delivers_every_byte_once(job, bucket_bytes: int) -> None:
    """Case 6, 22, 23, 24: any sharding, replication, stride and bucket size gives the same."""
    specs, sources, (layout, storages) = job
    plan = make_plan(
        sink="engine0/0",
        sink_layout=layout,
        sources={name: source for name, (source, _) in sources.items()},
        rules=Rules(),
        bucket_bytes=bucket_bytes,
    )
    writes = execute(plan, sources, storages)
    needed = 0
    for entry in layout.entries:
        box, view = entry.box, entry.view
        index = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        got = strided(storages[view.storage], view, box.shape)
        np.testing.assert_array_equal(got, values(specs[entry.tensor])[index])
        assert (strided(writes[view.storage], view, box.shape) == 1).all()
        assert writes[view.storage].sum() == box.numel
        needed += 2 * box.numel
    shares = plan.source_shares
    assert plan.needed_bytes == needed == sum(share.nbytes for share in shares)
    for share in shares:
        check_share(share, sources[share.source][0])
        order = [plan.groups.index(share.groups[b.group]) for b in share.buckets]
        assert order == sorted(order)
        assert all(b.nbytes <= max(bucket_bytes, 2) for b in share.buckets)


@settings(deadline=None, max_examples=15)
@given(jobs(), st.data())
def test_any_hole_is_refused_by_name(job, data: st.DataObject) -> None:
    """Case 5: without one source entry, either others hold its bytes or its tensor is named."""
    specs, sources, (layout, _) = job
    layouts = {name: source for name, (source, _) in sources.items()}
    every = [(name, k) for name, lay in layouts.items() for k in range(len(lay.entries))]
    name, k = data.draw(st.sampled_from(every))
    entries = layouts[name].entries
    lost = entries[k]
    layouts[name] = Layout(tensors=layouts[name].tensors, entries=entries[:k] + entries[k + 1 :])
    spec = specs[lost.tensor]
    count = np.zeros(spec.shape, int)
    for source in layouts.values():
        for entry in source.entries:
            if entry.tensor == lost.tensor:
                box = entry.box
                count[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] += 1
    hole = any(
        (count[tuple(slice(a, b) for a, b in zip(e.box.start, e.box.stop, strict=True))] == 0).any()
        for e in layout.entries
        if e.tensor == lost.tensor
    )
    arguments = {"sink": "e/0", "sink_layout": layout, "rules": Rules(), "bucket_bytes": 64}
    if hole:
        with pytest.raises(PlanError, match=spec.name) as caught:
            make_plan(sources=layouts, **arguments)
        assert caught.value.where["tensor"] == spec.name
    else:
        make_plan(sources=layouts, **arguments)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 5))
def test_replicas_share_the_bytes(sizes: list[int], num_sources: int) -> None:
    """No source sends more than the mean plus one largest piece."""
    specs = tuple(TensorSpec(f"t{i}.w", (n,), "uint8") for i, n in enumerate(sizes))
    layout = Layout(
        tensors=specs,
        entries=tuple(Entry(i, Box.whole(s.shape), View(i, 0, (1,))) for i, s in enumerate(specs)),
    )
    names = [f"trainer/{k}" for k in range(num_sources)]
    plan = make_plan(
        sink="e/0",
        sink_layout=layout,
        sources=dict.fromkeys(names, layout),
        rules=Rules(),
        bucket_bytes=1 << 20,
    )
    most = max(share.nbytes for share in plan.source_shares)
    assert most <= sum(sizes) / num_sources + max(sizes)
    backwards = make_plan(
        sink="e/0",
        sink_layout=layout,
        sources=dict.fromkeys(reversed(names), layout),
        rules=Rules(),
        bucket_bytes=1 << 20,
    )
    assert backwards == plan
