"""Compiled digests equal the definition for every shape, cut and packing, and see every flip."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from streamsync.digest.compiled import PieceDigest, compile_bucket
from streamsync.digest.definition import box_digest, tensor_digest
from streamsync.layout.region import Box
from streamsync.plan.plan import Bucket, Piece, Share, SharedTensor

MOD = 1 << 64
DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}
SHAPES = st.lists(st.integers(1, 9), max_size=3).map(tuple)


def cuts(draw: st.DrawFn, box: Box) -> list[Box]:
    if not box.shape or draw(st.integers(0, 2)) == 0:
        return [box]
    d = draw(st.integers(0, len(box.shape) - 1))
    at = draw(st.integers(0, box.shape[d]))
    if at in (0, box.shape[d]):
        return [box]
    parts = []
    for a, n in ((0, at), (at, box.shape[d] - at)):
        start = (*box.start[:d], box.start[d] + a, *box.start[d + 1 :])
        parts += cuts(draw, Box(start, (*box.shape[:d], n, *box.shape[d + 1 :])))
    return parts


def content(shape: tuple[int, ...], itemsize: int, seed: int) -> np.ndarray:
    """Random bytes, [*shape, itemsize]."""
    return np.random.default_rng(seed).integers(0, 256, (*shape, itemsize), dtype=np.uint8)


def bytes_of(data: np.ndarray, box: Box) -> np.ndarray:
    index = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
    return np.ascontiguousarray(data[index]).reshape(-1)


def pack(items: list[tuple[str, tuple[int, ...], int, Box, np.ndarray]]):
    """A bucket of these (name, shape, itemsize, box, data), in a share of its own."""
    tensors, pieces, payload, at = [], [], [], 0
    for name, shape, itemsize, box, data in items:
        tensors.append(SharedTensor(name, name, shape, DTYPES[itemsize], DTYPES[itemsize]))
        pieces.append(Piece(len(tensors) - 1, box, at))
        payload.append(data)
        at += data.nbytes
    bucket = Bucket(0, 0, at, tuple(pieces))
    share = Share(
        source="trainer/0",
        sink="engine0/0",
        tensors=tuple(tensors),
        groups=("g",),
        buckets=(bucket,),
        digest=0,
    )
    return share, bucket, np.concatenate(payload)


@st.composite
def buckets(draw: st.DrawFn):
    """(expected digest, bucket parts): boxes of several tensors in any order."""
    items, expected = [], 0
    for k in range(draw(st.integers(1, 6))):
        shape, itemsize = draw(SHAPES), draw(st.sampled_from(sorted(DTYPES)))
        data = content(shape, itemsize, draw(st.integers(0, 1 << 32)))
        items += [
            (f"t{k}.weight", shape, itemsize, box, bytes_of(data, box))
            for box in cuts(draw, Box.whole(shape))
        ]
        expected += tensor_digest(f"t{k}.weight", shape, itemsize, data.tobytes())
    return expected % MOD, draw(st.permutations(items))


@settings(deadline=None, max_examples=60)
@given(buckets())
def test_a_packed_bucket_has_the_digest_of_its_tensors(bucket) -> None:
    expected, items = bucket
    share, packed, payload = pack(items)
    digest = compile_bucket(share, packed)
    assert digest.run(payload) == expected
    singly = sum(
        PieceDigest(share.tensors[p.tensor], p.box).run(item[-1])
        for p, item in zip(packed.pieces, items, strict=True)
    )
    assert singly % MOD == expected
    small = {i for i, _ in digest.large}.symmetric_difference(digest.small)
    assert small == set(range(len(items)))


@settings(deadline=None, max_examples=60)
@given(buckets(), st.data())
def test_every_flipped_bit_changes_the_digest(bucket, data: st.DataObject) -> None:
    """Case 42: the check itself fails when any single bit is wrong."""
    expected, items = bucket
    share, packed, payload = pack(items)
    digest = compile_bucket(share, packed)
    bit = data.draw(st.integers(0, 8 * payload.nbytes - 1))
    payload[bit // 8] ^= 1 << bit % 8
    assert digest.run(payload) != expected
    payload[bit // 8] ^= 1 << bit % 8
    assert digest.run(payload) == expected


@settings(deadline=None, max_examples=40)
@given(buckets())
def test_boxes_add_up(bucket) -> None:
    expected, items = bucket
    total = sum(
        box_digest(name, shape, itemsize, box, data.tobytes())
        for name, shape, itemsize, box, data in items
    )
    assert total % MOD == expected


@settings(deadline=None, max_examples=12)
@given(
    st.sampled_from(
        [(1, 40000), (40000,), (300_001,), (3, 9001), (2, 33000), (3000, 3), (700, 13), (90, 577)]
    ),
    st.sampled_from([1, 2, 8]),
    st.data(),
)
def test_large_pieces(shape: tuple[int, ...], itemsize: int, data: st.DataObject) -> None:
    """Rows longer than a chunk and than the scratch, short rows, boxes that begin anywhere."""
    start = tuple(data.draw(st.integers(0, n // 3)) for n in shape)
    stop = tuple(data.draw(st.integers(-(-2 * n // 3), n)) for n in shape)
    box = Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))
    raw = bytes_of(content(shape, itemsize, 7), box)
    tensor = SharedTensor("big", "big", shape, DTYPES[itemsize], DTYPES[itemsize])
    digest = PieceDigest(tensor, box)
    expected = sparse_reference("big", shape, itemsize, box, raw)
    shifted = np.empty(raw.nbytes + 1, np.uint8)[1:]
    shifted[:] = raw
    assert digest.run(raw) == expected
    assert digest.run(shifted) == expected


def sparse_reference(
    name: str, shape: tuple[int, ...], itemsize: int, box: Box, raw: np.ndarray
) -> int:
    """Clears nearly all bytes of `raw`, then sums `box_digest` over the rest: zeros add nothing."""
    flat = raw.reshape(-1)
    keep = np.random.default_rng(1).integers(0, len(flat), 300)
    keep = np.unique(np.concatenate([keep, [0, len(flat) - 1]]))
    kept = flat[keep].copy()
    flat[:] = 0
    flat[keep] = kept
    inner = box.shape[-1] * itemsize
    total = 0
    for at, byte in zip(keep.tolist(), kept.tolist(), strict=True):
        row, column = divmod(at, inner)
        lead = np.unravel_index(row, box.shape[:-1]) if len(shape) > 1 else ()
        element, lane = divmod(column, itemsize)
        corner = (*(int(a + i) for a, i in zip(box.start, lead)), box.start[-1] + element)  # noqa: B905 - the last dim comes after
        one = bytes(lane) + bytes([byte]) + bytes(itemsize - lane - 1)
        total += box_digest(name, shape, itemsize, Box(corner, (1,) * len(shape)), one)
    return total % MOD


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 8), st.integers(1, 40), st.sampled_from([1, 2, 4]), st.data())
def test_swapped_rows_and_tensors_are_seen(rows: int, columns: int, itemsize: int, data) -> None:
    array = content((rows, columns), itemsize, data.draw(st.integers(0, 1 << 32)))
    a, b = data.draw(st.permutations(range(rows)))[:2]
    assume((array[a] != array[b]).any())
    swapped = array.copy()
    swapped[[a, b]] = swapped[[b, a]]
    shape = (rows, columns)
    before = tensor_digest("x", shape, itemsize, array.tobytes())
    assert before != tensor_digest("x", shape, itemsize, swapped.tobytes())
    other = tensor_digest("y", shape, itemsize, swapped.tobytes())
    crossed = tensor_digest("x", shape, itemsize, swapped.tobytes())
    crossed += tensor_digest("y", shape, itemsize, array.tobytes())
    assert (before + other) % MOD != crossed % MOD


def test_many_tiny_tensors_in_several_threads() -> None:
    """Case 25: tiny pieces are merged; a digest is the same in whatever thread it runs."""
    for itemsize, numel in ((2, 24), (2, 3), (1, 5)):
        shape = (numel,)
        items = []
        for k in range(300):
            data = content(shape, itemsize, k)
            items.append((f"t{k}", shape, itemsize, Box.whole(shape), data.reshape(-1)))
        expected = sum(tensor_digest(n, s, i, d.tobytes()) for n, s, i, _, d in items) % MOD
        share, bucket, payload = pack(items)
        digest = compile_bucket(share, bucket)
        assert math.prod(shape) == numel
        assert len(digest.small) == 300 or itemsize * numel % 8
        with ThreadPoolExecutor(4) as threads:
            got = list(threads.map(digest.run, [payload] * 16))
        assert set(got) == {expected}


@given(
    st.integers(4, 12), st.sampled_from([2, 4, 8]), st.sampled_from([1, 3, 8, 64, 512]), st.data()
)
def test_stacked_pieces_count_as_if_alone(
    num: int, itemsize: int, row_words: int, data: st.DataObject
) -> None:
    """Case 25: pieces whose rows are alike are digested in one go, whatever tensor they are of."""
    columns = row_words * 8 // itemsize
    least = -(-4096 // (row_words * 8))
    items, expected = [], 0
    for k in range(num):
        start, rows = data.draw(st.integers(0, 3)), data.draw(st.integers(least, least + 9))
        shape = (start + rows + 1, 3 * columns)
        box = Box((start, columns), (rows, columns))
        packed = content(box.shape, itemsize, k).reshape(-1)
        items.append((f"t{k % 3}", shape, itemsize, box, packed))
        dtype = DTYPES[itemsize]
        tensor = SharedTensor(f"t{k % 3}", f"t{k % 3}", shape, dtype, dtype)
        expected += PieceDigest(tensor, box).run(packed)
    share, bucket, payload = pack(items)
    digest = compile_bucket(share, bucket)
    assert len(digest.small) == num
    assert not digest.large
    assert digest.run(payload) == expected % MOD
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] ^= 1 << data.draw(st.integers(0, 7))
    assert digest.run(payload) != expected % MOD
