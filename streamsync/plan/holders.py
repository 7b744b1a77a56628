"""What a sink knows of the sources: who holds which boxes of the tensors that it needs. Pure."""

from __future__ import annotations

import msgspec

from streamsync.layout.outline import Record


class HolderClass(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Source ranks of equal outline, and what each of them holds.

    `ranks` are positions in `Holders.ranks`, ascending; `digest` is that of their whole outline;
    `records` are those parts of it that overlap the asking sink's need, named as the source does.
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
