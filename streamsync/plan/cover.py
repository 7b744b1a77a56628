"""The proof: every byte a sink needs is held by a source, and asked for exactly once. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from streamsync.layout.region import Box
    from streamsync.plan.holders import Holders
    from streamsync.plan.match import Match
    from streamsync.plan.refusal import Findings
    from streamsync.plan.sources import Holding


class Cell(NamedTuple):
    """A box that one source rank can send whole: any of `ranks` (ascending numbers) holds it."""

    box: Box
    numel: int
    ranks: tuple[int, ...]


class Coverage:
    """Cuts what a sink needs into disjoint cells that together are all of it.

    Tensors that are cut alike on both sides, as those of all layers and experts are, are cut once.
    Findings: hole (bytes no source holds), overlap (elements that
    two of the sink's entries ask for).
    """

    def __init__(self, holders: Holders, findings: Findings) -> None:
        self._holders = holders
        self._findings = findings
        self._sets: dict[frozenset[int], tuple[int, ...]] = {}
        self._known: dict[
            tuple[tuple[Box, ...], int], tuple[tuple[Holding, ...], tuple[Cell, ...]]
        ] = {}

    def cells(self, match: Match) -> tuple[Cell, ...]:
        """The cells of one tensor, by entry and in order of their corners."""
        # By identity: tensors held alike have one tuple, and what is known keeps it alive.
        key = (match.boxes, id(match.holdings))
        known = self._known.get(key)
        if known is not None:
            return known[1]
        cells = self._cut(match)
        if cells is None:
            return ()
        self._known[key] = (match.holdings, cells)
        return cells

    def _cut(self, match: Match) -> tuple[Cell, ...] | None:
        name, shape = match.tensor.name, match.tensor.shape
        boxes = [box for box in match.boxes if box.numel]
        clash = first_overlap(boxes)
        if clash is not None:
            text = f"{name}: {extent(clash, shape)} in two of its entries"
            text += f"; the sink lists {_some([extent(box, shape) for box in boxes], 8)}"
            self._findings.add("overlap", name, text)
        cells: list[Cell] = []
        holes: list[Box] = []
        for box in boxes:
            parts, covered = split(box, match.holdings)
            if covered:
                for part, holders in parts:
                    held_by = {holding.holders for holding in holders}
                    cells.append(Cell(part, part.numel, self._ranks_of(frozenset(held_by))))
            else:
                holes.extend(without(box, [holding.box for holding in match.holdings]))
        if holes:
            self._findings.add("hole", name, self._hole(match, boxes, holes))
        return None if holes or clash is not None else tuple(cells)

    def _ranks_of(self, classes: frozenset[int]) -> tuple[int, ...]:
        """All ranks of some classes; one object per set."""
        ranks = self._sets.get(classes)
        if ranks is None:
            members = {rank for number in classes for rank in self._holders.classes[number].ranks}
            ranks = self._sets[classes] = tuple(sorted(members))
        return ranks

    def _hole(self, match: Match, boxes: Sequence[Box], holes: Sequence[Box]) -> str:
        tensor = match.tensor
        shape = tensor.shape
        text = f"{tensor.name} {tensor.wire_dtype}{list(shape)}: no source holds "
        text += _some([extent(box, shape) for box in holes], 4)
        text += f"; the sink needs {_some([extent(box, shape) for box in boxes], 2)}"
        if not match.holdings:
            return f"{text}; held by nobody"
        held: list[str] = []
        for holding in match.holdings:
            ranks = self._holders.classes[holding.holders].ranks
            names = _some([self._holders.ranks[rank] for rank in ranks], 2)
            held.append(f"{extent(holding.box, shape)} by {names}")
        return f"{text}; the sources hold {_some(held, 8)}"


def _some(items: Sequence[str], limit: int) -> str:
    shown = ", ".join(items[:limit])
    return shown + (f" and {len(items) - limit} more" if len(items) > limit else "")


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
