"""What the demo's processes tell each other: one JSON object a line, over a unix socket."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from streamsync.config import TransportName
from streamsync.demo.options import ModelName
from streamsync.observability.probe import Event
from streamsync.types import Apply, SyncReport, Version

Role = Literal["trainer", "engine"]

FailureKind = Literal["input", "sync", "bug"]
"""What a person cures by other options or another environment; another error of streamsync's own;
an error that nobody foresaw, of which the traceback must be seen."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of all of them; the JSON object's `type` is the class's name."""


class Setup(Message, frozen=True):
    """To a child, its first: everything it has to know. The secret is never on a command line."""

    hub: str
    secret: str
    transport: TransportName
    model: ModelName
    folder: str
    """The model's own files, as `models.prepare` returned it."""
    scratch: str
    """Where copies and snapshots go."""
    apply: Apply
    syncs: int
    num_source_ranks: int


class Begin(Message, frozen=True):
    """To the engine: everybody is ready, generate."""


class Proceed(Message, frozen=True):
    """To the trainer: sync number `index` may begin, the one before is checked and answered."""

    index: int


class Stop(Message, frozen=True):
    """To the engine: no more tokens are needed."""


class Hello(Message, frozen=True):
    """From a child, its first."""

    role: Role
    rank: int
    pid: int


class Ready(Message, frozen=True):
    """From a child: its model is built and it is a member."""

    num_parameters: int


class Planned(Message, frozen=True):
    """From the engine: what every sync will move."""

    groups: tuple[str, ...]
    needed_bytes: int


class Happened(Message, frozen=True):
    """From a child: an event of its probe."""

    event: Event


class Copied(Message, frozen=True):
    """From a trainer rank, before it publishes: where it saved its shards without streamsync."""

    index: int
    path: str


class Published(Message, frozen=True):
    """From a trainer rank: a version was committed by the engine; this rank's account of it."""

    index: int
    report: SyncReport


class Installed(Message, frozen=True):
    """From the engine: a version is committed; its account, and where its parameters lie."""

    index: int
    report: SyncReport
    path: str


class Answered(Message, frozen=True):
    """From the engine: the answers to all prompts, each from first to last token by `version`."""

    version: Version
    answers: tuple[str, ...]


class Failed(Message, frozen=True):
    """From a child, instead of all that would follow: the error's own text and its traceback."""

    text: str
    kind: FailureKind
    trace: str


class Done(Message, frozen=True):
    """From a child, its last."""


ToChild = Setup | Begin | Proceed | Stop
ToParent = (
    Hello | Ready | Planned | Happened | Copied | Published | Installed | Answered | Failed | Done
)

LINE_LIMIT: Final = 1 << 20
"""Longest line, in bytes."""

_encoder = msgspec.json.Encoder()
_to_child: msgspec.json.Decoder[ToChild] = msgspec.json.Decoder(ToChild)
_to_parent: msgspec.json.Decoder[ToParent] = msgspec.json.Decoder(ToParent)


def encode(message: Message) -> bytes:
    """One line."""
    return _encoder.encode(message) + b"\n"


def decode_to_child(line: bytes) -> ToChild:
    """What the parent said; `msgspec.DecodeError` when it is no such message."""
    return _to_child.decode(line)


def decode_to_parent(line: bytes) -> ToParent:
    """What a child said; `msgspec.DecodeError` when it is no such message."""
    return _to_parent.decode(line)
