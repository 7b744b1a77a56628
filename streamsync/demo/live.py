"""The live view: what every stage, the trainer and the engine do right now, in a terminal."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from streamsync.demo.ledger import ENGINE, Ledger
from streamsync.demo.screen import Screen
from streamsync.types import STAGE_NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from streamsync.demo.options import DemoOptions
    from streamsync.observability.probe import Event
    from streamsync.types import Version

_BAR_CELLS: Final = 40
_RATE_SECONDS: Final = 5.0


class LiveScreen(Screen):
    """Lines that stay scroll above a view that moves. Draws only when told to."""

    def __init__(self, options: DemoOptions, ledger: Ledger, stream: TextIO) -> None:
        self._title = f"{options.model}: {options.source_ranks} trainer ranks, 1 engine"
        self._ledger = ledger
        self._live = Live(
            console=Console(file=stream), auto_refresh=False, transient=True, redirect_stderr=False
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def line(self, text: str) -> None:
        """Puts a line above the view."""
        self._live.console.print(Text(text))

    def refresh(self) -> None:
        """Draws the view from the ledger."""
        self._live.update(view(self._title, self._ledger, time.monotonic()), refresh=True)


def view(title: str, ledger: Ledger, now: float) -> Group:
    """The moving part at `now` (monotonic seconds)."""
    events = ledger.all_events()
    version = max((e.version for e in events if e.name in STAGE_NAMES and e.version), default=None)
    return Group(
        Text(title, style="bold"),
        _trainer_line(events, now),
        _engine_line(ledger.events[ENGINE], now),
        _layers(ledger, version),
        _stages(events, version),
        _answer(ledger.events[ENGINE]),
    )


def _trainer_line(events: Sequence[Event], now: float) -> Text:
    trained = [event for event in events if event.name == "train"]
    if not trained:
        return Text("trainer   no step yet")
    last = max(trained, key=lambda event: event.started_at)
    return Text(f"trainer   {last.text}, {now - last.started_at - last.seconds:.0f} s ago")


def _engine_line(events: Sequence[Event], now: float) -> Text:
    times = [e.started_at + e.seconds for e in events if e.name == "token"]
    recent = sum(at > now - _RATE_SECONDS for at in times)
    longest = max((b - a for a, b in pairwise(times[-50:])), default=0.0)
    serving = max((e.version for e in events if e.name == "committed" and e.version), default=None)
    return Text(
        f"engine    {'no version yet' if serving is None else f'version {serving}'}, "
        f"{recent / _RATE_SECONDS:.1f} tokens/s, longest gap of late {longest:.2f} s, "
        f"{len(times)} tokens"
    )


def _layers(ledger: Ledger, version: Version | None) -> Text:
    """A cell per group, in forward order: full when it has landed."""
    landed = {
        event.group
        for event in ledger.events[ENGINE]
        if event.name == "landed" and event.version == version
    }
    groups = ledger.plan.groups if ledger.plan else tuple(sorted(landed))
    cells = Text("landed    ")
    for group in groups:
        cells.append("■" if group in landed else "□", style="green" if group in landed else "dim")
    if version is not None:
        cells.append(f"  {len(landed)} of {len(groups)} groups of version {version}")
    return cells


def _stages(events: Sequence[Event], version: Version | None) -> Table:
    """A row per stage: the time from the sync's first work to its last, filled where it worked."""
    grid = Table.grid(padding=(0, 1))
    spans = [e for e in events if e.name in STAGE_NAMES and e.version == version and e.version]
    began = min((e.started_at for e in spans), default=0.0)
    cell = (max((e.started_at + e.seconds for e in spans), default=0.0) - began) / _BAR_CELLS
    for stage in STAGE_NAMES:
        own = [event for event in spans if event.name == stage]
        busy = sum(event.seconds for event in own)
        filled = {
            number
            for e in own
            for number in range(
                int((e.started_at - began) / cell) if cell else 0,
                min(_BAR_CELLS, int((e.started_at + e.seconds - began) / cell) + 1 if cell else 0),
            )
        }
        bar = Text("".join("█" if i in filled else "·" for i in range(_BAR_CELLS)), style="cyan")
        megabytes = sum(event.bytes for event in own) / 1e6
        grid.add_row(f"{stage:9}", bar, f"{busy:6.2f} s busy", f"{megabytes:8.1f} MB")
    return grid


def _answer(events: Sequence[Event]) -> Text:
    last = next((event for event in reversed(events) if event.name == "token"), None)
    return Text(f"says      {last.text if last else ''}", no_wrap=True, overflow="ellipsis")
