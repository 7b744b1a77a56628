"""From what a loader wrote, and in which order, to a layout: what is geometry and what is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamsync.layout.binding import Binding
from streamsync.layout.group import group_of
from streamsync.layout.overlap import count_elements, have_common, overlaps
from streamsync.layout.region import (
    Box,
    Entry,
    Layout,
    TensorSpec,
    View,
    contiguous_strides,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from streamsync.layout.intercept import Intercept, Owner, Write


class Records:
    """One finished recording. `own` is the module's own binding, `tensors` the checkpoint's.

    `opaque` has the checkpoint tensors that only the loader can deliver, with the reason; `loaded`
    has, by the module's names, the checkpoint tensors that have a part in a tensor. `filled` and
    `unwritten`: see `Recording`.
    """

    def __init__(
        self, own: Binding, recorder: Intercept, tensors: Mapping[str, TensorSpec]
    ) -> None:
        self._own = own
        self._tensors = tensors
        self._empty = recorder.empty
        self._places: dict[str, dict[tuple[Box, View], Owner]] = {}
        self.loaded: dict[str, set[str]] = {}
        for write in recorder.writes:
            if write.fragment is not None:
                places = self._places.setdefault(write.fragment.name, {})
                places[write.fragment.box, write.view] = write.owner
                self._note(write.owner.name, {write.fragment.name})
        for refusal in recorder.refusals:
            for owner in refusal.owners:
                self._note(owner, refusal.probes)
        self.opaque: dict[str, str] = {}
        self._refuse(recorder)
        self._refuse_overlaps(recorder.writes)
        self._refuse_neighbours()
        self.filled, self.unwritten = self._count(recorder.writes)

    def _note(self, owner: str, names: set[str] | frozenset[str]) -> None:
        self.loaded.setdefault(owner, set()).update(names)

    # ---- what is opaque

    def _refuse(self, recorder: Intercept) -> None:
        for refusal in recorder.refusals:
            names = refusal.probes.union(*(self.loaded[owner] for owner in refusal.owners))
            about = f" ({', '.join(sorted(refusal.owners))})"
            for name in names:
                self.opaque.setdefault(name, refusal.reason + about)
        for name, places in self._places.items():
            dtypes = {owner.spec.dtype for owner in places.values()}
            if len(dtypes) > 1:
                self.opaque.setdefault(name, f"it is loaded as {' and as '.join(sorted(dtypes))}")

    def _refuse_overlaps(self, writes: Sequence[Write]) -> None:
        before: dict[str, list[Write]] = {}
        for write in writes:
            earlier = before.setdefault(write.owner.name, [])
            if write.fragment is not None:
                earlier.append(write)
                continue
            for copy in earlier:
                # A fill that copies follow leaves nothing behind but padding; this one undoes some.
                if have_common((copy.shape, copy.view), (write.shape, write.view)):
                    assert copy.fragment is not None
                    self.opaque.setdefault(
                        copy.fragment.name,
                        f"the loader fills a part of what it copied ({write.owner.name})",
                    )
        layout = self.layout(())
        for pair in overlaps(Binding(layout=layout, storages=self._own.storages)):
            for name in pair:
                other = pair[0] if name == pair[1] else pair[1]
                self.opaque.setdefault(name, f"{other} is loaded into the same memory")

    def _refuse_neighbours(self) -> None:
        """Whatever shares a parameter with an opaque tensor goes the same way, so that nothing is
        copied there that a late run of the loader would undo."""
        for names in _joined(self.loaded.values()):
            if because := sorted(names & self.opaque.keys()):
                for name in names:
                    self.opaque.setdefault(name, f"it shares a parameter with {because[0]}")

    def opaque_together(self) -> Iterator[tuple[list[str], list[str]]]:
        """The opaque tensors that the loader must get at once, in the checkpoint's order, and the
        module's names of what it makes of them: those of one group, or of one parameter."""
        together = [names & self.opaque.keys() for names in self.loaded.values()]
        groups: dict[str, set[str]] = {}
        for name in self.opaque:
            groups.setdefault(group_of(name), set()).add(name)
        known = {spec.name for spec in self._own.layout.tensors}
        for names in _joined([*together, *groups.values()]):
            owners = [o for o, loaded in self.loaded.items() if loaded & names and o in known]
            yield [name for name in self._tensors if name in names], owners

    # ---- what is covered

    def _count(self, writes: Sequence[Write]) -> tuple[dict[str, int], dict[str, int]]:
        filled: dict[str, int] = {}
        unwritten: dict[str, int] = {}
        by_owner: dict[str, list[Write]] = {}
        for write in writes:
            by_owner.setdefault(write.owner.name, []).append(write)
        for spec in self._own.layout.tensors:
            if spec.name in self._own.layout.ties or self.loaded.get(spec.name, set()) & (
                self.opaque.keys()
            ):
                continue  # what the loader makes of opaque tensors only it knows
            mine = by_owner.get(spec.name, ())
            copied = count_elements((w.shape, w.view) for w in mine if w.fragment is not None)
            touched = copied
            if any(write.fragment is None for write in mine):
                touched = count_elements((w.shape, w.view) for w in mine)
            if touched > copied:
                filled[spec.name] = touched - copied
            if left := Box.whole(spec.shape).numel - touched:
                unwritten[spec.name] = left
        return filled, unwritten

    # ---- the layout

    def layout(self, staged: Sequence[str]) -> Layout:
        """The layout in the module's order; equal places are ties.

        Opaque tensors named by `staged` have one entry each, in storages behind the module's own;
        others are left out.
        """
        own = self._own.layout
        numbers = {spec.name: number for number, spec in enumerate(own.tensors)}
        spare = {name: len(self._own.storages) + i for i, name in enumerate(staged)}
        first: dict[str, int] = {}
        for owner, names in self.loaded.items():
            for name in names:
                number = numbers.get(owner, len(numbers))
                first[name] = min(first.get(name, len(numbers)), number)

        def order(name: str) -> tuple[int, int, str]:
            offset = min((view.offset for _, view in self._places.get(name, ())), default=0)
            return first.get(name, len(numbers)), offset, name

        plain = (self._places.keys() | self._empty) - self.opaque.keys()
        specs: list[TensorSpec] = []
        entries: list[Entry] = []
        ties: dict[str, str] = {}
        owners: dict[frozenset[tuple[Box, View]], str] = {}
        for name in sorted(plain | spare.keys(), key=order):
            spec = self._tensors[name]
            if name in spare:
                view = View(spare[name], 0, contiguous_strides(spec.shape))
                entries.append(Entry(len(specs), Box.whole(spec.shape), view))
                specs.append(spec)
                continue
            places = self._places.get(name, {})
            dtype = next((owner.spec.dtype for owner in places.values()), spec.dtype)
            specs.append(TensorSpec(name, spec.shape, dtype))
            if places and owners.setdefault(frozenset(places), name) != name:
                ties[name] = owners[frozenset(places)]
                continue
            entries += [Entry(len(specs) - 1, box, view) for box, view in places]
        opaque = tuple(spec.name for spec in specs if spec.name in spare)
        return Layout(tensors=tuple(specs), entries=tuple(entries), ties=ties, opaque=opaque)


def _joined(sets: Iterable[set[str]]) -> list[set[str]]:
    """The sets, with those joined that have a name in common, as long as there are any."""
    at: dict[str, int] = {}
    joined: dict[int, set[str]] = {}
    for number, names in enumerate(sets):
        merged = set(names)
        for other in {at[name] for name in names if name in at}:
            merged |= joined.pop(other)
        at |= dict.fromkeys(merged, number)
        if merged:
            joined[number] = merged
    return list(joined.values())
