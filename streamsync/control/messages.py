"""Every message of the control plane: msgpack of tagged msgspec structs, nothing else.

Between a member and the hub: Join .. PlanRefused. Between a sink rank and a source rank, per
subscription: Subscribe, Subscribed, Linked, ReplicaReady; per sync: Begin, Credit (coalesced), End,
Ack, and on trouble Withdrawn, DropRequest. Between a rank and its replica's coordinator: Enlist,
Enlisted, Word, Order, AllSubscribed. `Error` answers any request that failed, and `Goodbye` ends a
session.

What is large is named by its digest first, and sent only to who does not have it: outlines of
sources to the hub, questions of sinks to the hub, what was found for them back.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from streamsync.config import TransportName
from streamsync.errors import ControlError
from streamsync.layout.outline import Outline, Record
from streamsync.plan.plan import Share
from streamsync.transports.base import Offer
from streamsync.types import Version

PROTOCOL = 2
"""Raised with every change that an older peer would not understand."""

MAX_MESSAGE_BYTES = 1 << 28
"""A share of a million pieces stays below; anything longer is refused unread."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; `request` pairs an answer with its question (0: none expected)."""

    request: int = 0


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a process runs, to see who shares a host or a process, and whether it still lives.

    `host_id` is the boot id with the pid and network namespaces: equal only between processes that
    can see each other's pids and abstract sockets.
    """

    host_id: str
    process_id: str
    pid: int
    has_ucx: bool = False
    has_rdma: bool = False


class Join(Message, frozen=True, kw_only=True):
    """Member → hub, first and again after the hub forgot it.

    Sources bring their outline's digest, and the `epoch` that they hold; sinks the `slot` that they
    hold (see `Sources`). A new hub takes up both.
    """

    protocol: int
    name: str
    role: Literal["source", "sink"]
    unit: str
    rank: int
    num_ranks: int
    endpoint: str
    incarnation: str
    place: Place
    epoch: int = 0
    outline_digest: str = ""
    slot: tuple[int, int] = (0, 0)


class Welcome(Message, frozen=True, kw_only=True):
    """Hub → member, answering Join and Describe. `wants_outline`: describe yourself. Alive is
    expected every `alive_seconds`."""

    wants_outline: bool = False
    alive_seconds: float = 2.0


class Describe(Message, frozen=True, kw_only=True):
    """Source → hub: the outline whose digest Join named."""

    name: str
    incarnation: str
    outline: Outline


class Alive(Message, frozen=True, kw_only=True):
    """Member → hub, every few seconds."""

    name: str
    incarnation: str


class AliveReply(Message, frozen=True, kw_only=True):
    """Hub → member. `known` false: join again. `epoch`: of the member's source group, 0 while it is
    not complete."""

    known: bool
    epoch: int = 0


class Leave(Message, frozen=True, kw_only=True):
    """Member → hub: gone on purpose."""

    name: str
    incarnation: str


class AskSources(Message, frozen=True, kw_only=True):
    """Sink → hub: who are the sources, and who of them holds what I need?

    `question_digest` names what that is; the `question` itself comes when the hub wants it. `stamp`
    is that of the newest answer, which is not sent twice.
    """

    sink: str
    question_digest: str
    question: tuple[Record, ...] | None = None
    stamp: str = ""


class Sources(Message, frozen=True, kw_only=True):
    """Hub → sink. Nothing else while no source group is complete: `waiting_for` says why.

    `wants_question`: ask again, with the question. `found` is an encoded `Found`: sinks with one
    question share it, and it travels as a frame of its own; empty when the sink has what `stamp`
    names. `slot` is (index, count): the place of this sink's replica among all, for balancing.
    `epoch` is that of the source group.
    """

    membership_epoch: int = 0
    epoch: int = 0
    slot: tuple[int, int] = (0, 1)
    stamp: str = ""
    wants_question: bool = False
    waiting_for: str = ""
    found: bytes = b""


class AskReplica(Message, frozen=True, kw_only=True):
    """Sink rank → hub: where is my replica's coordinator?"""

    replica: str


class ReplicaInfo(Message, frozen=True, kw_only=True):
    """Hub → sink rank; empty while rank 0 has not joined."""

    coordinator: str = ""


class Changed(Message, frozen=True, kw_only=True):
    """Hub → member that it concerns. Sources: your group is complete, in `epoch`. Sinks: an answer
    to AskSources would be another one now; ask again when at rest."""

    epoch: int = 0


