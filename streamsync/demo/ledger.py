"""All that the demo's children have said so far, sorted for those who ask."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from streamsync.demo.crew import Sender
from streamsync.demo.messages import (
    Answered,
    Copied,
    Done,
    Happened,
    Hello,
    Installed,
    Planned,
    Published,
    Ready,
    ToParent,
)

if TYPE_CHECKING:
    from streamsync.observability.probe import Event
    from streamsync.types import SyncReport, Version

ENGINE: Final = Sender("engine", 0)


class Ledger:
    """Filled by `take`; everybody else only reads. One thread."""

    def __init__(self, num_source_ranks: int) -> None:
        self.num_source_ranks = num_source_ranks
        self.pids: dict[Sender, int] = {}
        self.ready: set[Sender] = set()
        self.done: set[Sender] = set()
        self.num_parameters = 0
        self.num_tokens = 0
        self.plan: Planned | None = None
        self.events: defaultdict[Sender, list[Event]] = defaultdict(list)
        self.copies: defaultdict[int, dict[int, str]] = defaultdict(dict)
        self.installed: dict[int, Installed] = {}
        self.published: defaultdict[int, dict[int, SyncReport]] = defaultdict(dict)
        self.answers: dict[Version, tuple[str, ...]] = {}
        self.mismatched: dict[int, list[str]] = {}

    def take(self, sender: Sender, message: ToParent) -> None:
        """Files one message."""
        match message:
            case Hello():
                self.pids[sender] = message.pid
            case Ready():
                self.ready.add(sender)
                self.num_parameters = message.num_parameters
            case Planned():
                self.plan = message
            case Happened():
                self.events[sender].append(message.event)
                self.num_tokens += message.event.name == "token"
            case Copied():
                self.copies[message.index][sender.rank] = message.path
            case Published():
                self.published[message.index][sender.rank] = message.report
            case Installed():
                self.installed[message.index] = message
            case Answered():
                self.answers[message.version] = message.answers
            case Done():
                self.done.add(sender)

    def is_installed(self, index: int) -> bool:
        """Whether sync `index` is committed and both its copies lie on the disk."""
        return index in self.installed and len(self.copies[index]) == self.num_source_ranks

    def is_answered(self, index: int) -> bool:
        """Whether the version of sync `index` has answered every prompt."""
        return index in self.installed and self.installed[index].report.version in self.answers

    def is_published(self, index: int) -> bool:
        """Whether every source rank has given its account of sync `index`."""
        return len(self.published[index]) == self.num_source_ranks

    def all_events(self) -> list[Event]:
        """The events of all children, unordered."""
        return [event for events in self.events.values() for event in events]
