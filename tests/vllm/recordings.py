"""Recordings of vLLM's loaders in files, so that they can be looked at where no vLLM is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from streamsync.layout.region import Entry, Layout, TensorSpec
from tests.vllm.models import Cut

FOLDER = Path(__file__).parent / "recordings"


class Engine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: the entries of each of its ranks, whose tensors are counted in the file's."""

    tp: int
    pp: int
    ep: bool
    ranks: tuple[tuple[Entry, ...], ...]

    @property
    def cut(self) -> Cut:
        return Cut(self.tp, self.pp, self.ep)


class Recorded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What vLLM `vllm` did on the day `date` with a model of `config`."""

    vllm: str
    date: str
    config: dict[str, Any]
    tensors: tuple[TensorSpec, ...]
    engines: tuple[Engine, ...]

    def layouts(self, engine: Engine) -> list[Layout]:
        """The layouts of the engine's ranks, as they were recorded."""
        layouts = []
        for entries in engine.ranks:
            numbers = {
                number: i for i, number in enumerate(dict.fromkeys(e.tensor for e in entries))
            }
            layouts.append(
                Layout(
                    tensors=tuple(self.tensors[number] for number in numbers),
                    entries=tuple(Entry(numbers[e.tensor], e.box, e.view) for e in entries),
                )
            )
        return layouts


def counted_in(layout: Layout, tensors: tuple[TensorSpec, ...]) -> tuple[Entry, ...]:
    """The entries of `layout`, with their tensors counted in `tensors`."""
    assert not layout.opaque
    assert not layout.ties
    numbers = {spec.name: number for number, spec in enumerate(tensors)}
    for spec in layout.tensors:
        assert tensors[numbers[spec.name]] == spec
    return tuple(
        Entry(numbers[layout.tensors[e.tensor].name], e.box, e.view) for e in layout.entries
    )


def read(family: str) -> Recorded:
    """The recording of `family`."""
    return msgspec.json.decode((FOLDER / f"{family}.json").read_bytes(), type=Recorded)


def write(family: str, recorded: Recorded) -> None:
    """Replaces the recording of `family`; a line per rank."""
    text = msgspec.json.encode(recorded).decode()
    for opening in ('"tensors":', '"engines":', '{"tp"', "[[["):
        text = text.replace(opening, f"\n{opening}")
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{family}.json").write_text(text + "\n")
