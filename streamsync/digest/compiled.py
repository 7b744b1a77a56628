"""The digests of `definition` for the data path, prepared once per plan.

Each run reads the bytes once, releases the GIL while it does, and allocates nothing that grows with
them. Compiled digests may run in several threads at once.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from streamsync.digest.definition import CHUNK, MASK, tensor_key, with_rows
from streamsync.plan.schedule import SMALL_BYTES, alignment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streamsync.layout.region import Box
    from streamsync.plan.plan import Bucket, Piece, Share, SharedTensor

Words: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
Bytes: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

_SCRATCH_WORDS: Final = 8 * CHUNK  # 256 KiB: stays in the second level cache
_MAX_SUMS: Final = 8192
_MIN_RUN: Final = 4  # fewer small pieces in a row than this are cheaper one by one
_STACKED_BYTES: Final = 128 << 10  # beyond, a piece's bytes cost more than its turn


class PieceDigest:
    """The compiled digest of one box of one tensor, runnable on any memory that holds it.

    Keeps 8 bytes per row (and per 32 KiB of longer rows).
    """

    __slots__ = ("_aligned", "_key", "_num_rows", "_row_bytes", "_strips", "nbytes")

    def __init__(self, tensor: SharedTensor, box: Box) -> None:
        shape, box = with_rows(tensor.shape, box)
        itemsize = tensor.wire.itemsize
        begin = box.start[-1] * itemsize
        rows = _row_numbers(shape, box)
        self.nbytes = box.numel * itemsize
        self._key = tensor_key(tensor.name)
        self._num_rows = len(rows)
        self._row_bytes = box.shape[-1] * itemsize
        self._aligned = alignment(box, itemsize) == 8
        first = begin // 8
        stop = -(-(begin + self._row_bytes) // 8)
        step = stop - first if self._aligned else _SCRATCH_WORDS
        self._strips: list[_Strip] = []
        at = first
        while self.nbytes and at < stop:
            end = min(stop, (at // CHUNK) * CHUNK + step) if step < stop - at else stop
            low, high = max(8 * at, begin), min(8 * end, begin + self._row_bytes)
            self._strips.append(
                _Strip(low - begin, high - begin, low - 8 * at, end - at, _segments(rows, at, end))
            )
            at = end

    def run(self, data: Bytes) -> int:
        """The digest of the box whose row-major bytes are `data`: contiguous, `nbytes` long, read
        only. Fastest where it starts at a multiple of 8 bytes."""
        assert data.nbytes == self.nbytes
        if not self.nbytes:
            return 0
        total = 0
        words = data.view(np.uint64).reshape(self._num_rows, -1) if self._aligned else None
        rows = data.reshape(self._num_rows, self._row_bytes)
        for strip in self._strips:
            step = _MAX_SUMS
            if words is None:
                step = min(step, _SCRATCH_WORDS // strip.num_words)
            for r in range(0, self._num_rows, step):
                if words is None:
                    block = strip.padded(rows[r : r + step], _scratch.words)
                else:
                    block = words[r : r + step]
                for segment in strip.segments:
                    total += segment.run(block, r)
        return self._key * total & MASK


class BucketDigest:
    """The compiled digest of one bucket: the sum of the digests of its pieces.

    `large` pairs positions in `Bucket.pieces` with digests that run on any memory that holds the
    piece; pieces at the positions in `small` are digested together and need the packed payload:
    runs of tiny ones, and stacks of ones whose rows are alike.
    """

    __slots__ = ("_runs", "large", "nbytes", "offsets", "small")

    def __init__(self, share: Share, bucket: Bucket) -> None:
        large: list[tuple[int, PieceDigest]] = []
        small: list[int] = []
        runs: list[_Run | _Stack] = []
        units = [_small_unit(share, piece) for piece in bucket.pieces]
        at = 0
        while at < len(units):
            end = at + 1
            while units[at] and end < len(units) and units[end] == units[at]:
                end += 1
            rows = None if units[at] else _rows_alike(share, bucket.pieces[at])
            while rows and end < len(units) and not units[end]:
                if _rows_alike(share, bucket.pieces[end]) != rows:
                    break
                end += 1
            if end - at >= _MIN_RUN and (rows or units[at]):
                pieces = bucket.pieces[at:end]
                runs.append(_Stack.of(share, pieces) if rows else _Run.of(share, pieces, units[at]))
                small.extend(range(at, end))
            else:
                for i in range(at, end):
                    piece = bucket.pieces[i]
                    large.append((i, PieceDigest(share.tensors[piece.tensor], piece.box)))
            at = end
        self.nbytes = bucket.nbytes
        self.large = tuple(large)
        self.small = tuple(small)
        self.offsets = tuple(piece.offset for piece in bucket.pieces)
        self._runs: tuple[_Run | _Stack, ...] = tuple(runs)

    def run(self, payload: Bytes) -> int:
        """Digest of the packed `payload` (contiguous, at least `nbytes`; read only)."""
        total = self.run_small(payload)
        for i, piece in self.large:
            at = self.offsets[i]
            total += piece.run(payload[at : at + piece.nbytes])
        return total & MASK

    def run_small(self, payload: Bytes) -> int:
        """What the pieces in `small` add to the digest; reads nothing else of `payload`. Add the
        runs of `large`, modulo 2**64."""
        return sum(run.run(payload) for run in self._runs) & MASK


def compile_bucket(share: Share, bucket: Bucket) -> BucketDigest:
    """Prepares the digest of `bucket`; the same at the source and at the sink."""
    return BucketDigest(share, bucket)


@dataclass(slots=True, frozen=True)
class _Segment:
    """Columns [begin, begin + num_chunks * len(weights)) of a block of words; `multipliers` is
    `A`, [rows, num_chunks], `weights` the part of `B` that each chunk is weighted with."""

    begin: int
    num_chunks: int
    weights: Words
    multipliers: Words

    def run(self, block: Words, row: int) -> int:
        """The sum over `block` ([rows, words]), whose first row is number `row` of the piece."""
        num_rows, width = len(block), len(self.weights)
        part = block[:, self.begin : self.begin + self.num_chunks * width]
        multipliers = self.multipliers[row : row + num_rows]
        if width == 1:
            whole = np.einsum("i,i->", part.reshape(-1), multipliers.reshape(-1))
            return int(self.weights[0]) * int(whole)
        sums = _scratch.sums(num_rows * self.num_chunks)
        if self.num_chunks > 1:
            part = part.reshape(num_rows, self.num_chunks, width)
            shaped = sums.reshape(num_rows, self.num_chunks)
            np.einsum("ijk,k->ij", part, self.weights, out=shaped)
        elif width < 12:  # below, einsum's cost per row shows
            np.matmul(part, self.weights, out=sums)
        else:
            np.einsum("ij,j->i", part, self.weights, out=sums)
        return int(np.einsum("i,i->", sums, multipliers.reshape(-1)))


@dataclass(slots=True, frozen=True)
class _Strip:
    """Bytes [low, high) of every row of a piece, which begin `lead` bytes into their first word."""

    low: int
    high: int
    lead: int
    num_words: int
    segments: list[_Segment]

    def padded(self, rows: Bytes, words: Words) -> Words:
        """The strip of `rows`, copied into `words` and padded with zeros to whole words."""
        block = words[: len(rows) * self.num_words].reshape(len(rows), self.num_words)
        block[:, 0] = 0
        block[:, -1] = 0
        into = block.view(np.uint8)[:, self.lead : self.lead + self.high - self.low]
        np.copyto(into, rows[:, self.low : self.high])
        return block


@dataclass(slots=True, frozen=True)
class _Run:
    """Small pieces that lie one after the other: one weight per `unit` bytes, the key included."""

    begin: int
    end: int
    unit: int
    weights: Words

    @classmethod
    def of(cls, share: Share, pieces: Sequence[Piece], unit: int) -> _Run:
        keys: list[int] = []
        rows: list[Words] = []
        begins: list[int] = []
        row_units: list[int] = []
        num_rows: list[int] = []
        end = pieces[0].offset
        for piece in pieces:
            tensor = share.tensors[piece.tensor]
            itemsize = tensor.wire.itemsize
            shape, box = with_rows(tensor.shape, piece.box)
            rows.append(_row_numbers(shape, box))
            keys.append(tensor_key(tensor.name))
            begins.append(box.start[-1] * itemsize)
            row_units.append(box.shape[-1] * itemsize // unit)
            num_rows.append(len(rows[-1]))
            end += box.numel * itemsize
        piece_of = np.repeat(np.arange(len(pieces)), num_rows)  # [rows]
        lengths = np.array(row_units)[piece_of]
        row_of = np.repeat(np.arange(len(piece_of)), lengths)  # [units]
        position = np.arange(len(row_of)) - (np.cumsum(lengths) - lengths)[row_of]
        position = np.array(begins)[piece_of[row_of]] + position * unit
        q = position // 8
        weights = _multipliers(np.concatenate(rows)[row_of], (q // CHUNK).astype(np.uint64))
        weights *= np.array(keys, np.uint64)[piece_of[row_of]]
        weights *= _B[q % CHUNK]
        weights <<= (8 * (position % 8)).astype(np.uint64)
        return cls(pieces[0].offset, end, unit, weights)

    def run(self, payload: Bytes) -> int:
        """The sum over this run's part of the packed `payload`."""
        units = payload[self.begin : self.end].view(f"u{self.unit}")
        if self.unit == 8:
            return int(np.einsum("i,i->", units, self.weights))
        total = 0
        words = _scratch.words
        for at in range(0, len(units), _SCRATCH_WORDS):
            part = units[at : at + _SCRATCH_WORDS]
            wide = words[: len(part)]
            np.copyto(wide, part)
            total += int(np.einsum("i,i->", wide, self.weights[at : at + len(part)]))
        return total


