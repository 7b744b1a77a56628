"""What the hub found for a sink's question: the source ranks, and who of them holds what. Pure."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from streamsync.control.messages import Place
from streamsync.errors import ControlError
from streamsync.plan.holders import Holders

if TYPE_CHECKING:
    from collections.abc import Iterable


class Host(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the source ranks of one host have in common: `address` is an endpoint without port."""

    host_id: str
    address: str
    has_ucx: bool
    has_rdma: bool


class SourceRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One source rank in a `Found`; `host` indexes its hosts."""

    host: int
    port: int
    pid: int
    incarnation: str


class Found(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the hub found for a question. `rows` has one row per rank in `holders.ranks`, all ranks
    of the group. `holders` is a `Holders`, encoded: equal bytes make an equal plan."""

    hosts: tuple[Host, ...]
    rows: tuple[SourceRow, ...]
    holders: bytes


class SourceInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One source rank as the hub knows it."""

    name: str
    endpoint: str
    incarnation: str
    place: Place


class Sought(NamedTuple):
    """A `Found`, decoded. `encoded_holders`: equal bytes make an equal plan."""

    sources: tuple[SourceInfo, ...]
    holders: Holders
    encoded_holders: bytes


_MAX_BYTES = 1 << 26
_LEVEL = 2
"""Names and boxes repeat themselves: this takes a few milliseconds a question, once, and spares
each sink's answer the encryption of nine tenths."""

_encode = msgspec.msgpack.Encoder().encode
_decode_found = msgspec.msgpack.Decoder(Found).decode
_decode_holders = msgspec.msgpack.Decoder(Holders).decode


def encode_found(sources: Iterable[SourceInfo], holders: bytes) -> bytes:
    """A `Found` of these source ranks, in the order of the encoded `holders`' ranks; zlib."""
    hosts: dict[Host, int] = {}
    rows = []
    for info in sources:
        address, _, port = info.endpoint.rpartition(":")
        place = info.place
        host = Host(place.host_id, address, place.has_ucx, place.has_rdma)
        number = hosts.setdefault(host, len(hosts))
        rows.append(SourceRow(number, int(port), place.pid, info.incarnation))
    found = Found(hosts=tuple(hosts), rows=tuple(rows), holders=holders)
    return zlib.compress(_encode(found), _LEVEL)


def decode_found(data: bytes) -> Sought:
    """Parses and validates; raises `ControlError`."""
    try:
        unpacking = zlib.decompressobj()
        found = _decode_found(unpacking.decompress(data, _MAX_BYTES))
        holders = _decode_holders(found.holders)
        sources = tuple(
            _info(name, row, found.hosts[row.host])
            for name, row in zip(holders.ranks, found.rows, strict=True)
        )
    except (zlib.error, msgspec.DecodeError, ValueError, IndexError, RecursionError) as error:
        raise ControlError(f"malformed answer of the hub refused: {error}") from error
    return Sought(sources, holders, found.holders)


def _info(name: str, row: SourceRow, host: Host) -> SourceInfo:
    return SourceInfo(
        name=name,
        endpoint=f"{host.address}:{row.port}",
        incarnation=row.incarnation,
        place=Place(
            host_id=host.host_id,
            process_id=row.incarnation,
            pid=row.pid,
            has_ucx=host.has_ucx,
            has_rdma=host.has_rdma,
        ),
    )
