"""The demo's child processes as the parent sees them: started, heard, told, and all ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from streamsync.demo import messages
from streamsync.demo.messages import Done, Failed, FailureKind, Hello, Message, Role, ToParent
from streamsync.errors import ConfigError, StreamsyncError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

_MOST_PATH_BYTES: Final = 100
_TERM_SECONDS: Final = 3.0
_ROOT_CAUSE_SECONDS: Final = 1.5
_SHOWN_OUTPUT_BYTES: Final = 2000


class Sender(NamedTuple):
    """Which child."""

    role: Role
    rank: int

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank}" if self.role == "trainer" else self.role


class ChildFailed(StreamsyncError):
    """A child failed; the message has its own text, `trace` its traceback or last output."""

    def __init__(self, message: str, *, kind: FailureKind, trace: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.trace = trace


class Crew:
    """The children and their unix socket, in `folder`; an async context manager.

    Leaving it ends every child: first by closing its connection, then its process group by SIGTERM
    and SIGKILL, and torchrun's workers, which have groups of their own, through their pidfds.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "demo.sock"
        self._folder = folder
        self._server: asyncio.Server | None = None
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._writers: dict[Sender, asyncio.StreamWriter] = {}
        self._pidfds: list[int] = []
        self._heard: asyncio.Queue[tuple[Sender, ToParent] | ChildFailed] = asyncio.Queue()
        self._done: set[Sender] = set()
        self._is_closing = False

    async def __aenter__(self) -> Crew:
        if len(os.fsencode(self.path)) > _MOST_PATH_BYTES:
            raise ConfigError(
                f"the temporary folder's name is too long for a unix socket: {self._folder}; "
                "set TMPDIR to a shorter one"
            )
        self._server = await asyncio.start_unix_server(
            self._listen, self.path, limit=messages.LINE_LIMIT
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_closing = True
        for writer in self._writers.values():
            writer.close()
        if self._server is not None:
            self._server.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(TimeoutError):
                # A failed run is over at once; a good one has ended by itself before.
                async with asyncio.timeout(_TERM_SECONDS if kind is None else _TERM_SECONDS / 3):
                    await asyncio.gather(*(p.wait() for p in self._processes.values()))
            self._signal(number)
        await asyncio.gather(*(p.wait() for p in self._processes.values()))
        for pidfd in self._pidfds:
            os.close(pidfd)

    async def start(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """Starts `python -m arguments... SOCKET` in a process group of its own; what it prints goes
        to a file."""
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes[name] = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *arguments,
                str(self.path),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def tell(self, role: Role, message: Message) -> None:
        """Sends a message to every child of a role."""
        line = messages.encode(message)
        for sender, writer in self._writers.items():
            if sender.role == role:
                writer.write(line)

    def tell_one(self, sender: Sender, message: Message) -> None:
        """Sends a message to one child."""
        self._writers[sender].write(messages.encode(message))

    async def hear(self, silence_seconds: float) -> AsyncIterator[tuple[Sender, ToParent]]:
        """What the children say, in order, for ever.

        Raises `ChildFailed` when one fails or is lost, or when nobody said anything for
        `silence_seconds`.
        """
        while True:
            try:
                async with asyncio.timeout(silence_seconds):
                    heard = await self._next()
            except TimeoutError:
                raise ChildFailed(
                    f"no process of the demo said anything for {silence_seconds:g} s; "
                    f"their last words: {self._last_output()}",
                    kind="sync",
                    trace="",
                ) from None
            if isinstance(heard, ChildFailed):
                raise await self._root_cause(heard)
            yield heard

    async def _next(self) -> tuple[Sender, ToParent] | ChildFailed:
        """Like the queue's `get`, but a process that ends before it connected is noticed too."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    return await self._heard.get()
            for name, process in self._processes.items():
                if process.returncode and not self._heard.qsize():
                    return self._lost(name, name)

    async def _root_cause(self, first: ChildFailed) -> ChildFailed:
        """One failure makes others: of all that come soon, the one that a person can cure."""
        failures = [first]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ROOT_CAUSE_SECONDS):
                while True:
                    heard = await self._heard.get()
                    if isinstance(heard, ChildFailed):
                        failures.append(heard)
        return next((failure for failure in failures if failure.kind == "input"), first)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sender: Sender | None = None
        try:
            # A last line without its end is what a child that died had no time to finish.
            while (line := await reader.readline()).endswith(b"\n"):
                message = messages.decode_to_parent(line)
                match message:
                    case Hello():
                        sender = Sender(message.role, message.rank)
                        self._writers[sender] = writer
                        with contextlib.suppress(ProcessLookupError):
                            self._pidfds.append(os.pidfd_open(message.pid))
                    case Done() if sender:
                        self._done.add(sender)
                if sender is None:
                    break
                if isinstance(message, Failed):
                    self._done.add(sender)
                    self._heard.put_nowait(
                        ChildFailed(
                            f"{sender}: {message.text}",
                            kind=message.kind,
                            trace=message.trace,
                        )
                    )
                else:
                    self._heard.put_nowait((sender, message))
        except ConnectionError:
            pass
        except (msgspec.DecodeError, ValueError) as error:
            self._heard.put_nowait(
                ChildFailed(f"{sender}: its line broke: {error}", kind="sync", trace="")
            )
        finally:
            writer.close()
            if sender is not None and sender not in self._done and not self._is_closing:
                self._heard.put_nowait(self._lost(str(sender), sender.role))

    def _lost(self, who: str, name: str) -> ChildFailed:
        output = self._output(name)
        last = output.splitlines()[-1] if output else "it printed nothing"
        return ChildFailed(f"{who} ended without a word: {last}", kind="bug", trace=output)

    def _output(self, name: str) -> str:
        try:
            text = (self._folder / f"{name}.log").read_bytes()[-_SHOWN_OUTPUT_BYTES:]
        except OSError:
            return ""
        return text.decode(errors="replace").strip()

    def _last_output(self) -> str:
        words = {name: self._output(name).splitlines()[-1:] for name in self._processes}
        return "; ".join(f"{name}: {' '.join(last) or '-'}" for name, last in words.items())

    def _signal(self, number: int) -> None:
        for pidfd in self._pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)
        for process in self._processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