class PlanRefused(Message, frozen=True, kw_only=True):
    """Sink → hub → every source: no plan is possible for a rank of `replica`, and why."""

    sink: str
    replica: str
    text: str


class Subscribe(Message, frozen=True, kw_only=True):
    """Sink rank → source rank: my share of your weights, how I want it, where I am."""

    protocol: int
    sink: str
    replica: str
    incarnation: str
    share: Share
    transport: TransportName
    transport_address: bytes
    place: Place
    expected_incarnation: str
    digest: bool


class Subscribed(Message, frozen=True, kw_only=True):
    """Source → sink: accepted; connect the data link with `offer`. `lease_bytes` is how much of the
    source's pool this sink may hold at once."""

    offer: Offer
    lease_bytes: int


class Linked(Message, frozen=True, kw_only=True):
    """Source → sink: the data link stands; announcements may follow. `missed` is the newest version
    begun before that, which this sink can't have."""

    missed: Version | None = None


class ReplicaReady(Message, frozen=True, kw_only=True):
    """Sink → source: every rank of this replica has all its sessions."""


class Begin(Message, frozen=True, kw_only=True):
    """Source → sink: I announce `version`."""

    version: Version


class Credit(Message, frozen=True, kw_only=True):
    """Sink → source: in this sync you may have sent `bytes` payload bytes in all."""

    version: Version
    bytes: int


class End(Message, frozen=True, kw_only=True):
    """Source → sink: all of it is sent; `wire_bytes` of payload, `digest` sums all buckets'."""

    version: Version
    wire_bytes: int
    digest: int


class Ack(Message, frozen=True, kw_only=True):
    """Sink → source: how `version` ended here."""

    version: Version
    state: Literal["committed", "failed", "superseded", "dropped"]
    text: str = ""


class Withdrawn(Message, frozen=True, kw_only=True):
    """Source → sink: I will never send (the rest of) `version`."""

    version: Version
    text: str
    superseded: bool = False


class DropRequest(Message, frozen=True, kw_only=True):
    """Source → sink: others have `version` already; give it up unless you are past GO."""

    version: Version


class Enlist(Message, frozen=True, kw_only=True):
    """Rank → its coordinator: I am rank `rank` of `num_ranks`."""

    replica: str
    rank: int
    num_ranks: int


class Enlisted(Message, frozen=True, kw_only=True):
    """Coordinator → rank."""


class AllSubscribed(Message, frozen=True, kw_only=True):
    """Coordinator → rank: every rank has all its sessions; tell your sources."""


class Word(Message, frozen=True, kw_only=True):
    """Rank → coordinator: `kind` of `version`."""

    rank: int
    kind: Literal[
        "subscribed", "announced", "ready", "starved", "armed", "installed", "failed", "quarantined"
    ]
    version: Version
    text: str = ""
    state: Literal["failed", "superseded", "dropped"] = "failed"


class Order(Message, frozen=True, kw_only=True):
    """Coordinator → rank."""

    kind: Literal["prepare", "arm", "go", "commit", "abort", "quarantine"]
    version: Version
    text: str = ""
    state: Literal["failed", "superseded", "dropped"] = "failed"


class Ping(Message, frozen=True, kw_only=True):
    """Listener → dialer, every few seconds and without an answer: sending is how it learns that a
    peer on another host is gone."""


class Goodbye(Message, frozen=True, kw_only=True):
    """Either side: this session ends on purpose. `returns`: this sink subscribes again at once, and
    the next version should wait for it."""

    text: str = ""
    returns: bool = False


class Error(Message, frozen=True, kw_only=True):
    """The request failed; `kind` names the error class, `text` is for a person."""

    kind: Literal["config", "plan", "control", "version", "transport"]
    text: str


AnyMessage = (
    Join | Welcome | Describe | Alive | AliveReply | Leave | AskSources | Sources | AskReplica
    | ReplicaInfo | Changed | PlanRefused | Subscribe | Subscribed | Linked | ReplicaReady | Begin
    | Credit | End | Ack | Withdrawn | DropRequest | Enlist | Enlisted | AllSubscribed | Word
    | Order | Ping | Goodbye | Error
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """The message as msgpack."""
    return _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """Parses and validates; raises `ControlError` for anything that is not exactly a message."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ControlError(f"message of {len(data)} bytes refused: limit {MAX_MESSAGE_BYTES}")
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ControlError(f"malformed message refused: {error}") from error
