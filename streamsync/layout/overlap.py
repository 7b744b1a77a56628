"""Which memory views cover: whether a layout's views share any, which a sink's never may."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from streamsync.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from streamsync.layout.binding import Binding
    from streamsync.layout.region import Entry, Layout, View


def check_writable(binding: Binding) -> None:
    """Raises `LayoutError` when two elements of the binding's views lie in the same memory."""
    for one, other in overlaps(binding):
        raise LayoutError(
            f"its memory is also that of {other}, and not as a tie: a sync would write it twice"
            if one != other
            else "two of its elements share memory (an expanded view?): make it contiguous first",
            tensor=one,
        )


def overlaps(binding: Binding) -> list[tuple[str, str]]:
    """The pairs of tensors whose views share memory; a tensor with itself when its own do.

    Addresses are compared, not storages, so that memory wrapped twice is seen. Views whose ranges
    are apart cost one comparison; only interleaved ones are compared run by run, exactly.
    """
    layout = binding.layout
    bases = binding.addresses()
    spans: list[tuple[str, int, int, int]] = []
    for number, entry in enumerate(layout.entries):
        itemsize = layout.tensors[entry.tensor].itemsize
        begin = bases[entry.view.storage] + entry.view.offset * itemsize
        end = begin + itemsize * (1 + _reach(entry.box.shape, entry.view))
        spans.append((str(binding.storages[entry.view.storage].device), begin, end, number))
    spans.sort()
    found: list[tuple[str, str]] = []
    cluster: list[tuple[int, int]] = []
    device, stop = "", 0
    for now, begin, end, number in spans:
        if now != device or begin >= stop:
            found += _clashes(layout, cluster)
            cluster, device, stop = [], now, 0
        cluster.append((begin, number))
        stop = max(stop, end)
    return found + _clashes(layout, cluster)


def _reach(shape: tuple[int, ...], view: View) -> int:
    return sum((n - 1) * s for n, s in zip(shape, view.strides, strict=True))


def _clashes(layout: Layout, cluster: list[tuple[int, int]]) -> list[tuple[str, str]]:
    """Which of the entries (address, number), whose ranges overlap, have a byte in common."""
    if len(cluster) == 1 and _is_injective(layout.entries[cluster[0][1]]):
        return []
    starts: list[torch.Tensor] = []
    lengths: list[torch.Tensor] = []
    numbers: list[torch.Tensor] = []
    for begin, number in cluster:
        entry = layout.entries[number]
        itemsize = layout.tensors[entry.tensor].itemsize
        start, run = _runs(entry.box.shape, entry.view)
        start = start * itemsize + begin
        starts.append(start)
        lengths.append(torch.full_like(start, run * itemsize))
        numbers.append(torch.full_like(start, number))
    if not starts:
        return []
    begin_at, order = torch.cat(starts).sort()
    # A long run may reach over several short ones, so compare with the furthest end so far.
    end_at, furthest = (begin_at + torch.cat(lengths)[order]).cummax(0)
    owner = torch.cat(numbers)[order]
    clash = end_at[:-1] > begin_at[1:]
    one, other = owner[furthest[:-1]][clash].tolist(), owner[1:][clash].tolist()
    names = {n: layout.tensors[layout.entries[n].tensor].name for n in {*one, *other}}
    return sorted({(names[a], names[b]) for a, b in zip(one, other, strict=True)})


def count_elements(views: Iterable[tuple[tuple[int, ...], View]]) -> int:
    """How many elements of one storage the views (shape, view) cover; common ones count once."""
    spans = [(_runs(shape, view), view.offset) for shape, view in views]
    if not spans:
        return 0
    starts = torch.cat([start + offset for (start, _), offset in spans])
    stops = torch.cat([start + offset + run for (start, run), offset in spans])
    starts, order = starts.sort()
    reached = stops[order].cummax(0).values
    before = torch.cat([starts[:1], reached[:-1]])
    return int((reached - torch.maximum(starts, before)).clamp(min=0).sum())


def have_common(one: tuple[tuple[int, ...], View], other: tuple[tuple[int, ...], View]) -> bool:
    """Whether two views (shape, view) of one storage have an element in common."""
    (a, av), (b, bv) = one, other
    if av.offset > bv.offset + _reach(b, bv) or bv.offset > av.offset + _reach(a, av):
        return False
    return count_elements((one, other)) < count_elements((one,)) + count_elements((other,))


def _runs(shape: tuple[int, ...], view: View) -> tuple[torch.Tensor, int]:
    """The elements of a view as runs: where each begins, from the view's offset, and how long."""
    run = 1
    start = torch.zeros(1, dtype=torch.int64)
    for stride, n in _by_stride(shape, view):
        if stride == run:
            run *= n
            continue
        steps = torch.arange(n) * stride
        start = (start[:, None] + steps[None, :]).reshape(-1)
    return start, run


def _by_stride(shape: tuple[int, ...], view: View) -> list[tuple[int, int]]:
    return sorted((s, n) for n, s in zip(shape, view.strides, strict=True) if n > 1)


def _is_injective(entry: Entry) -> bool:
    """Whether every stride steps over all that the smaller ones reach (enough, not necessary)."""
    reach = 0
    for stride, n in _by_stride(entry.box.shape, entry.view):
        if stride <= reach:
            return False
        reach += stride * (n - 1)
    return True
