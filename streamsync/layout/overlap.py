"""Whether a layout's views share memory: what a sink must never do, except for ties."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from streamsync.errors import LayoutError

if TYPE_CHECKING:
    from streamsync.layout.binding import Binding
    from streamsync.layout.region import View


def check_writable(binding: Binding) -> None:
    """Raises `LayoutError` when two elements of the binding's views lie in the same memory.

    Addresses are compared, not storages, so that memory wrapped twice is seen. Views whose ranges
    are apart cost one comparison; only interleaved ones are compared run by run, exactly.
    """
    layout = binding.layout
    bases = binding.addresses()
    spans: list[tuple[object, int, int, int]] = []
    for number, entry in enumerate(layout.entries):
        itemsize = layout.tensors[entry.tensor].itemsize
        begin = bases[entry.view.storage] + entry.view.offset * itemsize
        end = begin + itemsize * (1 + _reach(entry.box.shape, entry.view))
        spans.append((str(binding.storages[entry.view.storage].device), begin, end, number))
    spans.sort()
    cluster: list[tuple[int, int]] = []
    device: object = None
    stop = 0
    for now, begin, end, number in spans:
        if now != device or begin >= stop:
            _check_cluster(binding, cluster)
            cluster, device, stop = [], now, 0
        cluster.append((begin, number))
        stop = max(stop, end)
    _check_cluster(binding, cluster)


def _reach(shape: tuple[int, ...], view: View) -> int:
    return sum((n - 1) * s for n, s in zip(shape, view.strides, strict=True))


def _check_cluster(binding: Binding, cluster: list[tuple[int, int]]) -> None:
    layout = binding.layout
    starts: list[torch.Tensor] = []
    lengths: list[torch.Tensor] = []
    numbers: list[torch.Tensor] = []
    for begin, number in cluster:
        entry = layout.entries[number]
        tensor = layout.tensors[entry.tensor]
        dims = sorted(
            (s, n) for n, s in zip(entry.box.shape, entry.view.strides, strict=True) if n > 1
        )
        dense = 1  # elements from which a larger stride leaves everything so far behind it
        run = 1
        apart = True
        rest: list[tuple[int, int]] = []
        for stride, n in dims:
            apart &= stride >= dense
            if not rest and stride == run:
                run *= n
            else:
                rest.append((stride, n))
            dense = max(dense, stride * (n - 1) + dense)
        if apart and len(cluster) == 1:
            return
        if any(stride == 0 for stride, _ in dims):
            raise LayoutError(
                "an expanded tensor (stride 0) can't be written; make it contiguous first",
                tensor=tensor.name,
            )
        start = torch.tensor([begin])
        for stride, n in rest:
            steps = torch.arange(n) * (stride * tensor.itemsize)
            start = (start[:, None] + steps[None, :]).reshape(-1)
        starts.append(start)
        lengths.append(torch.full_like(start, run * tensor.itemsize))
        numbers.append(torch.full_like(start, number))
    if not starts:
        return
    begin_at, order = torch.cat(starts).sort()
    end_at = begin_at + torch.cat(lengths)[order]
    clash = (end_at[:-1] > begin_at[1:]).nonzero()
    if len(clash) == 0:
        return
    at = int(clash[0])
    owner = torch.cat(numbers)[order]
    one, other = (layout.tensors[layout.entries[int(owner[i])].tensor].name for i in (at, at + 1))
    raise LayoutError(
        f"its memory is also that of {other}, and not as a tie: a sync would write it twice"
        if one != other
        else "two of its elements share memory: make it contiguous first",
        tensor=one,
    )
