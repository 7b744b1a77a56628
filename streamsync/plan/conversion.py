"""The geometry of quantisation: which box of the source a box on the wire is made of. Pure.

The values themselves are defined in `stages.quantise`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from streamsync.errors import ConfigError
from streamsync.layout.region import Box, Entry, Layout

if TYPE_CHECKING:
    from collections.abc import Iterable

    from streamsync.layout.region import TensorSpec

Part = Literal["values", "scales"]
FP8: Final = "float8_e4m3fn"
Scheme = Literal["fp8_block", "fp8_channel"]
WIDE_DTYPES: Final = ("float32", "bfloat16", "float16")
"""Dtypes that can be quantised."""
_SCALE_NAMES: Final[dict[Scheme, str]] = {
    "fp8_block": "{name}_scale_inv",  # as in DeepSeek-V3 checkpoints
    "fp8_channel": "{name}_scale",  # as in compressed-tensors checkpoints
}


class QuantRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Allows sink tensors in float8_e4m3fn whose names match `pattern` (fnmatch) to be quantised
    from a source's float32, bfloat16 or float16.

    With `fp8_block` each `block` (rows, columns) has a float32 scale, with `fp8_channel` each row.
    The scales are a tensor of the sink, too: [blocks down, blocks across], or [rows] or [rows, 1];
    `scale` is its name ("" is the scheme's usual one), made of the values' `{name}`. A tensor of
    more than two dims is a stack of matrices.
    """

    pattern: str = "*"
    scheme: Scheme = "fp8_block"
    block: tuple[int, int] = (128, 128)
    scale: str = ""

    def __post_init__(self) -> None:
        if min(self.block) < 1:
            raise ConfigError(f"QuantRule.block must be at least 1 x 1, got {self.block}")

    def scale_name(self, name: str) -> str:
        """The name of the scales of the values called `name`."""
        return (self.scale or _SCALE_NAMES[self.scheme]).replace("{name}", name)

    def block_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The block of a tensor of `shape` (at least two dims), dim by dim; none is longer than its
        dim."""
        rows, columns = self.block if self.scheme == "fp8_block" else (1, shape[-1])
        stack = (1,) * (len(shape) - 2)
        return (*stack, min(rows, max(shape[-2], 1)), min(columns, max(shape[-1], 1)))


class Conversion(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a tensor on the wire is made of one at the source of global `shape`: it is the quantised
    `values`, or the `scales` of its blocks. `block` has one length per dim."""

    part: Part
    shape: tuple[int, ...]
    block: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of blocks in each dim."""
        return tuple(-(-n // b) for n, b in zip(self.shape, self.block, strict=True))

    @property
    def wire_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes that the tensor on the wire may have."""
        if self.part == "values":
            return (self.shape,)
        return (self.grid, self.grid[:-1]) if self.grid[-1] == 1 else (self.grid,)

    def blocks(self, wire: Box) -> Box:
        """The blocks, counted in each dim, that a box on the wire has a part of."""
        if self.part == "scales":
            missing = len(self.shape) - len(wire.start)  # [rows] for [rows, 1]
            return Box(wire.start + (0,) * missing, wire.shape + (1,) * missing)
        first = tuple(a // b for a, b in zip(wire.start, self.block, strict=True))
        stop = tuple(-(-z // b) for z, b in zip(wire.stop, self.block, strict=True))
        return Box(first, tuple(z - a for a, z in zip(first, stop, strict=True)))

    def whole_blocks(self, held: Box) -> Box | None:
        """The blocks, counted in each dim, that lie in a box of the source; None if none does."""
        first = tuple(-(-a // b) for a, b in zip(held.start, self.block, strict=True))
        stop = tuple(
            grid if z == n else z // b
            for z, n, b, grid in zip(held.stop, self.shape, self.block, self.grid, strict=True)
        )
        if any(a >= z for a, z in zip(first, stop, strict=True)):
            return None
        return Box(first, tuple(z - a for a, z in zip(first, stop, strict=True)))

    def elements(self, blocks: Box) -> Box:
        """The source's elements of `blocks`."""
        start = tuple(a * b for a, b in zip(blocks.start, self.block, strict=True))
        stop = tuple(
            min(z * b, n) for z, b, n in zip(blocks.stop, self.block, self.shape, strict=True)
        )
        return Box(start, tuple(z - a for a, z in zip(start, stop, strict=True)))

    def source_box(self, wire: Box) -> Box:
        """What a source must hold to make the box `wire`: whole blocks."""
        return self.elements(self.blocks(wire))

    def wire_box(self, blocks: Box, dims: int) -> Box:
        """The box on the wire (of so many dims) that `blocks` make."""
        if self.part == "values":
            return self.elements(blocks)
        return Box(blocks.start[:dims], blocks.shape[:dims])


class Role(NamedTuple):
    """What a sink tensor is to quantisation: a part of the quantised tensor `values`."""

    values: str
    scales: str
    conversion: Conversion


def roles(tensors: Iterable[TensorSpec], rules: Iterable[QuantRule]) -> dict[str, Role]:
    """The role of each of a sink's `tensors` that has one, by name; the first rule that matches
    counts. The scales of a listed tensor have theirs whether or not they are listed, too."""
    rules = list(rules)
    if not rules:
        return {}
    found: dict[str, Role] = {}
    for spec in tensors:
        if spec.dtype != FP8 or len(spec.shape) < 2:
            continue
        rule = next((r for r in rules if fnmatchcase(spec.name, r.pattern)), None)
        if rule is not None:
            scales, block = rule.scale_name(spec.name), rule.block_of(spec.shape)
            found[spec.name] = Role(spec.name, scales, Conversion("values", spec.shape, block))
            found[scales] = Role(spec.name, scales, Conversion("scales", spec.shape, block))
    return found


def with_blocks(layout: Layout, rules: Iterable[QuantRule]) -> Layout:
    """A sink's `layout` as what it needs of the sources: where these may quantise, the whole blocks
    of the values that its boxes have a part of. Its views mean nothing."""
    known = roles(layout.tensors, rules)
    if not known:
        return layout
    numbers = {spec.name: number for number, spec in enumerate(layout.tensors)}
    entries: list[Entry] = []
    for entry in layout.entries:
        spec = layout.tensors[entry.tensor]
        role = known.get(spec.name)
        if role is None or role.conversion.part == "scales":
            entries.append(entry)  # scales, too: a source may hold fp8 already
        if role is not None and spec.shape in role.conversion.wire_shapes:
            box = role.conversion.source_box(entry.box)
            entries.append(Entry(numbers[role.values], box, entry.view))
    return Layout(tensors=layout.tensors, entries=tuple(entries), ties=layout.ties)


class Wide(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Blocks of a tensor that no source holds whole: a cut of the sources goes through them.

    They travel in the source's `dtype` as a tensor called `name` of the source's global `shape`,
    and the sink quantises them once they are whole. `boxes`, disjoint, are of whole blocks;
    `values` and `scales` name the sink's tensors that they end up in ("" where it needs none).
    """

    name: str
    values: str
    scales: str
    dtype: str
    shape: tuple[int, ...]
    block: tuple[int, ...]
    boxes: tuple[Box, ...]


def wide_name(values: str) -> str:
    """What the wide part of the tensor `values` is called: it must be of the same group."""
    return f"{values}@wide" if "." in values else f"{values}.wide"
