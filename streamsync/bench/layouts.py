"""Layouts of every rank of a cluster, from a config and its parallelism. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamsync.models.engine import engine_key, engine_layout
from streamsync.models.trainer import trainer_key, trainer_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from streamsync.layout.region import Layout
    from streamsync.models.model import Model
    from streamsync.models.parallelism import Parallelism


@dataclass(frozen=True, slots=True)
class Side:
    """The ranks of a trainer, or of one engine: rank `r` has `layouts[numbers[r]]`."""

    layouts: Sequence[Layout]
    numbers: Sequence[int]


def trainer_side(model: Model, parallelism: Parallelism) -> Side:
    """Every rank of a trainer, each different layout made once."""
    return _side(model, parallelism, parallelism.num_ranks, trainer_key, trainer_layout)


def engine_side(model: Model, parallelism: Parallelism) -> Side:
    """Every rank of one engine, whatever the number of replicas."""
    return _side(model, parallelism, parallelism.replica_ranks, engine_key, engine_layout)


def _side(
    model: Model,
    parallelism: Parallelism,
    num_ranks: int,
    key: Callable[[Parallelism, int], tuple[int, ...]],
    layout: Callable[[Model, Parallelism, int], Layout],
) -> Side:
    numbers: dict[tuple[int, ...], int] = {}
    layouts: list[Layout] = []
    of_ranks: list[int] = []
    for rank in range(num_ranks):
        place = key(parallelism, rank)
        if place not in numbers:
            numbers[place] = len(layouts)
            layouts.append(layout(model, parallelism, rank))
        of_ranks.append(numbers[place])
    return Side(layouts, of_ranks)
