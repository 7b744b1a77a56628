"""What a person sees of the demo: lines while it runs, a table and the answers at its end."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streamsync.demo.ledger import Ledger
    from streamsync.demo.results import DemoResults


class Screen(AbstractContextManager["Screen"], ABC):
    """Where a person looks. Used by one thread."""

    @abstractmethod
    def line(self, text: str) -> None:
        """Shows one line that stays."""

    def refresh(self) -> None:
        """Draws anew what moves."""

    def __exit__(self, *error: object) -> None:
        return None


class PlainScreen(Screen):
    """Lines on a stream."""

    def __init__(self, stream: TextIO = sys.stdout) -> None:
        self._stream = stream

    def line(self, text: str) -> None:
        """Writes the line at once."""
        print(text, file=self._stream, flush=True)


def checked_line(ledger: Ledger, index: int) -> str:
    """How sync `index` went, as far as the engine knows, and what the comparison found."""
    report, wrong = ledger.installed[index].report, ledger.mismatched[index]
    return (
        f"checked    {report.wire_bytes / 1e6:,.1f} MB by {report.transport} in "
        f"{report.seconds:.2f} s; "
        + (f"{len(wrong)} TENSORS DIFFER" if wrong else "every tensor bit-equal to the trainer's")
    )


def summary(results: DemoResults, trace: str) -> list[str]:
    """The end of the run, as lines: the syncs, the stages, the answers, the verdict."""
    names = [f"step {sync.step}" for sync in results.syncs]
    columns = [
        ("version", names),
        ("MB", [f"{sync.bytes / 1e6:.1f}" for sync in results.syncs]),
        ("seconds", [f"{sync.seconds:.2f}" for sync in results.syncs]),
        ("GB/s", [f"{sync.gb_per_s:.2f}" for sync in results.syncs]),
        ("first layer s", [f"{sync.first_layer_seconds:.2f}" for sync in results.syncs]),
        ("publish blocked s", [f"{sync.publish_blocked_seconds:.2f}" for sync in results.syncs]),
        ("stall s", [f"{sync.stall_seconds:.2f}" for sync in results.syncs]),
        ("overlap", [f"{sync.overlap:.0%}" for sync in results.syncs]),
        ("tensors that differ", [str(sync.mismatched_tensors) for sync in results.syncs]),
    ]
    lines = ["", *table(columns), ""]
    stages = list(results.syncs[0].stages)
    lines += table(
        [
            ("busy / blocked s", names),
            *(
                (
                    name,
                    [
                        f"{sync.stages[name].busy_seconds:.2f} / "
                        f"{sync.stages[name].blocked_seconds:.2f}"
                        for sync in results.syncs
                    ],
                )
                for name in stages
            ),
        ]
    )
    for number, prompt in enumerate(results.prompts):
        lines += ["", prompt]
        lines += [
            f"  {name:>{max(map(len, names))}}  {answers[number]}"
            for name, answers in zip(names, results.answers, strict=True)
        ]
    lines += [
        "",
        f"{results.tokens_generated} tokens generated meanwhile; {results.wire_bytes:,} bytes on "
        f"the wire per sync, {results.needed_bytes:,} needed.",
        f"Trace of all processes, for ui.perfetto.dev: {trace}",
        *(f"FAILED: {failure}" for failure in results.failures),
    ]
    if results.ok:
        lines.append(
            "Every tensor of every version is bit-equal to a copy of the trainer's that did not "
            "travel with streamsync."
        )
    return lines


def table(columns: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Right-aligned columns under their heads."""
    widths = [max(len(head), *map(len, cells)) for head, cells in columns]
    rows = [[head for head, _ in columns], *zip(*(cells for _, cells in columns), strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
