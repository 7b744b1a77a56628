"""The 64 bytes in front of every bucket, the same on every transport.

Little-endian: magic `SSB1`, header format (u16), flags (u16, bit 0: the digest is set), epoch
(u64), step (u64), share digest (u64), bucket index (u32), group (u32), payload bytes (u64), bucket
digest (u64), xxh32 of the 56 bytes before it, 4 zero bytes.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from streamsync.errors import IntegrityError
from streamsync.types import Version

_LAYOUT = struct.Struct("<4sHHQQQIIQQI4x")
_NBYTES = struct.Struct("<40xQ")
_MAGIC = b"SSB1"
_FORMAT = 1
_HAS_DIGEST = 1

assert _LAYOUT.size == 64


class BucketHeader(NamedTuple):
    """What a receiver checks before it trusts a payload. `digest` is None when digests are off."""

    version: Version
    share_digest: int
    index: int  # type: ignore[assignment]  # a field here, not tuple.index
    group: int
    nbytes: int
    digest: int | None

    def write(self, buffer: memoryview) -> None:
        """Fills the 64 bytes of `buffer`."""
        _LAYOUT.pack_into(
            buffer,
            0,
            _MAGIC,
            _FORMAT,
            0 if self.digest is None else _HAS_DIGEST,
            self.version.epoch,
            self.version.step,
            self.share_digest,
            self.index,
            self.group,
            self.nbytes,
            self.digest or 0,
            0,
        )
        struct.pack_into("<I", buffer, 56, xxhash.xxh32_intdigest(buffer[:56]))

    @classmethod
    def read(cls, buffer: memoryview) -> BucketHeader:
        """Parses and checks the header; raises `IntegrityError`."""
        magic, form, flags, epoch, step, share, index, group, nbytes, digest, check = (
            _LAYOUT.unpack_from(buffer)
        )
        if magic != _MAGIC or form != _FORMAT:
            raise IntegrityError(f"not a bucket header: begins with {bytes(buffer[:6])!r}")
        if check != xxhash.xxh32_intdigest(buffer[:56]):
            raise IntegrityError("bucket header is corrupt", bucket=index)
        return cls(
            Version(epoch, step),
            share,
            index,
            group,
            nbytes,
            digest if flags & _HAS_DIGEST else None,
        )


def payload_bytes(header: memoryview) -> int:
    """The payload's length as the header has it, unchecked: all that a transport reads of it."""
    (nbytes,) = _NBYTES.unpack_from(header)
    return int(nbytes)
