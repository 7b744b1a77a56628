"""The proof: every byte a sink needs is held by a source, and asked for exactly once. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from streamsync.layout.region import Box, Entry
    from streamsync.plan.match import Holding, Match
    from streamsync.plan.refusal import Findings


class Cell(NamedTuple):
    """A box that one source rank can send whole, and every holding that contains it.

    `match` is the position of its tensor among the matches, `entry` the sink's entry it is for.
    """

    match: int
    box: Box
    entry: Entry
    holdings: Sequence[Holding]


def cover(matches: Sequence[Match], findings: Findings) -> list[Cell]:
    """Cuts what the sink needs into disjoint cells that together are all of it.

    A sink box is cut only where the boxes of the sources differ. Findings: hole (bytes no source
    holds), overlap (elements that two of the sink's entries ask for).
    """
    cells: list[Cell] = []
    for number, match in enumerate(matches):
        name, shape = match.sink.name, match.sink.shape
        boxes = [entry.box for entry in match.entries if entry.box.numel]
        clash = first_overlap(boxes)
        if clash is not None:
            text = f"{name}: {extent(clash, shape)} in two of its entries"
            findings.add("overlap", name, text)
        holes: list[Box] = []
        for entry in match.entries:
            if not entry.box.numel:
                continue
            parts, covered = split(entry.box, match.source.holdings)
            if covered:
                cells.extend(Cell(number, box, entry, holdings) for box, holdings in parts)
            else:
                holes.extend(without(entry.box, [h.box for h in match.source.holdings]))
        if holes:
            text = f"{name} {match.sink.dtype}{list(shape)}: no source holds "
            text += ", ".join(extent(box, shape) for box in holes[:4])
            text += f" and {len(holes) - 4} more boxes" if len(holes) > 4 else ""
            ranks = sorted({h.rank for h in match.source.holdings})
            text += f"; held in part by {', '.join(ranks[:8])}" if ranks else "; held by nobody"
            text += f" and {len(ranks) - 8} more ranks" if len(ranks) > 8 else ""
            findings.add("hole", name, text)
    return cells


def split(need: Box, holdings: Iterable[Holding]) -> tuple[list[tuple[Box, list[Holding]]], bool]:
    """Disjoint boxes of `need` with the holdings that contain each, in order of their corners, and
    whether they are all of it."""
    by_part: dict[Box, list[Holding]] = {}
    for holding in holdings:
        part = need if holding.box == need else need.intersect(holding.box)
        if part is not None:
            by_part.setdefault(part, []).append(holding)
    parts = sorted(by_part.items(), key=_corner)
    if _is_chain(need, [box for box, _ in parts]):
        return parts, True
    atoms: list[tuple[Box, list[Holding]]] = [(need, [])]
    for part, holders in parts:
        finer: list[tuple[Box, list[Holding]]] = []
        for box, known in atoms:
            common = box.intersect(part)
            if common is None:
                finer.append((box, known))
            else:
                finer.append((common, known + holders))
                finer.extend((rest, known) for rest in box.subtract(part))
        atoms = finer
    return sorted(atoms, key=_corner), all(known for _, known in atoms)


def without(need: Box, boxes: Iterable[Box]) -> list[Box]:
    """`need` less all `boxes`, as disjoint boxes in order of their corners."""
    rest = [need]
    for box in boxes:
        rest = [piece for old in rest for piece in old.subtract(box)]
    return sorted(rest, key=lambda box: box.start)


def first_overlap(boxes: Sequence[Box]) -> Box | None:
    """Elements that two of `boxes` (none empty, of equal dims) have in common, or None.

    A sweep along the dim with the most distinct corners: linear but for the sort when the boxes are
    slices along one dim.
    """
    if len(boxes) < 2:
        return None
    dims = range(len(boxes[0].start))
    if not dims:
        return boxes[0]
    along = max(dims, key=lambda d: len({box.start[d] for box in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.start[along]):
        active = [a for a in active if a.start[along] + a.shape[along] > box.start[along]]
        for other in active:
            common = box.intersect(other)
            if common is not None:
                return common
        active.append(box)
    return None


def extent(box: Box, shape: tuple[int, ...]) -> str:
    """`rows 4:8 of 32` for whole rows, all of it as `everything`, else the box's ranges."""
    if box.shape == shape:
        return "everything"
    if box.shape[1:] == shape[1:]:
        return f"rows {box.start[0]}:{box.start[0] + box.shape[0]} of {shape[0]}"
    return f"box {box}"


def _corner(part: tuple[Box, list[Holding]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return part[0].start, part[0].shape


def _is_chain(need: Box, parts: Sequence[Box]) -> bool:
    """Whether `parts` (sorted) are slices of `need` along one dim without gap or overlap: true of
    nearly every sharding, and far cheaper to see than by subtraction."""
    if not parts:
        return False
    if parts[0] == need:
        return len(parts) == 1
    differing = [d for d, n in enumerate(need.shape) if parts[0].shape[d] != n]
    if len(differing) != 1:
        return False
    along = differing[0]
    at = need.start[along]
    for box in parts:
        if box.start[along] != at:
            return False
        for d, n in enumerate(need.shape):
            if d != along and box.shape[d] != n:
                return False
        at += box.shape[along]
    return at == need.start[along] + need.shape[along]
