"""The composable digest: one 64-bit number per tensor, whatever the cut. numpy only.

Definition. Take a tensor in its wire dtype with global shape [..., C]; a scalar is [1]. A row is a
row-major index over all dims but the last. The C * itemsize little-endian bytes of a row are padded
with zeros to 8-byte little-endian words; q is a word's position in its row. Modulo 2**64,

    digest = key(name) * sum over rows and q of A(row, q // 4096) * B[q % 4096] * word[row, q]

    key(name)     = blake2b(name as UTF-8, 8 bytes), little-endian, | 1
    A(row, chunk) = mix(row, chunk) | 1
    B[j]          = mix(j, 2**63) | 1
    mix(a, b)     = the finaliser of splitmix64 (Steele, Lea, Flood 2014) applied to
                    a * 0x9E3779B97F4A7C15 + b * 0xC2B2AE3D27D4EB4F + 0x165667B19E3779F9

A box of the tensor counts with the bytes outside of it as zeros, so that digests of disjoint boxes
add up to the tensor's. All factors are odd: any change within one word changes the digest. An
accident in several words goes unseen with a probability of about 2**-64, or 2**-(64 - k) when it
touches no bit below bit k of any word. It guards against accidents, not against forgery.

`tensor_digest` and `box_digest` spell it out, slowly; `compiled` is the data path.
"""

from __future__ import annotations

import hashlib
from itertools import product
from typing import Final

from streamsync.layout.region import Box

MASK: Final = (1 << 64) - 1
CHUNK: Final = 4096
"""Words after which a row takes another `A`."""


def mix(a: int, b: int) -> int:
    """The definition's `mix`, for one pair of numbers below 2**64."""
    z = (a * 0x9E3779B97F4A7C15 + b * 0xC2B2AE3D27D4EB4F + 0x165667B19E3779F9) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def tensor_key(name: str) -> int:
    """The definition's `key`: an odd 64-bit number."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1


def tensor_digest(name: str, shape: tuple[int, ...], itemsize: int, data: bytes) -> int:
    """Digest of a whole tensor, `data` being its bytes in row-major order. The reference."""
    return box_digest(name, shape, itemsize, Box.whole(shape), data)


def box_digest(name: str, shape: tuple[int, ...], itemsize: int, box: Box, data: bytes) -> int:
    """What `box` adds to its tensor's digest, `data` being the box's bytes in row-major order.
    The reference: the definition, byte by byte."""
    shape, box = with_rows(shape, box)
    assert len(data) == box.numel * itemsize
    total = at = 0
    for index in product(
        *(range(a, b) for a, b in zip(box.start[:-1], box.stop[:-1], strict=True))
    ):
        row = 0
        for i, size in zip(index, shape[:-1], strict=True):
            row = row * size + i
        for position in range(box.start[-1] * itemsize, box.stop[-1] * itemsize):
            q = position // 8
            weight = (mix(row, q // CHUNK) | 1) * (mix(q % CHUNK, 1 << 63) | 1)
            total += weight * (data[at] << 8 * (position % 8))
            at += 1
    return tensor_key(name) * total & MASK


def with_rows(shape: tuple[int, ...], box: Box) -> tuple[tuple[int, ...], Box]:
    """A scalar as the [1] it counts as; anything else as it is."""
    return (shape, box) if shape else ((1,), Box((0,), (1,)))
