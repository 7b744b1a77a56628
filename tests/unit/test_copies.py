from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from streamsync.digest.compiled import BucketDigest, compile_bucket
from streamsync.layout.state_dict import bind_tensors
from streamsync.plan.plan import CastRule, Rules
from streamsync.plan.planner import make_plan
from streamsync.stages.copies import BucketCopies, prepare_copies

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def loaded(
    model: dict[str, torch.Tensor], sink: dict[str, torch.Tensor], bucket_bytes: int
) -> Iterator[tuple[BucketCopies, BucketDigest, torch.Tensor]]:
    """Every bucket's copies at the sink and its digest, after gather and scatter; the payload."""
    source_binding, sink_binding = bind_tensors(model), bind_tensors(sink)
    plan = make_plan(
        sink="e/0",
        sink_layout=sink_binding.layout,
        sources={"t/0": source_binding.layout},
        rules=Rules(casts=(CastRule(source="float32", sink="bfloat16"),)),
        bucket_bytes=bucket_bytes,
    )
    ours, theirs = plan.source_shares[0], plan.sink_shares[0]
    gathers = prepare_copies(ours, source_binding, at_source=True)
    scatters = prepare_copies(theirs, sink_binding, at_source=False)
    for bucket, gather, scatter in zip(theirs.buckets, gathers, scatters, strict=True):
        payload = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        gather.gather(payload)
        scatter.scatter(payload)
        yield scatter, compile_bucket(theirs, bucket), payload


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
