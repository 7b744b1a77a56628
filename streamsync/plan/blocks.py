"""Who quantises which blocks: a source that holds them whole, else the sink. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from streamsync.plan.conversion import Conversion, Wide, wide_name
from streamsync.plan.cover import without
from streamsync.plan.match import Match
from streamsync.plan.plan import SharedTensor
from streamsync.plan.sources import Holding

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from streamsync.layout.region import Box
    from streamsync.plan.conversion import Role


class _Division(NamedTuple):
    """What the sources make of the values and of the scales, what the sink needs of that, and the
    boxes of the source's tensor that it quantises itself."""

    values: tuple[Holding, ...]
    scales: tuple[Holding, ...]
    value_boxes: tuple[Box, ...]
    scale_boxes: tuple[Box, ...]
    wide: tuple[Box, ...]


def divide_blocks(
    matches: Iterable[Match], roles: Mapping[str, Role]
) -> tuple[list[Match], tuple[Wide, ...]]:
    """`matches`, of which the quantised ones come with the holdings of the tensor that they are
    made of, in the coordinates of the wire, and what the sink quantises itself.

    A block that no source holds whole travels in the source's own dtype, to every sink that has a
    part of it or of its scale. Tensors that are cut alike are divided once.
    """
    matches = list(matches)
    quantised = {m.tensor.name: m for m in matches if m.tensor.conversion is not None}
    known: dict[tuple[object, ...], _Division] = {}
    done: dict[str, _Division] = {}
    divided: list[Match] = []
    wides: list[Wide] = []
    for match in matches:
        tensor = match.tensor
        if tensor.conversion is None:
            divided.append(match)
            continue
        role = roles[tensor.name]
        division = done.get(role.values)
        if division is None:
            values, scales = quantised.get(role.values), quantised.get(role.scales)
            boxes = tuple(() if m is None else m.boxes for m in (values, scales))
            dims = 0 if scales is None else len(scales.tensor.shape)
            key = (
                tensor.conversion.shape,
                tensor.conversion.block,
                dims,
                boxes,
                id(match.holdings),
            )
            if key not in known:
                known[key] = _divide(tensor.conversion, dims, boxes, match.holdings)
            division = done[role.values] = known[key]
            if division.wide:
                wide = SharedTensor(
                    wide_name(role.values),
                    tensor.source_name,
                    tensor.conversion.shape,
                    tensor.source_dtype,
                    tensor.source_dtype,
                )
                divided.append(Match(wide, division.wide, match.holdings))
                wides.append(
                    Wide(
                        wide.name,
                        "" if values is None else role.values,
                        "" if scales is None else role.scales,
                        wide.wire_dtype,
                        wide.shape,
                        tensor.conversion.block,
                        division.wide,
                    )
                )
        if tensor.conversion.part == "values":
            made = Match(tensor, division.value_boxes, division.values)
        else:
            made = Match(tensor, division.scale_boxes, division.scales)
        if made.boxes:
            divided.append(made)
    return divided, tuple(wides)


def _divide(
    conversion: Conversion, dims: int, boxes: tuple[tuple[Box, ...], ...], held: Iterable[Holding]
) -> _Division:
    """`boxes` are those of values and of scales (which have so many dims) that the sink needs."""
    values = Conversion("values", conversion.shape, conversion.block)
    scales = Conversion("scales", conversion.shape, conversion.block)
    whole = [(values.whole_blocks(holding.box), holding.holders) for holding in held]
    made = [(blocks, holders) for blocks, holders in whole if blocks is not None]
    needed = [
        c.blocks(b) for c, own in ((values, boxes[0]), (scales, boxes[1])) for b in own if b.numel
    ]
    missing: list[Box] = []
    for blocks in needed:
        missing += without(blocks, [*(box for box, _ in made), *missing])

    def left(conversion: Conversion, boxes: tuple[Box, ...]) -> tuple[Box, ...]:
        if not missing:
            return boxes
        return tuple(
            part
            for box in boxes
            for part in without(box, [conversion.wire_box(m, len(box.start)) for m in missing])
        )

    return _Division(
        tuple(Holding(values.elements(blocks), holders) for blocks, holders in made),
        tuple(Holding(scales.wire_box(blocks, dims), holders) for blocks, holders in made),
        left(values, boxes[0]),
        left(scales, boxes[1]),
        tuple(values.elements(blocks) for blocks in missing),
    )
