"""What a sink knows of the sources: who holds which boxes of the tensors that it needs. Pure."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import msgspec

from streamsync.layout.outline import (
    Numbers,
    Outline,
    Record,
    members_of,
    outline,
    outline_digest,
    products,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from streamsync.layout.region import Layout


class HolderClass(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Source ranks that hold the same, as far as it was asked for, and what that is.

    `ranks` are positions in `Holders.ranks`, ascending; `digest` is that of their outlines;
    `records` are the parts of these that overlap the asking sink's need, named as the source does.
    """

    ranks: tuple[int, ...]
    digest: str
    records: tuple[Record, ...]


class Holders(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer to a sink's question, and all that its plan is made of beside its own layout.

    `ranks` are the source ranks' names. `catalogue` lists every tensor that any source lists, once
    per shape and dtype, without boxes: a sink refuses names that it has no use for. `ties` is
    `{alias: name}` of all sources.
    """

    ranks: tuple[str, ...]
    classes: tuple[HolderClass, ...]
    catalogue: tuple[Record, ...]
    ties: dict[str, str] = {}


def holders_of(layouts: Mapping[str, Layout]) -> Holders:
    """All that the sources of `layouts` (by rank name) hold, as if everything had been asked for.

    The order of the mapping does not matter.
    """
    names = sorted(layouts)
    outlines: dict[str, Outline] = {}
    ranks: dict[str, list[int]] = {}
    ties: dict[str, str] = {}
    for number, name in enumerate(names):
        content = outline(layouts[name])
        digest = outline_digest(content)
        outlines[digest] = content
        ranks.setdefault(digest, []).append(number)
        ties |= content.ties
    return Holders(
        ranks=tuple(names),
        classes=tuple(
            HolderClass(
                tuple(members),
                digest,
                tuple(record for record in outlines[digest].records if record.boxes),
            )
            for digest, members in ranks.items()
        ),
        catalogue=catalogue(record for o in outlines.values() for record in o.records),
        ties=ties,
    )


def catalogue(records: Iterable[Record]) -> tuple[Record, ...]:
    """Every tensor of `records`, once per shape and dtype, without boxes; ordered by pattern."""
    found: dict[tuple[str, tuple[int, ...], str], set[Numbers]] = {}
    for record in records:
        found.setdefault((record.pattern, record.shape, record.dtype), set()).add(record.numbers)
    return tuple(
        Record(pattern, numbers, shape, dtype)
        for (pattern, shape, dtype), sets in sorted(found.items())
        for numbers in products(
            member for numbers in sets for member in product(*map(members_of, numbers))
        )
    )
