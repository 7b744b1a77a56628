"""The 64 bytes in front of a payload: what is written is read, and any damage is seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamsync.errors import IntegrityError
from streamsync.runtime.header import BucketHeader, payload_bytes
from streamsync.types import Version

U32 = st.integers(0, (1 << 32) - 1)
U64 = st.integers(0, (1 << 64) - 1)
HEADERS = st.builds(
    BucketHeader,
    version=st.builds(Version, epoch=U64, step=U64),
    share_digest=U64,
    index=U32,
    group=U32,
    nbytes=U64,
    digest=st.none() | U64,
)


def _written(header: BucketHeader) -> bytearray:
    buffer = bytearray(b"\xff" * 64)
    header.write(memoryview(buffer))
    return buffer


@given(HEADERS)
def test_what_is_written_is_read(header: BucketHeader) -> None:
    buffer = memoryview(_written(header))
    assert BucketHeader.read(buffer) == header
    assert payload_bytes(buffer) == header.nbytes


def test_the_bytes_are_as_documented() -> None:
    header = BucketHeader(Version(1, 2), 3, 4, 5, 6, 7)
    words = ("53534231 0100 0100", "01" + "00" * 7, "02" + "00" * 7, "03" + "00" * 7)
    tail = ("04000000", "05000000", "06" + "00" * 7, "07" + "00" * 7)
    assert _written(header)[:56] == bytes.fromhex("".join(words + tail))
    assert _written(header)[60:] == bytes(4)


def test_no_digest_and_a_digest_of_zero_are_two_things() -> None:
    for digest in (None, 0):
        header = BucketHeader(Version(1, 2), 3, 4, 5, 6, digest)
        assert BucketHeader.read(memoryview(_written(header))).digest == digest


@pytest.mark.parametrize("byte", range(60))
def test_any_flipped_bit_is_seen(byte: int) -> None:
    """Case 42, for all bits that mean something."""
    for bit in range(8):
        buffer = _written(BucketHeader(Version(1, 2), 3, 4, 5, 6, 7))
        buffer[byte] ^= 1 << bit
        with pytest.raises(IntegrityError):
            BucketHeader.read(memoryview(buffer))


@given(st.binary(min_size=64, max_size=64))
def test_other_bytes_are_no_header(junk: bytes) -> None:
    """Case 41."""
    with pytest.raises(IntegrityError):
        BucketHeader.read(memoryview(junk))
