"""All sources together, as a sink sees them: what they list, and who holds what of it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from streamsync.layout.outline import split_name
from streamsync.plan.question import renamed
from streamsync.plan.refusal import describe

if TYPE_CHECKING:
    from collections.abc import Set

    from streamsync.layout.outline import Record
    from streamsync.layout.region import Box
    from streamsync.plan.holders import Holders
    from streamsync.plan.plan import Rules
    from streamsync.plan.refusal import Findings


class Holding(NamedTuple):
    """One box that all ranks of one class hold; `holders` is the class's number."""

    box: Box
    holders: int


class Held(NamedTuple):
    """A tensor as the sources together hold it. Tensors held alike have one `holdings` object."""

    source_name: str
    shape: tuple[int, ...]
    dtype: str
    holdings: tuple[Holding, ...]


class Sources:
    """What the sources list and hold, by the sink's names. Findings: disagree, layout."""

    def __init__(self, holders: Holders, rules: Rules, findings: Findings) -> None:
        self._holders = holders
        self._listed: dict[str, Record] = {}
        self._source_names: dict[str, str] = {}
        self._held: dict[str, list[tuple[int, Record]]] = {}
        self._alike: dict[tuple[int, ...], tuple[Holding, ...]] = {}
        for number, holder in enumerate(holders.classes):
            for record in holder.records:
                item = (number, record)
                for name in record.names():
                    self._held.setdefault(name, []).append(item)
        for record in holders.catalogue:
            names = list(record.names())
            if rules.renames or not self._listed.keys().isdisjoint(names):
                for name in names:
                    self._list(name, record, rules, findings)
            else:
                self._listed.update(dict.fromkeys(names, record))

    def _list(self, name: str, record: Record, rules: Rules, findings: Findings) -> None:
        sink_name = renamed(name, rules)
        known = self._listed.get(sink_name)
        if known is None:
            self._listed[sink_name] = record
            if sink_name != name:
                self._source_names[sink_name] = name
        elif self.source_name(sink_name) != name:
            text = f"{sink_name}: two names of the sources are renamed to it, {name} is one"
            findings.add("layout", sink_name, text)
        else:
            texts = [
                self._at(describe(sink_name, r.shape, r.dtype), name, r) for r in (known, record)
            ]
            findings.add("disagree", sink_name, ", ".join(texts))

    def _at(self, text: str, name: str, listed: Record) -> str:
        for number, record in self._held.get(name, ()):
            if (record.shape, record.dtype) == (listed.shape, listed.dtype):
                rank = self._holders.classes[number].ranks[0]
                return f"{text} at {self._holders.ranks[rank]}"
        return text

    def names(self) -> Set[str]:
        """All listed tensors."""
        return self._listed.keys()

    def source_name(self, name: str) -> str:
        """What the sources call the sink's `name`."""
        return self._source_names.get(name, name)

    def spec(self, name: str) -> tuple[tuple[int, ...], str]:
        """Global shape and dtype of a listed name."""
        record = self._listed[name]
        return record.shape, record.dtype

    def find(self, name: str) -> Held | None:
        """The tensor that the sink calls `name`, None if no source lists it."""
        record = self._listed.get(name)
        if record is None:
            return None
        source_name = self._source_names.get(name, name) if self._source_names else name
        held = self._held.get(source_name, [])
        key = tuple(map(id, held))
        holdings = self._alike.get(key)
        if holdings is None:
            holdings = self._alike[key] = tuple(
                dict.fromkeys(Holding(box, number) for number, own in held for box in own.boxes)
            )
        return Held(source_name, record.shape, record.dtype, holdings)

    def find_tied(self, name: str, rules: Rules) -> Held | None:
        """The tensor that a rule calls `name`, as the sink or as the source does."""
        return self.find(name) or self.find(renamed(name, rules))

    def is_one_memory(self, one: str, other: str) -> bool:
        """Whether two source names are tied at the sources."""
        ties = self._holders.ties
        return ties.get(one, one) == ties.get(other, other)

    def ties(self) -> list[tuple[str, str]]:
        """(alias, name) of all ties of the sources, by source names."""
        return list(self._holders.ties.items())

    def has_like(self, name: str) -> bool:
        """Whether the sources list a tensor whose name differs from `name` only in numbers."""
        pattern, numbers = split_name(name)
        return bool(numbers) and any(r.pattern == pattern for r in self._holders.catalogue)
