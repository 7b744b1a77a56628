"""Control messages: each travels whole, and nothing but a message gets in (case 41)."""

from __future__ import annotations

from itertools import pairwise
from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamsync.control import messages as m
from streamsync.errors import ControlError
from streamsync.layout.outline import Outline, Record
from streamsync.layout.region import Box
from streamsync.types import Version

MESSAGES: tuple[type[m.Message], ...] = get_args(m.AnyMessage)

# Sized so that one message draws in a moment; geometry and plans have tests of their own.
words = st.text(max_size=4)
numbers = st.integers(-(2**63), 2**63 - 1)
record = Record(
    "model.layers.{}.norm.weight", (((0, 3), (5, 6)),), (4, 2), "float32", (Box((0, 0), (4, 2)),)
)
outlines = st.just(Outline(records=(record,), ties={"head.weight": "embed.weight"}))


def structs(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Any instance of a struct, its optional fields drawn too."""
    return st.builds(kind, **{f.name: values(kind, f.type) for f in msgspec.structs.fields(kind)})


def values(kind: type[Any], field: Any) -> st.SearchStrategy[Any]:
    arguments = get_args(field)
    if get_origin(field) is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(kind, arguments[0]), max_size=2).map(tuple)
    if get_origin(field) is tuple:
        return st.tuples(*(values(kind, argument) for argument in arguments))
    if get_origin(field) in (Union, UnionType):
        return st.one_of(*(values(kind, argument) for argument in arguments))
    if field in (int, str):
        return {int: numbers, str: words}[field]
    if field is float:
        return st.floats(allow_nan=False)
    if field is Outline:
        return outlines
    if field is Record:
        return st.just(record)
    if isinstance(field, type) and issubclass(field, msgspec.Struct):
        return structs(field)
    return st.from_type(field)


def any_message() -> st.SearchStrategy[m.Message]:
    return st.sampled_from(MESSAGES).flatmap(structs)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_travels_whole(kind: type[m.Message]) -> None:
    @given(structs(kind))
    def check(message: m.Message) -> None:
        data = m.encode(message)
        again = m.decode(data)
        assert again == message
        assert type(again) is kind
        assert m.encode(again) == data

    check()


def test_the_union_holds_every_message() -> None:
    assert set(MESSAGES) == set(m.Message.__subclasses__())


def test_tags_are_the_class_names_and_differ() -> None:
    tags = [kind.__struct_config__.tag for kind in MESSAGES]
    assert tags == [kind.__name__ for kind in MESSAGES]


@given(st.binary(max_size=200))
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(ControlError):
        m.decode(data)


def decode_or_refuse(data: bytes) -> None:
    """A mutated message may still be one; anything else is a `ControlError`, and nothing else."""
    try:
        message = m.decode(data)
    except ControlError:
        return
    assert m.decode(m.encode(message)) == message


@given(any_message(), st.data())
def test_a_cut_message_is_refused(message: m.Message, data: st.DataObject) -> None:
    whole = m.encode(message)
    with pytest.raises(ControlError):
        m.decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(any_message(), st.binary(min_size=1, max_size=8))
def test_a_message_with_a_tail_is_refused(message: m.Message, tail: bytes) -> None:
    with pytest.raises(ControlError):
        m.decode(m.encode(message) + tail)


@given(any_message(), st.data())
def test_changed_bytes_raise_nothing_else(message: m.Message, data: st.DataObject) -> None:
    whole = bytearray(m.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    decode_or_refuse(bytes(whole))


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**64 - 1) | st.floats() | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)  # fmt: skip


@given(any_message(), plain, st.data())
def test_a_field_of_the_wrong_type_is_refused_or_equal(
    message: m.Message, value: Any, data: st.DataObject
) -> None:
    fields: dict[str, Any] = msgspec.msgpack.decode(m.encode(message))
    fields[data.draw(st.sampled_from(sorted(fields)))] = value
    decode_or_refuse(msgspec.msgpack.encode(fields))


def wire(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        wire(),
        wire(type="Nonsense"),
        wire(type=7),
        wire(version=[1, 2]),
        wire(type="Begin"),
        wire(type="Begin", version=[1]),
        wire(type="Begin", version=[1, 2, 3]),
        wire(type="Begin", version=[1, "2"]),
        wire(type="Begin", version={"epoch": 1, "step": 2}),
        wire(type="Begin", version=[1, 2.5]),
        wire(type="Begin", version=[1, 2], extra=1),
        wire(type="Word", rank=0, kind="dance", version=[1, 2]),
        wire(type="Goodbye", text=b"bytes"),
        wire(type="Goodbye", request=-1.5),
        msgspec.msgpack.encode([1, 2]),
        msgspec.json.encode({"type": "Goodbye"}),
        wire(type="Goodbye", text="x").replace(b"\xa1x", b"\xa1\xff"),
    ],
)
def test_what_is_not_a_message_is_refused(data: bytes) -> None:
    with pytest.raises(ControlError, match="malformed message refused"):
        m.decode(data)


@pytest.mark.parametrize(
    "header", [b"\xdd\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xdf\xff\xff\xff\xff"]
)
def test_a_promise_of_more_than_there_is_takes_no_memory(header: bytes) -> None:
    """A list that says it has 4 billion items must not make room for them."""
    whole = wire(type="AskSources", sink="e/0", question_digest="", question=[])
    empty = whole.rindex(b"\x90")
    with pytest.raises(ControlError):
        m.decode(whole[:empty] + header + whole[empty + 1 :])


def test_deep_nesting_is_refused() -> None:
    deep = b"\x91" * 100_000
    with pytest.raises(ControlError):
        m.decode(deep)
    whole = wire(type="Goodbye", text="x")
    with pytest.raises(ControlError):
        m.decode(whole.replace(b"\xa1x", deep + b"\xc0"))


def test_an_oversized_message_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    data = m.encode(m.Goodbye(text="x" * 100))
    monkeypatch.setattr(m, "MAX_MESSAGE_BYTES", len(data))
    assert m.decode(data) == m.Goodbye(text="x" * 100)
    monkeypatch.setattr(m, "MAX_MESSAGE_BYTES", len(data) - 1)
    with pytest.raises(ControlError, match="limit"):
        m.decode(data)


def test_a_request_keeps_its_number() -> None:
    asked = msgspec.structs.replace(m.AskReplica(replica="engine"), request=7)
    assert m.decode(m.encode(asked)).request == 7


def test_versions_are_ordered_by_epoch_then_step() -> None:
    versions = [Version(1, 9), Version(2, 0), Version(2, 1), Version(10, 0)]
    assert all(a < b for a, b in pairwise(versions))
    assert m.decode(m.encode(m.Begin(version=versions[3]))) == m.Begin(version=versions[3])
