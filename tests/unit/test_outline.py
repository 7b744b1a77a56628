"""What ranks tell each other of their layouts: short, exact, the same in every process."""

from __future__ import annotations

import random

import msgspec
import pytest

from streamsync.layout.outline import (
    Outline,
    Record,
    common_numbers,
    names,
    outline,
    outline_digest,
    products,
    records,
    split_name,
)
from streamsync.layout.region import Box, Entry, Layout, TensorSpec, View

UP = "model.layers.{}.mlp.experts.{}.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "pattern", "numbers"),
    [
        ("lm_head.weight", "lm_head.weight", ()),
        ("model.layers.3.mlp.experts.17.up_proj.weight", UP, (3, 17)),
        ("0", "{}", (0,)),
        ("a.0.10", "a.{}.{}", (0, 10)),
        ("a.01.b", "a.01.b", ()),  # not the plain spelling of a number
        ("a.-1.b", "a.-1.b", ()),
        ("a.٣.b", "a.٣.b", ()),  # a digit, but not an ASCII one
        ("a.².b", "a.².b", ()),
        ("w2.a1.weight", "w2.a1.weight", ()),
        ("a.{}.3", "a.{}.3", ()),
        ("100%.7.%d", "100%.{}.%d", (7,)),
    ],
)
def test_a_name_is_its_pattern_and_numbers(
    name: str, pattern: str, numbers: tuple[int, ...]
) -> None:
    assert split_name(name) == (pattern, numbers)
    assert list(names(pattern, tuple(((n, n + 1),) for n in numbers))) == [name]


def test_layers_and_experts_are_one_record() -> None:
    box = (Box((2, 0), (2, 4)),)
    tensors = [
        (TensorSpec(f"model.layers.{i}.mlp.experts.{e}.up_proj.weight", (4, 4), "bfloat16"), box)
        for i in range(3, 61)
        for e in range(64, 128)
    ]
    (record,) = records(tensors)
    assert record == Record(UP, (((3, 61),), ((64, 128),)), (4, 4), "bfloat16", box)
    assert record.num_tensors == 58 * 64
    assert list(record.names()) == [spec.name for spec, _ in tensors]
    random.Random(7).shuffle(tensors)
    assert records(tensors) == (record,), "the order does not matter"


def test_what_differs_is_a_record_of_its_own() -> None:
    """Experts dealt out in turn, and one layer of another dtype."""
    tensors = [
        (TensorSpec(f"{i}.experts.{e}.w", (4,), "float32" if i == 2 else "bfloat16"), ())
        for i in range(4)
        for e in range(1, 16, 4)
    ]
    found = records(tensors)
    assert [(r.dtype, r.numbers[0]) for r in found] == [
        ("bfloat16", ((0, 2), (3, 4))),
        ("float32", ((2, 3),)),
    ]
    assert {r.numbers[1] for r in found} == {((1, 2), (5, 6), (9, 10), (13, 14))}


def test_numbers_that_are_no_product_stay_exact() -> None:
    members = [(0, 1), (0, 2), (1, 2), (2, 1), (2, 2), (5, 9)]
    found = products([*members, (0, 1)])
    assert found == [(((0, 1), (2, 3)), ((1, 3),)), (((1, 2),), ((2, 3),)), (((5, 6),), ((9, 10),))]
    assert products([]) == []
    assert products([()]) == [()]


def test_common_numbers() -> None:
    a = (((0, 4), (8, 12)), ((0, 64),))
    assert common_numbers(a, (((2, 9),), ((32, 128),))) == (((2, 4), (8, 9)), ((32, 64),))
    assert common_numbers(a, (((4, 8),), ((0, 64),))) is None
    assert common_numbers(a, a) == a
    assert common_numbers((), ()) == ()


def entry(tensor: int, start: int, stop: int, storage: int) -> Entry:
    return Entry(tensor, Box((start,), (stop - start,)), View(storage, 0, (1,)))


SPECS = tuple(TensorSpec(name, (8,), "bfloat16") for name in ("a.0", "a.1", "a.2", "b"))


def test_an_outline_knows_boxes_but_no_places() -> None:
    one = Layout(tensors=SPECS, entries=(entry(0, 0, 4, 0), entry(0, 4, 8, 1), entry(1, 0, 8, 2)))
    other = Layout(tensors=SPECS, entries=(entry(0, 4, 8, 7), entry(1, 0, 8, 8), entry(0, 0, 4, 9)))
    assert outline(one) == outline(other)
    assert outline_digest(outline(one)) == outline_digest(outline(other))
    assert [(r.pattern, r.numbers, len(r.boxes)) for r in outline(one).records] == [
        ("a.{}", (((0, 1),),), 2),
        ("a.{}", (((1, 2),),), 1),
        ("a.{}", (((2, 3),),), 0),
        ("b", (), 0),
    ]
    less = Layout(tensors=SPECS, entries=one.entries[1:])
    assert outline_digest(outline(less)) != outline_digest(outline(one))


def test_an_alias_has_the_boxes_of_its_memory() -> None:
    """Case 12."""
    layout = Layout(tensors=SPECS, entries=(entry(3, 0, 8, 0),), ties={"a.1": "b"})
    found = {r.pattern: r for r in outline(layout).records if r.boxes}
    assert found["a.{}"].numbers == (((1, 2),),)
    assert found["a.{}"].boxes == found["b"].boxes == (Box((0,), (8,)),)
    assert outline(layout).ties == {"a.1": "b"}


def test_empty_boxes_are_not_told() -> None:
    (record,) = outline(Layout(tensors=SPECS[3:], entries=(entry(0, 8, 8, 0),))).records
    assert record.boxes == ()


def test_an_outline_survives_the_wire() -> None:
    content = outline(Layout(tensors=SPECS, entries=(entry(0, 0, 8, 0),)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(content), type=Outline) == content


def test_61_layers_of_256_experts_are_a_few_kilobytes() -> None:
    """A rank of a 256-expert model lists 47,000 tensors."""
    tensors = [
        (TensorSpec(f"model.layers.{i}.mlp.experts.{e}.{w}.weight", (8, 8), "bfloat16"), ())
        for i in range(3, 61)
        for e in range(256)
        for w in ("gate_proj", "up_proj", "down_proj")
    ]
    content = Outline(records=records(tensors))
    assert sum(record.num_tensors for record in content.records) == 44_544
    assert len(msgspec.msgpack.encode(content)) < 1000
