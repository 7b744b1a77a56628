"""What a sink asks the hub for: the tensors that it needs, by every name a source may use. Pure."""

from __future__ import annotations

from collections import defaultdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from streamsync.layout.outline import Record, records
from streamsync.layout.region import TensorSpec
from streamsync.plan.conversion import with_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamsync.layout.region import Box, Layout
    from streamsync.plan.plan import Rules


def question(sink_layout: Layout, rules: Rules) -> tuple[Record, ...]:
    """The need of a sink: which boxes it has of which tensors, named as sources may name them.

    A name is asked for as it is, as it was before every rename that could have made it, as the
    tensor whose values it takes by `rules.ties`, and as the other names of the same memory.
    """
    layout = with_blocks(sink_layout, rules.quantise)
    boxes: defaultdict[int, list[Box]] = defaultdict(list)
    for entry in layout.entries:
        if 0 not in entry.box.shape:
            boxes[entry.tensor].append(entry.box)
    aliases: defaultdict[str, list[str]] = defaultdict(list)
    for alias, name in layout.ties.items():
        aliases[name].append(alias)

    def asked() -> Iterator[tuple[TensorSpec, tuple[Box, ...]]]:
        for number, needed in boxes.items():
            spec = layout.tensors[number]
            names = (spec.name, *aliases.get(spec.name, ()))
            if rules.subset and not any(is_wanted(name, rules) for name in names):
                continue
            ordered = tuple(needed)
            if len(needed) > 1:
                ordered = tuple(sorted(set(needed), key=lambda box: (box.start, box.shape)))
            for own in names:
                for name in source_names(own, rules):
                    yield TensorSpec(name, spec.shape, spec.dtype), ordered

    return records(asked())


def source_names(name: str, rules: Rules) -> list[str]:
    """Every name by which a source may hold what the sink calls `name`."""
    if not rules.renames and not rules.ties:
        return [name]
    found = [name] if renamed(name, rules) == name else []
    tied = rules.ties.get(name)
    for own in (name,) if tied is None else (name, tied):
        for rule in rules.renames:
            if own.startswith(rule.sink):
                before = rule.source + own[len(rule.sink) :]
                if renamed(before, rules) == own and before not in found:
                    found.append(before)
    if tied is not None and tied not in found:
        found.append(tied)  # a rule may also say it as the source does
    return found


def renamed(name: str, rules: Rules) -> str:
    """The sink's name of a source tensor: the first rule whose prefix matches is applied."""
    for rule in rules.renames:
        if name.startswith(rule.source):
            return rule.sink + name[len(rule.source) :]
    return name


def is_wanted(name: str, rules: Rules) -> bool:
    """Whether the sink tensor `name` belongs to what this sink's syncs move."""
    return not rules.subset or any(fnmatchcase(name, pattern) for pattern in rules.subset)
