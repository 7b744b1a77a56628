"""What is wrong between sources and sink, collected and told at once. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final, Literal

from streamsync.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Kind = Literal[
    "missing",
    "extra",
    "shape",
    "dtype",
    "unknown",
    "hole",
    "overlap",
    "disagree",
    "layout",
    "subset",
]

MAX_ITEMS: Final = 10
"""Findings of one kind that a message lists; the rest is counted."""

_TEXTS: Final[dict[Kind, tuple[str, str]]] = {
    "layout": ("malformed layout", "fix the code that made this layout"),
    "missing": (
        "needed by the sink, held by no source",
        "add a Rename if the source calls it otherwise, Rules.ties if it takes another tensor's "
        'values, Waiver(pattern="...", reason="...") to leave it as it is, or Rules.subset '
        "if syncs move only a part of the model",
    ),
    "subset": (
        "of no sink tensor's name: Rules.subset would move nothing",
        "correct the patterns, which match the sink's own names, or leave subset empty",
    ),
    "extra": (
        "held by a source, needed by no sink",
        "add a Rename if the sink calls it otherwise, or its name or pattern to Rules.unused",
    ),
    "shape": ("of another shape at the source", "load the same model configuration on both sides"),
    "dtype": ("of another dtype at the source, without a rule that allows the cast", ""),
    "unknown": (
        "of a dtype that can't travel",
        "waive them at the sink and list them in Rules.unused",
    ),
    "hole": (
        "only partly held by the sources",
        "a source rank is absent or its layout misses a shard (lost parallel metadata): add it",
    ),
    "overlap": (
        "asked for twice by the sink's own layout",
        "two names of one memory belong into Layout.ties; otherwise fix the sink's layout",
    ),
    "disagree": (
        "described differently by two sources",
        "all sources must publish the same global shape and dtype, and each box once",
    ),
}


class Findings:
    """Everything that speaks against a plan of `sink`, in the order of its discovery."""

    def __init__(self, sink: str) -> None:
        self.sink = sink
        self._items: defaultdict[Kind, list[tuple[str, str]]] = defaultdict(list)
        self._advice: defaultdict[Kind, dict[str, None]] = defaultdict(dict)

    def add(self, kind: Kind, tensor: str, text: str, *, advice: str = "") -> None:
        """Notes one finding about `tensor`; `text` is its line in the message. `advice` (kept once)
        is what to do about this very finding."""
        self._items[kind].append((tensor, text))
        if advice:
            self.add_advice(kind, advice)

    def add_advice(self, kind: Kind, advice: str) -> None:
        """Adds what to do about findings of `kind`, in front of the general advice."""
        self._advice[kind][advice] = None

    def tensors(self, kind: Kind) -> list[str]:
        """Names of the tensors with findings of `kind`."""
        return [tensor for tensor, _ in self._items[kind]]

    def texts(self, kind: Kind) -> list[str]:
        """The lines of the findings of `kind`."""
        return [text for _, text in self._items[kind]]

    def refuse(self, num_needed: int) -> None:
        """Raises `PlanError` with all findings, if there are any. `num_needed` is the number of
        tensors that the sink needs."""
        kinds = [kind for kind in _TEXTS if self._items.get(kind)]
        if not kinds:
            return
        lines = [f"the sources do not fit sink {self.sink}; no byte was moved"]
        for kind in kinds:
            items = self._items[kind]
            title, advice = _TEXTS[kind]
            of = f" of {num_needed}" if kind in ("missing", "hole", "shape", "dtype") else ""
            lines.append(f"{len(items)}{of} tensors {title}:")
            lines.extend(f"  {text}" for text in head([text for _, text in items]))
            special = list(self._advice[kind])
            if special:
                advice = "; ".join(head(special, 5)) + (f"; or: {advice}" if advice else "")
            lines.append(f"  to do: {advice}")
        raise PlanError("\n".join(lines), rank=self.sink, tensor=self._items[kinds[0]][0][0])


def describe(name: str, shape: tuple[int, ...], dtype: str) -> str:
    """`model.norm.weight bfloat16[576]`."""
    return f"{name} {dtype}{list(shape)}"


def head(items: Sequence[str], limit: int = MAX_ITEMS) -> list[str]:
    """The first `limit` items and how many more there are."""
    if len(items) <= limit:
        return list(items)
    return [*items[:limit], f"... and {len(items) - limit} more"]


def suggest_renames(missing: Iterable[str], extra: Iterable[str]) -> list[tuple[str, str, int]]:
    """Prefix pairs (source, sink, how many tensors they match up) that would turn extra source
    names into missing sink names, best first."""
    by_suffix: defaultdict[str, list[str]] = defaultdict(list)
    for name in extra:
        for suffix in _suffixes(name):
            by_suffix[suffix].append(name)
    votes: Counter[tuple[str, str]] = Counter()
    for name in missing:
        for suffix in _suffixes(name):
            found = by_suffix.get(suffix)
            if found is None:
                continue
            if len(found) == 1:
                source, sink = found[0].removesuffix(suffix), name.removesuffix(suffix)
                if not source or not sink:
                    # An empty prefix would match every name: keep one component as an anchor.
                    anchor, dot, _ = suffix.partition(".")
                    source, sink = source + anchor + dot, sink + anchor + dot
                votes[source, sink] += 1
            break
    return [(source, sink, n) for (source, sink), n in sorted(votes.items(), key=lambda v: -v[1])]


def _suffixes(name: str) -> Iterable[str]:
    """`a.b.c`, `b.c`, `c`."""
    parts = name.split(".")
    return (".".join(parts[i:]) for i in range(len(parts)))
