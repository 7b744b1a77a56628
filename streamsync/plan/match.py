"""Which source tensor feeds which sink tensor: names, renames, ties, shapes and dtypes. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from streamsync.plan.refusal import Findings, suggest_renames
from streamsync.types import DTYPE_ITEMSIZES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from streamsync.layout.region import Box, Entry, Layout, TensorSpec, View
    from streamsync.plan.plan import Rules


class Holding(NamedTuple):
    """One box that a source rank holds, and where."""

    rank: str
    box: Box
    view: View


@dataclass(slots=True)
class Held:
    """A tensor as the sources together hold it, under its name at the sink (`name`) and at the
    source (`source_name`). A tied name lists the holdings of the memory it stands for."""

    name: str
    source_name: str
    rank: str
    shape: tuple[int, ...]
    dtype: str
    holdings: list[Holding] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class Match:
    """A sink tensor, the sink's entries of it, and the source tensor that feeds it."""

    sink: TensorSpec
    entries: list[Entry]
    source: Held


@dataclass(slots=True, frozen=True)
class Matching:
    """Every sink tensor's fate: fed (`matches`), left as it is (`left`: name to reason), or another
    name of a fed one (`aliases`). `unused` are source names that a rule lets go; `shadowed` are
    aliases that the source holds apart from the tensor which feeds them (alias to that one)."""

    matches: list[Match]
    left: dict[str, str]
    aliases: dict[str, str]
    unused: tuple[str, ...]
    shadowed: dict[str, str]


def match(
    sink: Layout, sources: Mapping[str, Layout], rules: Rules, findings: Findings
) -> Matching:
    """Pairs every tensor that `sink` has entries of with a source tensor.

    A sink tensor without entries is held by another rank of the replica; listing it makes the
    source's tensor a needed one. Findings: missing, extra, shape, dtype, disagree.
    """
    held = _index_sources(sources, rules, findings)
    by_source_name = {h.source_name: h for h in held.values()}
    entries: defaultdict[int, list[Entry]] = defaultdict(list)
    for entry in sink.entries:
        entries[entry.tensor].append(entry)
    specs = {spec.name: spec for spec in sink.tensors}
    aliases = _sink_aliases(sink, specs, entries, findings)
    names_of: defaultdict[str, list[str]] = defaultdict(list)
    for alias, name in aliases.items():
        names_of[name].append(alias)

    matches: list[Match] = []
    left: dict[str, str] = {}
    shadowed: dict[str, str] = {}
    used: set[str] = set(specs) | set(rules.ties)
    for index, spec in enumerate(sink.tensors):
        if spec.name in aliases:
            continue
        source = _feeding(spec.name, names_of[spec.name], held, by_source_name, rules)
        mine = entries.get(index, [])
        waiver = next((w for w in rules.waivers if fnmatchcase(spec.name, w.pattern)), None)
        if source is not None:
            used.add(source.name)
            for alias in names_of[spec.name]:
                if alias in held and held[alias].holdings != source.holdings:
                    shadowed[alias] = source.source_name
            if waiver is not None and _is_unused(source, rules):
                left[spec.name] = waiver.reason
            elif _agrees(spec, source, rules, findings) and mine:
                matches.append(Match(spec, mine, source))
        elif not mine:
            continue
        elif waiver is not None:
            left[spec.name] = waiver.reason
        elif rules.partial:
            left[spec.name] = "partial update: no source sends it"
        else:
            findings.add("missing", spec.name, describe(spec.name, spec.shape, spec.dtype))
    unused = _spare(held, sources, used, rules, findings)
    for source_prefix, sink_prefix, count in suggest_renames(
        findings.tensors("missing"), findings.tensors("extra")
    )[:3]:
        findings.add_advice(
            "missing",
            f'add Rename(source="{source_prefix}", sink="{sink_prefix}") (pairs {count} of them)',
        )
    return Matching(matches, left, aliases, unused, shadowed)


def describe(name: str, shape: tuple[int, ...], dtype: str) -> str:
    """`model.norm.weight bfloat16[576]`."""
    return f"{name} {dtype}{list(shape)}"


def _index_sources(
    sources: Mapping[str, Layout], rules: Rules, findings: Findings
) -> dict[str, Held]:
    held: dict[str, Held] = {}
    for rank in sorted(sources):
        layout = sources[rank]
        names = [_renamed(spec.name, rules) for spec in layout.tensors]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            findings.add("layout", twice, f"{twice} of {rank}: two of its names are renamed to it")
            continue
        for name, spec in zip(names, layout.tensors, strict=True):
            known = held.get(name)
            if known is None:
                held[name] = Held(name, spec.name, rank, spec.shape, spec.dtype)
            elif (known.shape, known.dtype) != (spec.shape, spec.dtype):
                ours = describe(name, spec.shape, spec.dtype)
                theirs = f"{known.dtype}{list(known.shape)} at {known.rank}"
                findings.add("disagree", name, f"{ours} at {rank}, {theirs}")
        mine: defaultdict[str, list[Holding]] = defaultdict(list)
        for entry in layout.entries:
            mine[names[entry.tensor]].append(Holding(rank, entry.box, entry.view))
        for alias, name in layout.ties.items():
            alias, name = _renamed(alias, rules), _renamed(name, rules)
            if alias not in mine and name in mine:
                mine[alias] = mine[name]
        for name, holdings in mine.items():
            if len(holdings) > 1:
                holdings = _once(name, holdings, findings)
            held[name].holdings.extend(holdings)
    return held


