"""What the benchmark's source tells its sink: JSON, a line each, over a unix socket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from streamsync.errors import StreamsyncError, TransferTimeout
from streamsync.types import Apply, SyncReport

if TYPE_CHECKING:
    import socket

T = TypeVar("T", bound=msgspec.Struct)

_SECONDS = 320.0  # longer than a sync's own deadline


class Start(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first message: subscribe to the source that the hub knows. See `PipelineOptions`."""

    hub: str
    secret: str
    transport: Literal["auto", "memory", "shm", "tcp", "ucx"]
    bytes: int
    bucket_bytes: int
    pool_bytes: int
    tensors: int
    digest: bool
    apply: Apply
    cast: bool


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything after `Start`, answered when done.

    `ready` prepares for `transport`; `roof` and `bare` run one pass; `check` waits for `step` and
    answers with hashes and the report; `stop` ends.
    """

    kind: Literal["ready", "roof", "bare", "check", "stop"]
    transport: Literal["auto", "memory", "shm", "tcp", "ucx"] = "auto"
    step: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sink did what it was told, or says in `error` why it could not. `cpu_seconds` is what
    its process has used so far; 0 when it is the source's own process."""

    error: str = ""
    cpu_seconds: float = 0.0
    hashes: list[int] = []
    report: SyncReport | None = None


class Line:
    """One end of the socket; blocking, in the main thread of its side."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        end.settimeout(_SECONDS)
        self._left = b""

    def send(self, message: msgspec.Struct) -> None:
        """Sends; raises `StreamsyncError` when the other side is gone."""
        try:
            self.socket.sendall(msgspec.json.encode(message) + b"\n")
        except OSError as error:
            raise StreamsyncError(f"the other side of the benchmark is gone: {error}") from error

    def receive(self, kind: type[T]) -> T:
        """The next message; raises `StreamsyncError` or `TransferTimeout` when there is none."""
        parts = [self._left]
        while b"\n" not in parts[-1]:
            try:
                part = self.socket.recv(1 << 16)
            except TimeoutError:
                raise TransferTimeout(
                    f"the other side of the benchmark said nothing for {_SECONDS:g} s"
                ) from None
            except OSError:
                part = b""
            if not part:
                raise StreamsyncError("the other side of the benchmark ended without a word")
            parts.append(part)
        line, _, self._left = b"".join(parts).partition(b"\n")
        return msgspec.json.decode(line, type=kind)
