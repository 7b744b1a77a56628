"""Every message of the control plane: msgpack of tagged msgspec structs, nothing else.

Between a member and the hub: Join .. Changed. Between a sink rank and a source rank, per
subscription: Subscribe, Subscribed, Linked, ReplicaReady (or PlanRefused); per sync: Begin, Credit
(coalesced), End, Ack, and on trouble Withdrawn, DropRequest. Between a rank and its replica's
coordinator: Enlist, Enlisted, Word, Order. `Error` answers any request that failed, and `Goodbye`
ends a session.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from streamsync.config import TransportName
from streamsync.errors import ControlError
from streamsync.layout.region import Layout
from streamsync.plan.plan import Share
from streamsync.transports.base import Offer
from streamsync.types import Version

PROTOCOL = 1
"""Raised with every change that an older peer would not understand."""

MAX_MESSAGE_BYTES = 1 << 30
"""A layout of millions of entries stays below; anything longer is refused unread."""


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
    """Member → hub, first and again after the hub forgot it. Sources bring their layout."""

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
    layout: Layout | None = None


class Welcome(Message, frozen=True, kw_only=True):
    """Hub → member."""

    membership_epoch: int


class Alive(Message, frozen=True, kw_only=True):
    """Member → hub, every few seconds."""

    name: str
    incarnation: str


class AliveReply(Message, frozen=True, kw_only=True):
    """Hub → member. `known` false: join again. `epoch`: of the member's source group, 0 while it is
    not complete."""

    known: bool
    membership_epoch: int
    epoch: int = 0


class Leave(Message, frozen=True, kw_only=True):
    """Member → hub: gone on purpose."""

    name: str
    incarnation: str


class AskSources(Message, frozen=True, kw_only=True):
    """Sink → hub: who are the sources, and what do they hold?"""

    sink: str


class SourceInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One source rank as the hub knows it."""

    name: str
    endpoint: str
    incarnation: str
    place: Place
    layout: Layout


class Sources(Message, frozen=True, kw_only=True):
    """Hub → sink. Empty `sources` while no source group is complete: `waiting_for` says why."""

    membership_epoch: int
    sources: tuple[SourceInfo, ...] = ()
    epoch: int = 0
    waiting_for: str = ""


class AskReplica(Message, frozen=True, kw_only=True):
    """Sink rank → hub: where is my replica's coordinator?"""

    replica: str


class ReplicaInfo(Message, frozen=True, kw_only=True):
    """Hub → sink rank; empty while rank 0 has not joined."""

    coordinator: str = ""


class Changed(Message, frozen=True, kw_only=True):
    """Hub → members: membership moved on; ask again when at rest."""

    membership_epoch: int


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


class PlanRefused(Message, frozen=True, kw_only=True):
    """Sink → source, instead of Subscribe: no plan is possible, and why."""

    sink: str
    text: str


class Linked(Message, frozen=True, kw_only=True):
    """Source → sink: the data link stands; announcements may follow. `missed` is the newest version
    begun before that, which this sink can't have."""

    missed: Version | None = None


class ReplicaReady(Message, frozen=True, kw_only=True):
    """Coordinator's rank → source: every rank of this replica has all its sessions."""


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
    """Either side: this session ends on purpose."""

    text: str = ""


class Error(Message, frozen=True, kw_only=True):
    """The request failed; `kind` names the error class, `text` is for a person."""

    kind: Literal["config", "plan", "control", "version", "transport"]
    text: str


AnyMessage = (
    Join | Welcome | Alive | AliveReply | Leave | AskSources | Sources | AskReplica | ReplicaInfo
    | Changed | Subscribe | Subscribed | PlanRefused | Linked | ReplicaReady | Begin | Credit | End
    | Ack | Withdrawn | DropRequest | Enlist | Enlisted | Word | Order | Ping | Goodbye
    | Error
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
