"""Published vectors of the digest, and the accidents it was made to see."""

from __future__ import annotations

import numpy as np
import pytest

from streamsync.digest.compiled import PieceDigest, compile_bucket
from streamsync.digest.definition import box_digest, mix, tensor_digest, tensor_key
from streamsync.layout.region import Box, Entry, Layout, TensorSpec, View, contiguous_strides
from streamsync.plan.holders import holders_of
from streamsync.plan.plan import Bucket, Piece, Rules, Share, SharedTensor
from streamsync.plan.planner import make_plan

MOD = 1 << 64
NORM = "model.norm.weight"


def counting(nbytes: int) -> bytes:
    """Bytes 1, 2, ..., 251, 1, 2, ..."""
    return bytes(1 + i % 251 for i in range(nbytes))


def test_published_parts() -> None:
    assert mix(0, 0) == 0xB39362CB946013E3
    assert mix(1, 2) == 0x4795D5188E816F0D
    assert tensor_key("") == 0xB4B2797457A0A6E5
    assert tensor_key(NORM) == 0x3BBD05D3E6D4D253


VECTORS = [
    (NORM, (), 4, 0xA08646CBFC4B760D),
    (NORM, (1,), 1, 0x7272435FDB6C5C0D),
    (NORM, (5,), 2, 0xB129C3613AECAFC0),
    (NORM, (3, 5), 2, 0xB041C19F8D7E6BD0),
    ("model.layers.0.mlp.experts.3.up_proj.weight", (2, 3, 8), 4, 0x57FF210575C713F0),
    ("x", (2, 20_001), 2, 0x6D8A4ED3B2A122D6),
]


@pytest.mark.parametrize(("name", "shape", "itemsize", "digest"), VECTORS)
def test_published_vectors(name: str, shape: tuple[int, ...], itemsize: int, digest: int) -> None:
    """The digest of tensors whose bytes count 1, 2, ..., 251, 1, 2, ... in row-major order."""
    dtype = {1: "uint8", 2: "bfloat16", 4: "float32"}[itemsize]
    data = counting(int(np.prod(shape, dtype=int)) * itemsize)
    assert tensor_digest(name, shape, itemsize, data) == digest
    compiled = PieceDigest(SharedTensor(name, name, shape, dtype, dtype), Box.whole(shape))
    assert compiled.run(np.frombuffer(data, np.uint8)) == digest


def test_zeros_and_empty_boxes_add_nothing() -> None:
    assert tensor_digest("x", (4, 3), 2, bytes(24)) == 0
    assert box_digest("x", (4, 3), 2, Box((1, 0), (0, 3)), b"") == 0
    piece = PieceDigest(SharedTensor("x", "x", (4, 0), "int8", "int8"), Box.whole((4, 0)))
    assert piece.run(np.empty(0, np.uint8)) == 0


def test_the_name_counts() -> None:
    assert tensor_digest("a", (2,), 1, b"ab") != tensor_digest("b", (2,), 1, b"ab")


