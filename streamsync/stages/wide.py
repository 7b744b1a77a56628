"""What a sink quantises itself: blocks that no source holds whole, brought together in staging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import nn

from streamsync.layout.binding import Binding, torch_dtype
from streamsync.layout.group import group_of
from streamsync.layout.landing import Landing
from streamsync.layout.region import Entry, TensorSpec, View, contiguous_strides
from streamsync.plan.conversion import Conversion
from streamsync.stages.compute import Origin
from streamsync.stages.quantise import Quantiser

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamsync.layout.region import Box
    from streamsync.plan.conversion import Wide
    from streamsync.plan.plan import Plan


def stage_wide(plan: Plan, binding: Binding) -> Binding:
    """The sink's `binding` with host memory for the wide tensors of `plan`, and the landings that
    quantise them from there into the sink's own; `binding` itself where there are none.

    The staging is allocated here, once per plan, and belongs to the landings, which come before
    those of `binding`, as these may read what they write.
    """
    if not plan.wide:
        return binding
    layout = binding.layout
    entries_of: dict[str, list[Entry]] = {}
    for entry in layout.entries:
        entries_of.setdefault(layout.tensors[entry.tensor].name, []).append(entry)
    specs: list[TensorSpec] = []
    entries: list[Entry] = []
    staging: list[torch.Tensor] = []
    parts: dict[str, list[_Part]] = {}
    for wide in plan.wide:
        origins: list[Origin] = []
        for box in wide.boxes:
            number = len(binding.storages) + len(staging)
            view = View(number, 0, contiguous_strides(box.shape))
            entries.append(Entry(len(layout.tensors) + len(specs), box, view))
            staging.append(torch.empty(box.shape, dtype=torch_dtype(wide.dtype)))
            origins.append(Origin(box, staging[-1], None))
        specs.append(TensorSpec(wide.name, wide.shape, wide.dtype))
        values = Conversion("values", wide.shape, wide.block)
        scales = Conversion("scales", wide.shape, wide.block)
        part = _Part(
            wide,
            origins,
            _Targets(binding, values, entries_of.get(wide.values, [])),
            _Targets(binding, scales, entries_of.get(wide.scales, [])),
        )
        parts.setdefault(group_of(wide.name), []).append(part)
    tensors, places = (*layout.tensors, *specs), (*layout.entries, *entries)
    return Binding(
        layout=msgspec.structs.replace(layout, tensors=tensors, entries=places),
        storages=(*binding.storages, *staging),
        landings=(*map(_landing, parts.values()), *binding.landings),
    )


@dataclass(slots=True, frozen=True)
class _Targets:
    """The sink's own memory of the values or of the scales: `entries` of `binding`."""

    binding: Binding
    conversion: Conversion
    entries: list[Entry]

    def within(self, blocks: Box) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """What the sink has of `blocks`: live memory, and its corner counted from theirs."""
        layout, dims = self.binding.layout, len(blocks.start)
        for entry in self.entries:
            spec = layout.tensors[entry.tensor]
            region = self.conversion.wire_box(blocks, len(spec.shape))
            common = region.intersect(entry.box)
            if common is not None:
                view = entry.view.within(entry.box, common)
                live = self.binding.view(view, common.shape, torch_dtype(spec.dtype))
                begin = [a - b for a, b in zip(common.start, region.start, strict=True)]
                if len(begin) < dims:  # scales of rows, without the dim that has one block
                    live, begin = live.unsqueeze(-1), [*begin, 0]
                yield tuple(begin), live


@dataclass(slots=True, frozen=True)
class _Part:
    """One wide tensor: its boxes in staging, and where they go."""

    wide: Wide
    origins: list[Origin]
    values: _Targets
    scales: _Targets

    def quantise(self) -> None:
        for origin in self.origins:
            blocks = self.values.conversion.blocks(origin.box)
            Quantiser(origin.box.shape, self.wide.block).run(
                origin.read,
                origin.live.device,
                values=self.values.within(blocks),
                scales=self.scales.within(blocks),
            )


def _landing(parts: list[_Part]) -> Landing:
    """The one landing of a group's wide tensors, so that it is over before another one begins."""

    def work() -> None:
        for part in parts:
            part.quantise()

    # What it writes are tensors of the binding, not parameters of a module.
    return Landing(
        names=tuple(part.wide.name for part in parts),
        staging=tuple(origin.live for part in parts for origin in part.origins),
        module=nn.Module(),
        parameters=(),
        work=work,
        makes=tuple(n for part in parts for n in (part.wide.values, part.wide.scales) if n),
    )
