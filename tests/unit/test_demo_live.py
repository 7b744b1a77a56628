from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from streamsync.demo.ledger import ENGINE, Ledger, Sender
from streamsync.demo.live import LiveScreen, view
from streamsync.demo.messages import Happened, Planned
from streamsync.demo.options import DemoOptions
from streamsync.observability.probe import Event
from streamsync.types import Version

OLD, NEW = Version(1, 0), Version(1, 4)


def happened(name: Any, at: float, seconds: float = 0.0, **fields: Any) -> Happened:
    return Happened(event=Event(name=name, started_at=at, seconds=seconds, **fields))


@pytest.fixture
def ledger() -> Ledger:
    trainer, ledger = Sender("trainer", 0), Ledger(1)
    ledger.take(ENGINE, Planned(groups=("embed", "layers.0", "norm"), needed_bytes=10))
    ledger.take(trainer, happened("train", 1.0, 2.0, text="step 4 loss 1.50"))
    ledger.take(ENGINE, happened("committed", 1.0, version=OLD))
    ledger.take(ENGINE, happened("landed", 1.0, version=OLD, group="norm"))
    for at in (4.0, 5.0, 5.5):
        ledger.take(ENGINE, happened("token", at, text="Ahoy! Four"))
    ledger.take(trainer, happened("convert", 10.0, 1.0, version=NEW, bytes=2_000_000))
    ledger.take(ENGINE, happened("load", 12.0, 2.0, version=NEW, bytes=2_000_000))
    for group in ("embed", "layers.0"):
        ledger.take(ENGINE, happened("landed", 13.0, version=NEW, group=group))
    return ledger


def drawn(ledger: Ledger, now: float) -> list[str]:
    console = Console(width=110, file=io.StringIO(), record=True)
    console.print(view("the title", ledger, now))
    return console.export_text().splitlines()


def test_the_view_shows_the_newest_version(ledger: Ledger) -> None:
    lines = drawn(ledger, now=6.0)
    text = "\n".join(lines)
    assert "the title" in lines[0]
    assert "step 4 loss 1.50, 3 s ago" in text
    assert "version 1.0, 0.6 tokens/s, longest gap of late 1.00 s, 3 tokens" in text
    assert "■■□  2 of 3 groups of version 1.4" in text
    assert "says      Ahoy! Four" in text
    bars = {line.split()[0]: line for line in lines if "busy" in line}
    assert list(bars) == ["convert", "pin", "send", "receive", "load"]
    assert "█" * 10 + "█·" in bars["convert"]
    assert "1.00 s busy" in bars["convert"]
    assert "·█" + "█" * 19 in bars["load"]
    assert "█" not in bars["send"]


def test_an_empty_ledger_can_be_drawn() -> None:
    text = "\n".join(drawn(Ledger(1), now=0.0))
    assert "no step yet" in text
    assert "no version yet" in text


def test_lines_stay_above_the_view(ledger: Ledger) -> None:
    stream = io.StringIO()
    with LiveScreen(DemoOptions(model="tiny"), ledger, stream) as screen:
        screen.refresh()
        screen.line("committed [not markup]")
        screen.refresh()
    assert "committed [not markup]" in stream.getvalue()