def _once(name: str, holdings: list[Holding], findings: Findings) -> list[Holding]:
    """One rank's holdings of one tensor without repetitions. The same box in two places could hold
    two different values, and nothing says which one is meant."""
    by_box: dict[Box, Holding] = {}
    for holding in holdings:
        other = by_box.setdefault(holding.box, holding)
        if other.view != holding.view and holding.box.numel:
            text = f"{name}: {holding.rank} holds {holding.box} in two places"
            findings.add("disagree", name, text)
    return list(by_box.values())


def _sink_aliases(
    sink: Layout,
    specs: Mapping[str, TensorSpec],
    entries: Mapping[int, list[Entry]],
    findings: Findings,
) -> dict[str, str]:
    """`sink.ties`, checked: an alias has no memory of its own and looks like what it stands for."""
    for index, spec in enumerate(sink.tensors):
        name = sink.ties.get(spec.name)
        if name is None:
            continue
        if index in entries:
            text = f"{spec.name}: tied to {name}, yet has entries of its own"
            findings.add("overlap", spec.name, text)
        target = specs[name]
        if (spec.shape, spec.dtype) != (target.shape, target.dtype):
            text = f"{describe(*_parts(spec))} is tied to {describe(*_parts(target))}"
            findings.add("layout", spec.name, text)
    return dict(sink.ties)


def _parts(spec: TensorSpec) -> tuple[str, tuple[int, ...], str]:
    return spec.name, spec.shape, spec.dtype


def _feeding(
    name: str,
    aliases: Iterable[str],
    held: Mapping[str, Held],
    by_source_name: Mapping[str, Held],
    rules: Rules,
) -> Held | None:
    """The source tensor whose values the sink tensor `name` takes: a rule's, its own name's, or
    that of another name of the same sink memory. One that holds no bytes comes last."""
    candidates: list[Held] = []
    tied = rules.ties.get(name)
    if tied is not None:
        found = held.get(tied) or by_source_name.get(tied)
        if found is not None:
            candidates.append(found)
    candidates.extend(held[n] for n in (name, *aliases) if n in held)
    return next((h for h in candidates if h.holdings), candidates[0] if candidates else None)


def _agrees(spec: TensorSpec, source: Held, rules: Rules, findings: Findings) -> bool:
    """Whether shapes are equal and the dtypes are, too, or a rule allows the cast."""
    called = "" if source.source_name == spec.name else f" (as {source.source_name})"
    ours = describe(*_parts(spec))
    if spec.shape != source.shape:
        theirs = f"{source.dtype}{list(source.shape)}"
        findings.add("shape", spec.name, f"{ours}, {theirs} at {source.rank}{called}")
        return False
    if not {spec.dtype, source.dtype} <= DTYPE_ITEMSIZES.keys():
        findings.add("unknown", spec.name, f"{ours}, {source.dtype} at {source.rank}{called}")
        return False
    if spec.dtype == source.dtype or any(
        rule.source == source.dtype
        and rule.sink == spec.dtype
        and fnmatchcase(spec.name, rule.pattern)
        for rule in rules.casts
    ):
        return True
    findings.add(
        "dtype",
        spec.name,
        f"{ours}, {source.dtype} at {source.rank}{called}",
        advice=f'add CastRule(source="{source.dtype}", sink="{spec.dtype}", pattern="...") '
        "for the tensors that may lose precision",
    )
    return False


def _spare(
    held: Mapping[str, Held],
    sources: Mapping[str, Layout],
    used: set[str],
    rules: Rules,
    findings: Findings,
) -> tuple[str, ...]:
    """Source tensors nobody needs that a rule lets go; the others are found extra."""
    ties = {
        (_renamed(alias, rules), _renamed(name, rules))
        for layout in sources.values()
        for alias, name in layout.ties.items()
    }
    for alias, name in ties:
        if alias in used:
            used.add(name)
    for alias, name in ties:
        if name in used:
            used.add(alias)
    unused: list[str] = []
    for source in held.values():
        if source.name in used:
            continue
        if _is_unused(source, rules):
            unused.append(source.source_name)
        else:
            text = describe(source.source_name, source.shape, source.dtype)
            findings.add("extra", source.name, f"{text} at {source.rank}")
    return tuple(sorted(unused))


def _is_unused(source: Held, rules: Rules) -> bool:
    return any(
        fnmatchcase(name, pattern)
        for pattern in rules.unused
        for name in (source.name, source.source_name)
    )


def _renamed(name: str, rules: Rules) -> str:
    """The sink's name of a source tensor: the first rule whose prefix matches is applied."""
    for rule in rules.renames:
        if name.startswith(rule.source):
            return rule.sink + name[len(rule.source) :]
    return name