def test_differently_cut_shards_give_one_digest_of_the_tensor() -> None:
    data = np.frombuffer(counting(6 * 5 * 2), np.uint8).reshape(6, 5, 2)
    whole = tensor_digest("x", (6, 5), 2, data.tobytes())
    for boxes in (
        [Box((0, 0), (4, 5)), Box((4, 0), (2, 5))],
        [Box((0, 0), (6, 3)), Box((0, 3), (6, 2))],
        [Box((0, 0), (1, 1)), Box((0, 1), (1, 4)), Box((1, 0), (5, 5))],
    ):
        total = 0
        for box in boxes:
            part = data[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
            total += box_digest("x", (6, 5), 2, box, part.tobytes())
        assert total % MOD == whole


def make_share(bucket_bytes: int) -> Share:
    """Large and tiny, odd and even tensors of four itemsizes in two layers."""
    shapes = [((40, 77), "bfloat16"), ((64, 96), "bfloat16"), ((5000,), "int8"), ((), "float32")]
    shapes += [((3,), "bfloat16"), ((24,), "bfloat16"), ((2, 9), "float32"), ((7,), "int64")] * 6
    specs = [
        TensorSpec(f"model.layers.{i % 2}.w{i}", shape, dtype)
        for i, (shape, dtype) in enumerate(shapes)
    ]
    layout = Layout(
        tensors=tuple(specs),
        entries=tuple(
            Entry(i, Box.whole(s.shape), View(i, 0, contiguous_strides(s.shape)))
            for i, s in enumerate(specs)
        ),
    )
    plan = make_plan(
        sink="e/0",
        sink_layout=layout,
        holders=holders_of({"t/0": layout}),
        rules=Rules(),
        bucket_bytes=bucket_bytes,
    )
    return plan.shares[0]


@pytest.mark.parametrize("bucket_bytes", [100, 4096, 1 << 20])
def test_a_model_has_one_digest_however_it_is_packed(bucket_bytes: int) -> None:
    """Case 6; the buckets' order does not matter, their sum is the model's."""
    share = make_share(bucket_bytes)
    contents = {
        t: np.frombuffer(counting(spec.wire.nbytes + k)[k:], np.uint8)
        for k, (t, spec) in enumerate((spec.name, spec) for spec in share.tensors)
    }
    by_name = {spec.name: spec for spec in share.tensors}
    total = 0
    for bucket in share.buckets:
        payload = np.zeros(bucket.nbytes, np.uint8)
        for piece in bucket.pieces:
            spec = share.tensors[piece.tensor].wire
            data = contents[spec.name].reshape(*spec.shape, spec.itemsize)
            index = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
            part = np.ascontiguousarray(data[index]).reshape(-1)
            payload[piece.offset : piece.offset + len(part)] = part
        digest = compile_bucket(share, bucket)
        found = digest.run(payload)
        apart = digest.run_small(payload)
        for i, large in digest.large:
            at = bucket.pieces[i].offset
            assert at == digest.offsets[i]
            apart += large.run(payload[at : at + large.nbytes].copy())
        assert apart % MOD == found
        total += found
    expected = sum(
        tensor_digest(name, s.shape, s.wire.itemsize, contents[name].tobytes())
        for name, s in by_name.items()
    )
    assert total % MOD == expected % MOD


def test_what_is_merged_and_what_is_not() -> None:
    """Case 25: tiny pieces of one alignment cost one call together."""
    (bucket, other) = make_share(1 << 20).buckets
    digest = compile_bucket(make_share(1 << 20), bucket)
    assert {i for i, _ in digest.large} | set(digest.small) == set(range(len(bucket.pieces)))
    assert len(digest.small) >= 12
    assert len(digest.large) <= 4
    assert len(compile_bucket(make_share(1 << 20), other).large) <= 4


def test_small_boxes_far_inside_long_rows() -> None:
    """Merged pieces know their chunk, too."""
    shape = (3, 50_000)
    spec = SharedTensor("x", "x", shape, "bfloat16", "bfloat16")
    boxes = [Box((1, 4 * k), (1, 12)) for k in (4_000, 4_097, 9_000, 12_000, 12_400)]
    pieces = tuple(Piece(0, box, 24 * i) for i, box in enumerate(boxes))
    bucket = Bucket(0, 0, 24 * len(boxes), pieces)
    share = Share(source="t", sink="e", tensors=(spec,), groups=("x",), buckets=(bucket,), digest=0)
    digest = compile_bucket(share, bucket)
    assert len(digest.small) == len(boxes)
    data = counting(bucket.nbytes)
    expected = sum(
        box_digest("x", shape, 2, box, data[24 * i : 24 * i + 24]) for i, box in enumerate(boxes)
    )
    assert digest.run(np.frombuffer(data, np.uint8)) == expected % MOD


def test_nothing_that_grows_with_the_bytes_is_allocated_in_a_run() -> None:
    """Only what the first run in a thread prepares."""
    import tracemalloc

    shape = (4096, 577)
    spec = SharedTensor("x", "x", shape, "bfloat16", "bfloat16")
    piece = Piece(0, Box.whole(shape), 0)
    bucket = Bucket(0, 0, 4096 * 1154, (piece,))
    share = Share(source="t", sink="e", tensors=(spec,), groups=("x",), buckets=(bucket,), digest=0)
    digest = compile_bucket(share, bucket)
    payload = np.ones(bucket.nbytes, np.uint8)
    digest.run(payload)
    tracemalloc.start()
    try:
        digest.run(payload)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16_384
