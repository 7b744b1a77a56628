"""Where the pieces of a share lie at one end: boxes back to views, through that end's layout. Pure.

A source resolves what a sink asks for through its own layout alone, so that nothing else can ever
be read or sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamsync.errors import PlanError
from streamsync.layout.region import View

if TYPE_CHECKING:
    from streamsync.layout.region import Box, Entry, Layout
    from streamsync.plan.plan import Share, SharedTensor

Views = list[list[View]]
"""One view per piece, in lists per bucket."""


class Places:
    """A layout, indexed by name for many shares."""

    def __init__(self, layout: Layout) -> None:
        entries: dict[int, list[Entry]] = {}
        for entry in layout.entries:
            entries.setdefault(entry.tensor, []).append(entry)
        self._held = {
            layout.tensors[n].name: (layout.tensors[n], own) for n, own in entries.items()
        }
        if layout.ties:
            specs = {spec.name: spec for spec in layout.tensors}
            for alias, name in layout.ties.items():
                if name in self._held:
                    self._held[alias] = (specs[alias], self._held[name][1])

    def resolve(self, share: Share, *, at_source: bool) -> Views:
        """The view of every piece of `share`: of its source name here, or of its own name at the
        sink; an alias resolves to the memory it is tied to. At a source, a piece that is computed
        resolves to the view of what it is made of.

        Raises `PlanError` for a box that no single entry of the layout contains, and for a tensor
        of another shape or dtype.
        """
        ends = [
            (
                self._entries_of(tensor, share, at_source=at_source),
                tensor.conversion if at_source else None,
            )
            for tensor in share.tensors
        ]
        views: Views = []
        for bucket in share.buckets:
            found: list[View] = []
            for piece in bucket.pieces:
                box = piece.box
                entries, conversion = ends[piece.tensor]
                if conversion is not None:
                    box = conversion.source_box(box)
                view = _view(entries, box)
                if view is None:
                    tensor = share.tensors[piece.tensor]
                    raise PlanError(
                        f"{_end(share, at_source=at_source)} holds {box} of it in no single place; "
                        "the layout has changed or the peer is broken: plan again",
                        tensor=tensor.source_name if at_source else tensor.name,
                        bucket=bucket.index,
                    )
                found.append(view)
            views.append(found)
        return views

    def _entries_of(self, tensor: SharedTensor, share: Share, *, at_source: bool) -> list[Entry]:
        name = tensor.source_name if at_source else tensor.name
        shape, dtype = tensor.shape, tensor.wire_dtype
        if at_source:
            dtype = tensor.source_dtype
            if tensor.conversion is not None:
                shape = tensor.conversion.shape
        spec, entries = self._held.get(name, (None, []))
        if spec is None or (spec.shape, spec.dtype) != (shape, dtype):
            here = "nothing" if spec is None else f"{spec.dtype}{list(spec.shape)}"
            raise PlanError(
                f"{_end(share, at_source=at_source)} holds {here} under this name, the share says "
                f"{dtype}{list(shape)}; the layout has changed or the peer is broken: plan again",
                tensor=name,
            )
        return entries


def resolve(share: Share, layout: Layout, *, at_source: bool) -> Views:
    """`Places.resolve` of a layout that serves one share only."""
    return Places(layout).resolve(share, at_source=at_source)


def _view(entries: list[Entry], box: Box) -> View | None:
    """The view of `box` in the first of `entries` that contains it, None if none does."""
    start, shape = box.start, box.shape
    for entry in entries:
        outer, view = entry.box, entry.view
        first, size, strides = outer.start, outer.shape, view.strides
        if start == first and shape == size:
            return view
        # One call per piece: this is quicker than the boxes' own methods.
        offset = view.offset
        for dim, at in enumerate(start):
            shift = at - first[dim]
            if shift < 0 or shift + shape[dim] > size[dim]:
                break
            offset += shift * strides[dim]
        else:
            return View(view.storage, offset, strides)
    return None


def _end(share: Share, *, at_source: bool) -> str:
    return f"source {share.source}" if at_source else f"sink {share.sink}"
