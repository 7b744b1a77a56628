"""Any plan, executed with arrays, delivers exactly the source's content; any hole is refused."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamsync.errors import PlanError
from streamsync.layout.outline import Ranges, common_numbers, members_of, outline, products
from streamsync.layout.region import Box, Entry, Layout, TensorSpec, View
from streamsync.plan.check import check_share
from streamsync.plan.holders import holders_of
from streamsync.plan.plan import Plan, Rules
from streamsync.plan.planner import make_plan
from streamsync.plan.resolve import resolve

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


def execute(plan: Plan, sources, sink) -> list[np.ndarray]:
    """Runs every bucket through packed bytes; returns how often each sink element was written."""
    layout, storages = sink
    writes = [np.zeros(len(s), int) for s in storages]
    for share in plan.shares:
        source, held = sources[share.source]
        check_share(share)
        out = resolve(share, source, at_source=True)
        into = resolve(share, layout, at_source=False)
        for bucket, out_views, into_views in zip(share.buckets, out, into, strict=True):
            payload = np.full(bucket.nbytes, 0xEE, np.uint8)
            at = 0
            for piece, view in zip(bucket.pieces, out_views, strict=True):
                assert piece.offset == at
                data = strided(held[view.storage], view, piece.box.shape)
                data = np.ascontiguousarray(data).reshape(-1)
                payload[at : at + data.nbytes] = data.view(np.uint8)
                at += data.nbytes
            assert at == bucket.nbytes
            for piece, view in zip(bucket.pieces, into_views, strict=True):
                data = payload[piece.offset : piece.offset + 2 * piece.box.numel].view("uint16")
                data = data.reshape(piece.box.shape)
                strided(storages[view.storage], view, piece.box.shape)[...] = data
                strided(writes[view.storage], view, piece.box.shape)[...] += 1
    return writes


slots = st.integers(1, 5).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n)))


@settings(deadline=None, max_examples=25)
@given(jobs(), st.integers(1, 64) | st.just(1 << 20), slots)
def test_any_plan_delivers_every_byte_once(job, bucket_bytes: int, slot: tuple[int, int]) -> None:
    """Case 6, 22, 23, 24: any sharding, replication, stride, bucket size and slot gives the
    same."""
    specs, sources, (layout, storages) = job
    plan = make_plan(
        sink="engine0/0",
        sink_layout=layout,
        holders=holders_of({name: source for name, (source, _) in sources.items()}),
        rules=Rules(),
        bucket_bytes=bucket_bytes,
        slot=slot,
    )
    writes = execute(plan, sources, (layout, storages))
    needed = 0
    for entry in layout.entries:
        box, view = entry.box, entry.view
        index = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        got = strided(storages[view.storage], view, box.shape)
        np.testing.assert_array_equal(got, values(specs[entry.tensor])[index])
        assert (strided(writes[view.storage], view, box.shape) == 1).all()
        assert writes[view.storage].sum() == box.numel
        needed += 2 * box.numel
    shares = plan.shares
    assert plan.needed_bytes == needed == sum(share.nbytes for share in shares)
    for share in shares:
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
            make_plan(holders=holders_of(layouts), **arguments)
        assert caught.value.where["tensor"] == spec.name
    else:
        make_plan(holders=holders_of(layouts), **arguments)


def flat(sizes: list[int]) -> Layout:
    """Whole tensors of so many bytes, in layers of three."""
    specs = tuple(TensorSpec(f"layers.{i // 3}.w{i}", (n,), "uint8") for i, n in enumerate(sizes))
    return Layout(
        tensors=specs,
        entries=tuple(Entry(i, Box.whole(s.shape), View(i, 0, (1,))) for i, s in enumerate(specs)),
    )


def plan_flat(layout: Layout, sources: list[str], slot: tuple[int, int] = (0, 1)) -> Plan:
    return make_plan(
        sink="e/0",
        sink_layout=layout,
        holders=holders_of(dict.fromkeys(sources, layout)),
        rules=Rules(),
        bucket_bytes=16,
        slot=slot,
    )


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 5))
def test_replicas_share_the_bytes(sizes: list[int], num_sources: int) -> None:
    """No copy sends more than its part and one bucket, to one sink or to several; which copies
    there are is all that counts, not the order in which they are told."""
    layout = flat(sizes)
    names = [f"trainer/{k}" for k in range(num_sources)]
    plan = plan_flat(layout, names)
    assert max(share.nbytes for share in plan.shares) <= sum(sizes) / len(plan.shares) + 16
    assert plan_flat(layout, names[::-1]) == plan


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 4))
def test_sinks_that_one_copy_feeds_alone_share_its_buckets(
    sizes: list[int], num_copies: int, sinks_per_copy: int
) -> None:
    layout = flat(sizes)
    names = [f"trainer/{k}" for k in range(num_copies)]
    count = num_copies * sinks_per_copy
    fed_by: dict[str, list[int]] = {}
    for index in range(count):
        (share,) = plan_flat(layout, names, (index, count)).shares
        assert share.nbytes == sum(sizes)
        fed_by.setdefault(share.source, []).append(share.digest)
    assert {len(digests) for digests in fed_by.values()} == {sinks_per_copy}
    assert len({digest for digests in fed_by.values() for digest in digests}) == 1


number_sets = st.sets(st.integers(0, 6), min_size=1, max_size=5)


def ranges(numbers: set[int]) -> Ranges:
    (found,) = products([(n,) for n in numbers])
    return found[0]


@given(st.lists(st.tuples(number_sets, number_sets), min_size=2, max_size=2))
def test_common_numbers_are_those_of_both(sets: list[tuple[set[int], set[int]]]) -> None:
    """Against brute force."""
    a, b = ((ranges(i), ranges(j)) for i, j in sets)
    common = common_numbers(a, b)
    wanted = set(itertools.product(*sets[0])) & set(itertools.product(*sets[1]))
    found = set() if common is None else set(itertools.product(*map(members_of, common)))
    assert found == wanted


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a.{}.w.{}", "b.{}.w.{}"]),
            st.tuples(st.integers(0, 4), st.integers(0, 4)),
            st.sampled_from(["uint8", "int8"]),
            st.lists(st.sampled_from([Box((0,), (2,)), Box((2,), (2,))]), max_size=2, unique=True),
        ),
        unique_by=lambda item: item[:2],
        max_size=30,
    )
)
def test_an_outline_says_all_of_a_layout_but_the_places(tensors) -> None:
    """Names, shapes, dtypes and boxes come back from the records, each once."""
    specs, entries = [], []
    for number, (pattern, (i, j), dtype, boxes) in enumerate(tensors):
        name = pattern.replace("{}", str(i), 1).replace("{}", str(j), 1)
        specs.append(TensorSpec(name, (4,), dtype))
        entries += [Entry(number, box, View(number, 0, (1,))) for box in boxes]
    content = outline(Layout(tensors=tuple(specs), entries=tuple(entries)))
    told = [
        (TensorSpec(name, record.shape, record.dtype), record.boxes)
        for record in content.records
        for name in record.names()
    ]
    held = [
        (spec, tuple(sorted(boxes, key=lambda box: box.start)))
        for spec, (_, _, _, boxes) in zip(specs, tensors, strict=True)
    ]
    assert sorted(told, key=lambda t: t[0].name) == sorted(held, key=lambda t: t[0].name)
    assert len(content.records) <= len(specs)
