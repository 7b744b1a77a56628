from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from streamsync.digest.compiled import BucketDigest, compile_bucket
from streamsync.layout.region import Box
from streamsync.layout.state_dict import bind_tensors
from streamsync.plan.plan import Bucket, Piece, Share, SharedTensor
from streamsync.stages.copies import BucketCopies, prepare_copies

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamsync.layout.region import Layout, View

SHAPES = {
    "m.large": (64, 128),
    "m.transposed": (96, 80),
    "m.unaligned": (33, 65),
    **{f"m.stacked_{k}": (20 + k, 128) for k in range(5)},
    **{f"m.small_{k}": (7,) for k in range(6)},
    "m.scalar": (),
    "m.empty": (0, 4),
}


def sink_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if name == "m.transposed":
        return torch.zeros(shape[::-1], dtype=torch.bfloat16).t()
    if name == "m.unaligned":  # begins 2 bytes after a multiple of 8
        return torch.zeros(shape[0] * shape[1] + 1, dtype=torch.bfloat16)[1:].view(shape)
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.fixture(params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    dtype = getattr(torch, request.param)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}


def share_of(source: Layout, sink: Layout, bucket_bytes: int) -> Share:
    """Everything, in order, in buckets of at most `bucket_bytes`."""
    tensors = tuple(
        SharedTensor(spec.name, spec.name, spec.shape, theirs.dtype, spec.dtype)
        for spec, theirs in zip(sink.tensors, source.tensors, strict=True)
    )
    loads: list[tuple[int, list[Piece]]] = [(0, [])]
    for number, spec in enumerate(sink.tensors):
        for box in Box.whole(spec.shape).cut(bucket_bytes // spec.itemsize):
            nbytes = box.numel * spec.itemsize
            if not nbytes:
                continue
            if loads[-1][0] + nbytes > bucket_bytes:
                loads.append((0, []))
            at, pieces = loads[-1]
            loads[-1] = (at + nbytes, [*pieces, Piece(number, box, at)])
    buckets = (Bucket(i, 0, nbytes, tuple(pieces)) for i, (nbytes, pieces) in enumerate(loads))
    return Share(
        source="t/0", sink="e/0", tensors=tensors, groups=("m",), buckets=tuple(buckets), digest=0
    )


def views_of(share: Share, layout: Layout) -> list[list[View]]:
    entries = {layout.tensors[entry.tensor].name: entry for entry in layout.entries}
    found: list[list[View]] = []
    for bucket in share.buckets:
        names = [share.tensors[piece.tensor].name for piece in bucket.pieces]
        pairs = zip(bucket.pieces, (entries[name] for name in names), strict=True)
        found.append([entry.view.within(entry.box, piece.box) for piece, entry in pairs])
    return found


def loaded(
    model: dict[str, torch.Tensor], sink: dict[str, torch.Tensor], bucket_bytes: int
) -> Iterator[tuple[BucketCopies, BucketDigest, torch.Tensor]]:
    """Every bucket's copies at the sink and its digest, after gather and scatter; the payload."""
    ours, theirs = bind_tensors(model), bind_tensors(sink)
    share = share_of(ours.layout, theirs.layout, bucket_bytes)
    gathers = prepare_copies(share, views_of(share, ours.layout), ours, at_source=True)
    scatters = prepare_copies(share, views_of(share, theirs.layout), theirs, at_source=False)
    for bucket, gather, scatter in zip(share.buckets, gathers, scatters, strict=True):
        payload = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        gather.gather(payload)
        scatter.scatter(payload)
        yield scatter, compile_bucket(share, bucket), payload


@pytest.mark.parametrize("bucket_bytes", [2048, 1 << 20])
def test_what_was_loaded_is_what_was_packed(
    model: dict[str, torch.Tensor], bucket_bytes: int
) -> None:
    sink = {name: sink_tensor(name, shape) for name, shape in SHAPES.items()}
    for copies, digest, payload in loaded(model, sink, bucket_bytes):
        scratch = torch.full_like(payload, 0xAA)
        expected = digest.run(payload.numpy())
        payload.fill_(0)  # the digest is that of the parameters, not of what was received
        assert copies.loaded_digest(digest, scratch) == expected
    for name, tensor in model.items():
        assert torch.equal(sink[name], tensor.to(torch.bfloat16)), name


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if 0 not in shape])
def test_one_changed_bit_of_a_loaded_tensor_is_seen(
    model: dict[str, torch.Tensor], name: str
) -> None:
    """What lands wrong in the parameters is told from what was sent."""
    sink = {name: sink_tensor(name, shape) for name, shape in SHAPES.items()}
    ((copies, digest, payload),) = loaded(model, sink, 1 << 20)
    scratch = torch.empty_like(payload)
    expected = copies.loaded_digest(digest, scratch)
    last = sink[name].view(torch.int16)[(-1,) * sink[name].dim()]
    last.bitwise_xor_(1)
    assert copies.loaded_digest(digest, scratch) != expected
    last.bitwise_xor_(1)
    assert copies.loaded_digest(digest, scratch) == expected
