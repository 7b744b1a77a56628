"""Which source tensor feeds which sink tensor: names, renames, ties, shapes and dtypes. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from streamsync.plan.conversion import FP8, WIDE_DTYPES
from streamsync.plan.plan import SharedTensor
from streamsync.plan.question import is_wanted, renamed
from streamsync.plan.refusal import describe, suggest_renames
from streamsync.plan.sources import Sources
from streamsync.types import DTYPE_ITEMSIZES

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from streamsync.layout.region import Box, Layout, TensorSpec
    from streamsync.plan.conversion import Role
    from streamsync.plan.holders import Holders
    from streamsync.plan.plan import Rules
    from streamsync.plan.refusal import Findings
    from streamsync.plan.sources import Held, Holding


@dataclass(slots=True, frozen=True)
class Match:
    """A tensor on its way, the boxes of it that the sink needs, and who holds what of it, in the
    coordinates of the wire."""

    tensor: SharedTensor
    boxes: tuple[Box, ...]
    holdings: tuple[Holding, ...]


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
    sink: Layout,
    holders: Holders,
    rules: Rules,
    roles: Mapping[str, Role],
    findings: Findings,
) -> Matching:
    """Pairs every tensor that `sink` has entries of with a source tensor.

    A sink tensor without entries is held by another rank of the replica; listing it makes the
    source's tensor a needed one. What has one of `roles` may be made of a tensor that is quantised
    on the way. Findings: missing, extra, shape, dtype, disagree, subset.
    """
    sources = Sources(holders, rules, findings)
    boxes: defaultdict[int, list[Box]] = defaultdict(list)
    for entry in sink.entries:
        boxes[entry.tensor].append(entry.box)
    listed = {spec.name for spec in sink.tensors}
    aliases = _sink_aliases(sink, boxes, findings)
    names_of: defaultdict[str, list[str]] = defaultdict(list)
    for alias, name in aliases.items():
        names_of[name].append(alias)

    matches: list[Match] = []
    left: dict[str, str] = {}
    shadowed: dict[str, str] = {}
    fed_by: set[str] = set()
    for number, needed in boxes.items():
        spec = sink.tensors[number]
        if spec.name in aliases:
            continue
        names = names_of.get(spec.name, [])
        if rules.subset and not any(is_wanted(name, rules) for name in (spec.name, *names)):
            left[spec.name] = "outside of the declared subset"
            continue
        held = _feeding(spec.name, names, sources, rules)
        role = roles.get(spec.name)
        if role is not None and (held is None or held.dtype != spec.dtype):
            unmade = held
            held = _feeding(role.values, names_of.get(role.values, []), sources, rules)
            if held is not None and held.dtype in WIDE_DTYPES:
                fed_by.add(held.source_name)
                if _makes(spec, role, held, listed, findings):
                    tensor = SharedTensor(
                        spec.name,
                        held.source_name,
                        spec.shape,
                        held.dtype,
                        spec.dtype,
                        role.conversion,
                    )
                    matches.append(Match(tensor, tuple(needed), held.holdings))
                continue
            held = unmade
        waiver = next((w for w in rules.waivers if fnmatchcase(spec.name, w.pattern)), None)
        if held is None:
            if waiver is None:
                findings.add("missing", spec.name, describe(spec.name, spec.shape, spec.dtype))
            else:
                left[spec.name] = waiver.reason
            continue
        fed_by.add(held.source_name)
        for alias in names:
            apart = sources.find(alias)
            if apart is not None and not sources.is_one_memory(apart.source_name, held.source_name):
                shadowed[alias] = held.source_name
        if waiver is not None and _is_unused(held.source_name, spec.name, rules):
            left[spec.name] = waiver.reason
        elif _agrees(spec, held, rules, findings):
            tensor = SharedTensor(spec.name, held.source_name, held.shape, held.dtype, spec.dtype)
            matches.append(Match(tensor, tuple(needed), held.holdings))
    if rules.subset and not any(is_wanted(name, rules) for name in listed):
        for pattern in rules.subset:
            findings.add("subset", pattern, pattern)
    unused = _spare(sources, listed, fed_by, rules, findings)
    _advise(sources, findings)
    return Matching(matches, left, aliases, unused, shadowed)


def _advise(sources: Sources, findings: Findings) -> None:
    """Says what would help with missing tensors."""
    missing = findings.tensors("missing")
    for source_prefix, sink_prefix, count in suggest_renames(missing, findings.tensors("extra"))[
        :3
    ]:
        findings.add_advice(
            "missing",
            f'add Rename(source="{source_prefix}", sink="{sink_prefix}") (pairs {count} of them)',
        )
    if any(sources.has_like(name) for name in missing):
        findings.add_advice(
            "missing",
            "the sources number others of them: add the rank that is absent (its pipeline stage or "
            "its experts), and switch off what copies or moves experts in the engine (EPLB), which "
            "can't be followed yet",
        )


def _sink_aliases(sink: Layout, boxes: dict[int, list[Box]], findings: Findings) -> dict[str, str]:
    """`sink.ties`, checked: an alias has no memory of its own and looks like what it stands for."""
    if not sink.ties:
        return {}
    numbers = {spec.name: number for number, spec in enumerate(sink.tensors)}
    for alias, name in sink.ties.items():
        number = numbers[alias]
        spec, target = sink.tensors[number], sink.tensors[numbers[name]]
        if number in boxes:
            text = f"{alias}: tied to {name}, yet has entries of its own"
            findings.add("overlap", alias, text)
        if (spec.shape, spec.dtype) != (target.shape, target.dtype):
            ours = describe(alias, spec.shape, spec.dtype)
            text = f"{ours} is tied to {describe(name, target.shape, target.dtype)}"
            findings.add("layout", alias, text)
    return dict(sink.ties)


def _feeding(name: str, aliases: Iterable[str], sources: Sources, rules: Rules) -> Held | None:
    """The source tensor whose values the sink tensor `name` takes: a rule's, its own name's, or
    that of another name of the same sink memory. One that holds no bytes comes last."""
    own = sources.find(name)
    if not rules.ties and not aliases:
        return own
    candidates: list[Held] = []
    tied = rules.ties.get(name)
    if tied is not None:
        found = sources.find_tied(tied, rules)
        if found is not None:
            candidates.append(found)
    if own is not None:
        candidates.append(own)
    candidates.extend(held for held in map(sources.find, aliases) if held is not None)
    return next((h for h in candidates if h.holdings), candidates[0] if candidates else None)


def _agrees(spec: TensorSpec, held: Held, rules: Rules, findings: Findings) -> bool:
    """Whether shapes are equal and the dtypes are, too, or a rule allows the cast."""
    if (spec.shape, spec.dtype) == (held.shape, held.dtype) and spec.dtype in DTYPE_ITEMSIZES:
        return True
    called = "" if held.source_name == spec.name else f" (as {held.source_name})"
    ours = describe(spec.name, spec.shape, spec.dtype)
    if spec.shape != held.shape:
        text = f"{ours}, {held.dtype}{list(held.shape)} at the sources{called}"
        findings.add("shape", spec.name, text, advice=_shape_advice(spec.shape, held.shape))
        return False
    text = f"{ours}, {held.dtype} at the sources{called}"
    if not {spec.dtype, held.dtype} <= DTYPE_ITEMSIZES.keys():
        findings.add("unknown", spec.name, text)
        return False
    if any(
        rule.source == held.dtype
        and rule.sink == spec.dtype
        and fnmatchcase(spec.name, rule.pattern)
        for rule in rules.casts
    ):
        return True
    if spec.dtype == FP8 and held.dtype in WIDE_DTYPES:
        findings.add("dtype", spec.name, text, advice='add QuantRule(pattern="...", scheme="...")')
        return False
    findings.add(
        "dtype",
        spec.name,
        text,
        advice=f'add CastRule(source="{held.dtype}", sink="{spec.dtype}", pattern="...") '
        "for the tensors that may lose precision",
    )
    return False


def _makes(
    spec: TensorSpec, role: Role, held: Held, listed: Container[str], findings: Findings
) -> bool:
    """Whether the tensor of that role can be made of `held`."""
    ours = describe(spec.name, spec.shape, spec.dtype)
    if role.scales not in listed:
        text = (
            f"{ours}: its rule puts the scales into {role.scales}, and there is no tensor called so"
        )
        findings.add("dtype", spec.name, text, advice=_QUANT_ADVICE)
        return False
    if held.shape != role.conversion.shape:
        text = f"{ours} of {role.values}, {held.dtype}{list(held.shape)} at the sources"
        findings.add(
            "shape", spec.name, text, advice=_shape_advice(role.conversion.shape, held.shape)
        )
        return False
    if spec.shape not in role.conversion.wire_shapes:
        grids = " or ".join(str(list(shape)) for shape in role.conversion.wire_shapes)
        text = f"{ours}, its rule makes it {grids}"
        findings.add("shape", spec.name, text, advice=_QUANT_ADVICE)
        return False
    if role.conversion.part == "scales" and spec.dtype != "float32":
        text = f"{ours}, scales are made in float32"
        findings.add("dtype", spec.name, text, advice=_QUANT_ADVICE)
        return False
    return True


_QUANT_ADVICE: Final = "compare scheme, block and scale of the QuantRule with the sink's own config"


def _shape_advice(ours: tuple[int, ...], theirs: tuple[int, ...]) -> str:
    """What one dim that differs by a whole factor usually means."""
    differing = [d for d, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b]
    if len(ours) != len(theirs) or len(differing) != 1:
        return ""
    a, b = sorted((ours[differing[0]], theirs[differing[0]]))
    if a == 0 or b % a:
        return ""
    return (
        f"dim {differing[0]} differs by a factor of {b // a}: compare the numbers of heads, key "
        "value heads and experts, and whether one side lists a shard as the whole tensor"
    )


def _spare(
    sources: Sources, listed: set[str], fed_by: set[str], rules: Rules, findings: Findings
) -> tuple[str, ...]:
    """Source tensors nobody needs that a rule lets go; the others are found extra."""
    if sources.names() <= listed:
        return ()
    spare = [name for name in sources.names() if name not in listed]
    used = set(fed_by)
    for tied in rules.ties.values():
        found = sources.find_tied(tied, rules)
        if found is not None:
            used.add(found.source_name)
    for alias, name in sources.ties():
        if any(n in used or renamed(n, rules) in listed for n in (alias, name)):
            used |= {alias, name}
    unused: list[str] = []
    for name in spare:
        source_name = sources.source_name(name)
        if source_name in used:
            continue
        if _is_unused(source_name, name, rules):
            unused.append(source_name)
        else:
            findings.add("extra", name, describe(source_name, *sources.spec(name)))
    return tuple(sorted(unused))


def _is_unused(source_name: str, name: str, rules: Rules) -> bool:
    return any(
        fnmatchcase(either, pattern) for pattern in rules.unused for either in (name, source_name)
    )
