"""Random loaders: what a recording copies is what the loader copies."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from streamsync.layout.overlap import count_elements, have_common
from streamsync.layout.recorder import record_loader
from streamsync.layout.region import TensorSpec, View


@st.composite
def chains(draw: st.DrawFn, shape: tuple[int, ...], *, copies: bool) -> list[tuple[object, ...]]:
    """Operations that apply to a tensor of `shape` one after the other."""
    probe = torch.empty(shape, device="meta")
    chain: list[tuple[object, ...]] = []
    kinds = ["slice", "permute", "unflatten", "flatten", *(["clone", "cast"] if copies else [])]
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(kinds))
        if kind == "permute":
            step = kind, tuple(draw(st.permutations(range(probe.ndim))))
        elif kind == "slice":
            dim = draw(st.integers(0, probe.ndim - 1))
            begin = draw(st.integers(0, probe.shape[dim] - 1))
            step = kind, dim, begin, draw(st.integers(begin + 1, probe.shape[dim]))
        elif kind == "unflatten":
            dim = draw(st.integers(0, probe.ndim - 1))
            outer = draw(st.sampled_from([k for k in range(1, 7) if probe.shape[dim] % k == 0]))
            step = kind, dim, (outer, probe.shape[dim] // outer)
        elif kind == "flatten":
            step = (kind, probe.is_contiguous())
        else:
            step = (kind,)
        probe = apply(probe, step)
        chain.append(step)
    return chain


def apply(tensor: torch.Tensor, step: tuple[object, ...]) -> torch.Tensor:
    kind, *options = step
    if kind == "permute":
        return tensor.permute(*options)
    if kind == "slice":
        dim, begin, end = options
        return tensor.narrow(dim, begin, end - begin)
    if kind == "unflatten":
        return tensor.unflatten(*options)
    if kind == "flatten":
        return tensor.view(-1) if options[0] else tensor
    return tensor.clone() if kind == "clone" else tensor.double().float()


def through(tensor: torch.Tensor, chain: list[tuple[object, ...]]) -> torch.Tensor:
    for step in chain:
        tensor = apply(tensor, step)
    return tensor


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@given(st.data())
def test_recorded_copies_equal_the_loaders(data: st.DataObject) -> None:
    module = nn.Module()
    shape = data.draw(shapes)
    module.p = nn.Parameter(torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape))
    target_chain = data.draw(chains(shape, copies=False))
    target_shape = tuple(through(module.p.data, target_chain).shape)
    # A checkpoint tensor that has the target's shape after some operations undone.
    pad = data.draw(st.integers(0, 2))
    order = data.draw(st.permutations(range(len(target_shape))))
    shape_in_file = tuple(target_shape[d] + pad for d in order)
    back = tuple(order.index(d) for d in range(len(target_shape)))
    more = data.draw(chains(shape_in_file, copies=True))
    reshaping = not any(step[0] in ("slice", "permute", "unflatten", "flatten") for step in more)

    def load(weights: object) -> None:
        for _, weight in weights:
            if reshaping:
                weight = through(weight, more)
            weight = weight.permute(back)
            for dim, n in enumerate(target_shape):
                weight = weight.narrow(dim, pad // 2, n)
            through(module.p.data, target_chain).copy_(weight)

    before = module.p.detach().clone()
    spec = TensorSpec("w", shape_in_file, "float32")
    recording = record_loader(module, {"w": spec}, load)
    assert torch.equal(module.p, before)
    assert recording.opaque == {}

    weight = -torch.arange(1.0, 1 + torch.Size(shape_in_file).numel()).reshape(shape_in_file)
    load([("w", weight)])
    expected = module.p.detach().clone()
    with torch.no_grad():
        module.p.copy_(before)
    for entry in recording.binding.layout.entries:
        where = tuple(slice(a, b) for a, b in zip(entry.box.start, entry.box.stop, strict=True))
        recording.binding.view(entry.view, entry.box.shape, torch.float32).copy_(weight[where])
    assert torch.equal(module.p, expected)
    untouched = int((module.p == before).sum())
    assert recording.unwritten == ({"p": untouched} if untouched else {})


@st.composite
def boxes(draw: st.DrawFn) -> tuple[slice, slice]:
    spans = []
    for n in ROWS, COLUMNS:
        begin = draw(st.integers(0, n - 1))
        spans.append(slice(begin, draw(st.integers(begin + 1, n))))
    return spans[0], spans[1]


ROWS, COLUMNS = 4, 5
steps = st.lists(st.tuples(boxes(), st.sampled_from(["a", "b", "c", "constant"])), max_size=6)


@given(steps)
def test_copies_and_fills_in_any_order_deliver_what_a_fresh_load_gives(
    steps: list[tuple[tuple[slice, slice], str]],
) -> None:
    """Whatever the order makes of it (plain, opaque, padding): the second load is like the first
    one of another module, and every element is accounted for once."""

    def load_into(module: nn.Module, weights: object) -> None:
        # In the loader's own order, with the tensors that it got.
        got = dict(weights)
        for box, name in steps:
            if name == "constant":
                module.p.data[box].fill_(-1.0)
            elif name in got:
                module.p.data[box].copy_(got[name][box])

    def fresh() -> nn.Module:
        module = nn.Module()
        module.p = nn.Parameter(torch.zeros(ROWS, COLUMNS))
        return module

    def checkpoint() -> dict[str, torch.Tensor]:
        return {name: torch.randn(ROWS, COLUMNS) for name in "abc"}

    module, expected = fresh(), fresh()
    specs = {name: TensorSpec(name, (ROWS, COLUMNS), "float32") for name in "abc"}
    first, second = checkpoint(), checkpoint()
    load_into(module, first.items())
    load_into(expected, second.items())
    recording = record_loader(module, specs, lambda weights: load_into(module, weights))
    layout = recording.binding.layout
    for entry in layout.entries:
        where = tuple(slice(a, b) for a, b in zip(entry.box.start, entry.box.stop, strict=True))
        view = recording.binding.view(entry.view, entry.box.shape, torch.float32)
        view.copy_(second[layout.tensors[entry.tensor].name][where])
    for landing in recording.binding.landings:
        landing.land()
    assert torch.equal(module.p, expected.p)
    if not recording.opaque:
        copied = sum(entry.box.numel for entry in layout.entries)
        counts = copied, *recording.filled.values(), *recording.unwritten.values()
        assert sum(counts) == ROWS * COLUMNS


views = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=3).flatmap(
    lambda dims: st.tuples(
        st.just(tuple(n for n, _ in dims)),
        st.builds(View, st.just(0), st.integers(0, 30), st.just(tuple(s for _, s in dims))),
    )
)


def elements(shape: tuple[int, ...], view: View) -> set[int]:
    return {
        view.offset + sum(i * s for i, s in zip(index, view.strides, strict=True))
        for index in itertools.product(*map(range, shape))
    }


@given(st.lists(views, max_size=3))
def test_counted_elements(some: list[tuple[tuple[int, ...], View]]) -> None:
    """Views of any strides, also expanded ones and ones that overlap themselves."""
    sets = [elements(shape, view) for shape, view in some]
    assert count_elements(some) == len(set().union(*sets))
    for i, one in enumerate(some):
        for j, other in enumerate(some):
            assert have_common(one, other) == bool(sets[i] & sets[j])
