"""Outlines: layouts without views, in which tensors that are alike are one record. Pure.

A model repeats itself: sixty layers, hundreds of experts, all cut alike. Their names differ only in
numbers, so `model.layers.3.mlp.experts.17.up_proj.weight` is number (3, 17) of the pattern
`model.layers.{}.mlp.experts.{}.up_proj.weight`, and whoever holds the same box of each of them says
so once. An outline is what ranks tell each other: where a box lies is its holder's own business.
"""

from __future__ import annotations

import hashlib
from itertools import product
from typing import TYPE_CHECKING

import msgspec

from streamsync.layout.region import Box, Layout, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Ranges = tuple[tuple[int, int], ...]
"""A set of numbers: half-open ranges, ascending and apart."""

Numbers = tuple[Ranges, ...]
"""A set of number tuples: the product of one set per place of a pattern."""

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tensors that are alike: one name for each member of `numbers`, all of one global shape and
    dtype, and of each the same `boxes` held (a source) or needed (a sink); none: only listed."""

    pattern: str
    numbers: Numbers
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...] = ()

    @property
    def num_tensors(self) -> int:
        """How many tensors it stands for."""
        total = 1
        for ranges in self.numbers:
            total *= sum(stop - start for start, stop in ranges)
        return total

    def names(self) -> Iterator[str]:
        """The tensors' names, in the order of their numbers."""
        return names(self.pattern, self.numbers)


class Outline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A layout as others see it. An alias of `ties` (`{alias: name}`) is listed with the boxes of
    the memory that it stands for."""

    records: tuple[Record, ...]
    ties: dict[str, str] = {}


def outline(layout: Layout) -> Outline:
    """The outline of `layout`. Equal layouts have equal outlines, and so have layouts that differ
    only in where their boxes lie."""
    boxes: list[list[Box]] = [[] for _ in layout.tensors]
    for entry in layout.entries:
        if entry.box.numel:
            boxes[entry.tensor].append(entry.box)
    number_of = {spec.name: number for number, spec in enumerate(layout.tensors)}
    for alias, name in layout.ties.items():
        boxes[number_of[alias]] = boxes[number_of[name]]
    return Outline(
        records=records(
            (spec, tuple(sorted(set(held), key=_corner)))
            for spec, held in zip(layout.tensors, boxes, strict=True)
        ),
        ties=layout.ties,
    )


def outline_digest(content: Outline) -> str:
    """128 bits of everything in an outline, in hex; equal in every process for equal outlines."""
    return hashlib.blake2b(_encode(content), digest_size=16).hexdigest()


def records(tensors: Iterable[tuple[TensorSpec, tuple[Box, ...]]]) -> tuple[Record, ...]:
    """The fewest records that stand for `tensors`, in the order of their first members."""
    alike: dict[tuple[str, tuple[int, ...], str, tuple[Box, ...]], list[tuple[int, ...]]] = {}
    for spec, boxes in tensors:
        pattern, numbers = split_name(spec.name)
        alike.setdefault((pattern, spec.shape, spec.dtype, boxes), []).append(numbers)
    return tuple(
        Record(pattern, numbers, shape, dtype, boxes)
        for (pattern, shape, dtype, boxes), members in alike.items()
        for numbers in products(members)
    )


def split_name(name: str) -> tuple[str, tuple[int, ...]]:
    """A name's pattern and numbers: its parts between dots that are plain decimal numbers."""
    parts = name.split(".")
    numbers: list[int] = []
    for place, part in enumerate(parts):
        if part.isdigit() and part.isascii() and (part[0] != "0" or part == "0"):
            numbers.append(int(part))
            parts[place] = "{}"
    if not numbers or "{}" in name:
        return name, ()
    return ".".join(parts), tuple(numbers)


def names(pattern: str, numbers: Numbers) -> Iterator[str]:
    """The names of `pattern` for each member of `numbers`, ascending."""
    if not numbers:
        yield pattern
        return
    form = pattern.replace("%", "%%").replace("{}", "%d")
    for members in product(*map(members_of, numbers)):
        yield form % members


def members_of(ranges: Ranges) -> list[int]:
    """The numbers of a set, ascending."""
    return [n for start, stop in ranges for n in range(start, stop)]


def products(members: Iterable[tuple[int, ...]]) -> list[Numbers]:
    """`members` (tuples of one length) as disjoint products; few, where they come from nested
    loops."""
    unique = sorted(set(members))
    if not unique or not unique[0]:
        return [()] if unique else []
    by_rest: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    by_first: dict[int, list[tuple[int, ...]]] = {}
    for first, *rest in unique:
        by_first.setdefault(first, []).append(tuple(rest))
    for first, rests in by_first.items():
        by_rest.setdefault(tuple(rests), []).append(first)
    return [
        (_ranges(firsts), *inner) for rests, firsts in by_rest.items() for inner in products(rests)
    ]


def common_numbers(a: Numbers, b: Numbers) -> Numbers | None:
    """Members of both sets, of equally many places; None when there are none."""
    common: list[Ranges] = []
    for ours, theirs in zip(a, b, strict=True):
        ranges = _common_ranges(ours, theirs)
        if not ranges:
            return None
        common.append(ranges)
    return tuple(common)


def _ranges(numbers: Iterable[int]) -> Ranges:
    """Ascending numbers as ranges."""
    ranges: list[tuple[int, int]] = []
    for n in numbers:
        if ranges and ranges[-1][1] == n:
            ranges[-1] = (ranges[-1][0], n + 1)
        else:
            ranges.append((n, n + 1))
    return tuple(ranges)


def _common_ranges(a: Ranges, b: Ranges) -> Ranges:
    if a == b:
        return a
    common: list[tuple[int, int]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            common.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(common)


def _corner(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.start, box.shape
