"""The quantiser against a plain reference: one block after the other, and transformers' own."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from streamsync.stages.quantise import FP8_MAX, Quantiser, Read
from tests.fp8_reference import reference

SHAPES = [
    ((256, 384), (128, 128)),
    ((320, 200), (128, 128)),
    ((1, 1), (128, 128)),
    ((129, 127), (128, 128)),
    ((5, 300), (128, 128)),
    ((300, 5), (128, 128)),
    ((7, 11), (2, 3)),
    ((33, 1000), (1, 1000)),
    ((6, 4), (1, 1)),
    ((3, 130, 140), (1, 128, 128)),
    ((1300, 900), (128, 128)),
    ((2, 400_000), (1, 400_000)),
    ((0, 4), (128, 128)),
]


def reader(wide: torch.Tensor) -> Read:
    def read(start: tuple[int, ...], out: torch.Tensor) -> None:
        out.copy_(wide[tuple(slice(a, a + n) for a, n in zip(start, out.shape, strict=True))])

    return read


def quantised(wide: torch.Tensor, block: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    quantiser = Quantiser(wide.shape, block)
    values = torch.empty(wide.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(quantiser.grid)
    origin = (0,) * wide.dim()
    quantiser.run(reader(wide), wide.device, values=[(origin, values)], scales=[(origin, scales)])
    return values, scales


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(shape, generator=generator)
    spread = torch.randint(-20, 8, shape, generator=generator).exp2()
    return (wide * spread).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(("shape", "block"), SHAPES)
def test_equals_the_plain_reference(
    shape: tuple[int, ...], block: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Case 19: values and scales, edge blocks included, bit for bit."""
    wide = random(shape, dtype)
    before = wide.clone()
    values, scales = quantised(wide, block)
    wanted_values, wanted_scales = reference(wide, block)
    assert same(values, wanted_values)
    assert same(scales, wanted_scales)
    assert same(wide, before), "the source was touched"


def test_equals_what_transformers_computes() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    theirs = Fp8Quantize(SimpleNamespace(quantization_config=config))
    wide = random((384, 256), torch.bfloat16)
    wide[:128, :128] = 0
    made = theirs.convert({"a.weight": wide})
    values, scales = quantised(wide, (128, 128))
    assert same(values, made["a.weight"])
    assert same(scales, made["a.weight_scale_inv"])


def test_a_block_of_zeros_and_one_too_small_to_divide_by() -> None:
    wide = torch.zeros(4, 4)
    wide[2:, 2:] = 1e-38
    values, scales = quantised(wide, (2, 2))
    assert torch.equal(values.float(), torch.zeros(4, 4))
    assert torch.equal(scales, torch.ones(2, 2))


def test_what_is_not_finite_stays_so() -> None:
    wide = torch.ones(2, 4)
    wide[0, 0], wide[1, 3] = torch.nan, torch.inf
    values, scales = quantised(wide, (2, 2))
    back = values.float() * scales.repeat_interleave(2, 1)
    assert back[0, 0].isnan()
    assert back[1, 3].isnan()


def test_the_largest_of_each_block_is_kept() -> None:
    wide = random((300, 300), torch.float32)
    values, scales = quantised(wide, (128, 128))
    back = (
        values.float() * scales.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :300]
    )
    assert values.float().abs().max() == FP8_MAX
    assert (back - wide).abs().max() <= wide.abs().max() / 16


@pytest.mark.parametrize("seed", range(8))
def test_a_part_equals_the_same_part_of_the_whole(seed: int) -> None:
    """A piece may begin and end inside of blocks that its source holds whole."""
    wide = random((70, 50), torch.bfloat16, seed)
    block = (16, 8)
    wanted, wanted_scales = reference(wide, block)
    generator = torch.Generator().manual_seed(seed)
    r0, r1 = sorted(torch.randperm(71, generator=generator)[:2].tolist())
    c0, c1 = sorted(torch.randperm(51, generator=generator)[:2].tolist())
    top, left = r0 // 16 * 16, c0 // 8 * 8
    bottom, right = min(70, math.ceil(r1 / 16) * 16), min(50, math.ceil(c1 / 8) * 8)
    outer = wide[top:bottom, left:right]
    values = torch.empty(r1 - r0, c1 - c0, dtype=torch.float8_e4m3fn)
    quantiser = Quantiser(outer.shape, block)
    corner = (r0 - top, c0 - left)
    quantiser.run(reader(outer), wide.device, values=[(corner, values)])
    assert same(values, wanted[r0:r1, c0:c1])
    scales = torch.empty(quantiser.grid)
    quantiser.run(reader(outer), wide.device, scales=[((0, 0), scales)])
    assert same(
        scales, wanted_scales[top // 16 :, left // 8 :][: scales.shape[0], : scales.shape[1]]
    )


def test_strided_sources_and_targets() -> None:
    wide = random((40, 60), torch.bfloat16)
    values = torch.empty(60, 40, dtype=torch.float8_e4m3fn).t()
    Quantiser((40, 60), (16, 16)).run(
        reader(wide.t().contiguous().t()), wide.device, values=[((0, 0), values)]
    )
    assert same(values, reference(wide, (16, 16))[0])


def test_one_changed_element_shows() -> None:
    """The comparison above would see a single wrong value or scale."""
    wide = random((32, 32), torch.float32)
    values, scales = quantised(wide, (16, 16))
    for where in product((3, 20), (5, 31)):
        other = wide.clone()
        other[where] = other.abs().max() * 2
        changed, changed_scales = quantised(other, (16, 16))
        assert not same(changed, values)
        assert int((changed_scales != scales).sum()) == 1
