"""A child's line to the demo's parent process."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import traceback
from typing import TYPE_CHECKING, TypeVar

from streamsync.demo import messages
from streamsync.demo.messages import (
    Done,
    Failed,
    FailureKind,
    Happened,
    Hello,
    Message,
    Role,
    ToChild,
)
from streamsync.errors import (
    ConfigError,
    ControlError,
    LayoutError,
    PlanError,
    StreamsyncError,
    TransferTimeout,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamsync.observability.probe import Event

_T = TypeVar("_T")
_FLUSH_SECONDS = 10.0


class Link:
    """A connection with a thread that writes and one that reads.

    `send` and `event` may be called from any thread and never block. When the parent is gone the
    process ends at once: a child must not outlive the demo.
    """

    def __init__(self, path: str, role: Role, rank: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue[ToChild] = queue.SimpleQueue()
        self._closing = False
        self._writer = threading.Thread(target=self._write, name="demo link writer", daemon=True)
        self._reader = threading.Thread(target=self._read, name="demo link reader", daemon=True)
        self.send(Hello(role=role, rank=rank, pid=os.getpid()))
        self._writer.start()
        self._reader.start()

    def send(self, message: Message) -> None:
        """Queues a message."""
        self._outgoing.put(messages.encode(message))

    def event(self, event: Event) -> None:
        """A probe's listener: passes the event on."""
        self.send(Happened(event=event))

    def receive(self, kind: type[_T], timeout: float) -> _T:
        """The next message, which must be a `kind`. Raises `TransferTimeout` after `timeout`."""
        try:
            message = self._incoming.get(timeout=timeout)
        except queue.Empty:
            raise TransferTimeout(f"the demo said nothing for {timeout:g} s") from None
        if not isinstance(message, kind):
            raise ControlError(f"the demo said {type(message).__name__}, not {kind.__name__}")
        return message

    def has_message(self) -> bool:
        """Whether `receive` would return at once."""
        return not self._incoming.empty()

    def close(self) -> None:
        """Writes what is queued and closes."""
        self._closing = True
        self._outgoing.put(None)
        self._writer.join(_FLUSH_SECONDS)
        self._socket.close()

    def _write(self) -> None:
        while (line := self._outgoing.get()) is not None:
            try:
                self._socket.sendall(line)
            except OSError:
                return

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    self._incoming.put(messages.decode_to_child(line))
        except OSError:
            pass
        if not self._closing:
            os._exit(1)


def run_child(role: Role, rank: int, work: Callable[[Link], None]) -> int:
    """Runs a child's `work` with a link to the socket that `argv` names; returns its exit code.

    Whatever it raises goes to the parent as `Failed`.
    """
    link = Link(sys.argv[1], role, rank)
    try:
        work(link)
    except Exception as error:
        link.send(
            Failed(
                text=describe(error),
                kind=failure_kind(error),
                trace=traceback.format_exc(),
            )
        )
        return 1
    else:
        link.send(Done())
        return 0
    finally:
        link.close()


def failure_kind(error: Exception) -> FailureKind:
    """Whose error it is, for the exit code."""
    if isinstance(error, ConfigError | PlanError | LayoutError | ControlError):
        return "input"
    return "sync" if isinstance(error, StreamsyncError) else "bug"


def describe(error: BaseException) -> str:
    """An error in one line; foreign ones with their class."""
    text = str(error) if isinstance(error, StreamsyncError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())