@dataclass(slots=True, frozen=True)
class _Stack:
    """Pieces whose rows are alike and lie one after the other, as if rows of one tensor, the keys
    being part of `segment`'s multipliers."""

    begin: int
    end: int
    num_rows: int
    segment: _Segment

    @classmethod
    def of(cls, share: Share, pieces: Sequence[Piece]) -> _Stack:
        multipliers: list[Words] = []
        end = pieces[0].offset
        for piece in pieces:
            tensor = share.tensors[piece.tensor]
            shape, box = with_rows(tensor.shape, piece.box)
            row_bytes = box.shape[-1] * tensor.wire.itemsize
            first = box.start[-1] * tensor.wire.itemsize // 8
            (segment,) = _segments(_row_numbers(shape, box), first, first + row_bytes // 8)
            multipliers.append(segment.multipliers * np.uint64(tensor_key(tensor.name)))
            end += box.numel * tensor.wire.itemsize
        rows = np.concatenate(multipliers)
        whole = _Segment(segment.begin, segment.num_chunks, segment.weights, rows)
        return cls(pieces[0].offset, end, len(rows), whole)

    def run(self, payload: Bytes) -> int:
        """The sum over this stack's part of the packed `payload`."""
        words = payload[self.begin : self.end].view(np.uint64).reshape(self.num_rows, -1)
        return sum(
            self.segment.run(words[row : row + _MAX_SUMS], row)
            for row in range(0, self.num_rows, _MAX_SUMS)
        )


class _Scratch(threading.local):
    """A thread's own work space: digests run in several threads of an executor at once."""

    def __init__(self) -> None:
        self.words: Words = np.empty(_SCRATCH_WORDS, np.uint64)
        self._sums: Words = np.empty(_MAX_SUMS, np.uint64)

    def sums(self, num: int) -> Words:
        """`num` words for sums; grows to 8 bytes per 32 KiB of the longest row met."""
        if num > len(self._sums):
            self._sums = np.empty(num, np.uint64)
        return self._sums[:num]


_scratch: Final = _Scratch()


def _row_numbers(shape: tuple[int, ...], box: Box) -> Words:
    """Row-major numbers of the rows that `box` touches, in its own order: [rows]."""
    numbers = np.zeros(1, np.uint64)
    for d in range(len(shape) - 1):
        steps = np.arange(box.start[d], box.start[d] + box.shape[d], dtype=np.uint64)
        numbers = (numbers[:, None] * np.uint64(shape[d]) + steps).reshape(-1)
    return numbers


def _multipliers(a: Words, b: Words) -> Words:
    """`mix(a, b) | 1` for arrays."""
    z = a * np.uint64(0x9E3779B97F4A7C15) + b * np.uint64(0xC2B2AE3D27D4EB4F)
    z += np.uint64(0x165667B19E3779F9)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    z |= np.uint64(1)
    return z


_B: Final[Words] = _multipliers(
    np.arange(CHUNK, dtype=np.uint64), np.full(CHUNK, 1 << 63, np.uint64)
)


def _segments(rows: Words, begin: int, end: int) -> list[_Segment]:
    """Words [begin, end) of every row, parted where chunks begin."""
    segments: list[_Segment] = []
    at = begin
    while at < end:
        chunk, first = divmod(at, CHUNK)
        num_chunks = max(1, (end - at) // CHUNK) if first == 0 else 1
        stop = min(end, at + num_chunks * CHUNK - first)
        width = (stop - at) // num_chunks
        chunks = np.arange(chunk, chunk + num_chunks, dtype=np.uint64)
        multipliers = _multipliers(np.repeat(rows, num_chunks), np.tile(chunks, len(rows))).reshape(
            len(rows), num_chunks
        )
        weights = _B[first : first + width]
        segments.append(_Segment(at - begin, num_chunks, weights, multipliers))
        at = stop
    return segments


def _small_unit(share: Share, piece: Piece) -> int:
    """Bytes that can share one weight in the packed bucket; 0 for a piece that is not small."""
    tensor = share.tensors[piece.tensor]
    itemsize = tensor.wire.itemsize
    if piece.box.numel * itemsize >= SMALL_BYTES:
        return 0
    return math.gcd(alignment(piece.box, itemsize), piece.offset)


def _rows_alike(share: Share, piece: Piece) -> tuple[int, int] | None:
    """First word and number of words of every row of `piece`, if it may be stacked on others that
    have the same: it starts at a word, is whole words of one chunk, and is not large."""
    tensor = share.tensors[piece.tensor]
    _, box = with_rows(tensor.shape, piece.box)
    itemsize = tensor.wire.itemsize
    nbytes = box.numel * itemsize
    if not nbytes or nbytes > _STACKED_BYTES or piece.offset % 8 or alignment(box, itemsize) != 8:
        return None
    first, num = box.start[-1] * itemsize // 8, box.shape[-1] * itemsize // 8
    return (first, num) if first // CHUNK == (first + num - 1) // CHUNK else None
