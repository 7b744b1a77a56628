"""A sink quantises what no source could: from staging, once every block is whole."""

from __future__ import annotations

import pytest
import torch

from streamsync.layout.binding import Binding
from streamsync.layout.region import Box, Entry, Layout, TensorSpec, View
from streamsync.plan.conversion import QuantRule, Wide, wide_name
from streamsync.plan.plan import Plan
from streamsync.stages.wide import stage_wide
from tests.fp8_reference import reference
from tests.sync_rig import bits

SHAPE = (10, 9)


def plan_of(*wide: Wide) -> Plan:
    return Plan(sink="e/0", shares=(), groups=(), needed_bytes=0, tensors=(), wide=wide)


def sink(
    values: list[Box], scales: list[Box], grid: tuple[int, ...]
) -> tuple[Binding, list[torch.Tensor], list[torch.Tensor]]:
    """A binding of those boxes of the tensors w and s, and its memory, full of rubbish."""
    specs = (TensorSpec("w", SHAPE, "float8_e4m3fn"), TensorSpec("s", grid, "float32"))
    fp8 = [torch.full(box.shape, 3.0).to(torch.float8_e4m3fn) for box in values]
    f32 = [torch.full(box.shape, torch.nan) for box in scales]
    memory = [*fp8, *f32]
    entries = tuple(
        Entry(int(at >= len(fp8)), box, View(at, 0, tensor.stride()))
        for at, (box, tensor) in enumerate(zip([*values, *scales], memory, strict=True))
    )
    return Binding(layout=Layout(tensors=specs, entries=entries), storages=memory), fp8, f32


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_that_a_sinks_own_cut_goes_through(dtype: str) -> None:
    """This sink has rows 3:8 only, and yet its scales are those of the whole blocks; what is not
    wide stays as it is."""
    wide = Wide(wide_name("w"), "w", "s", dtype, SHAPE, (4, 3), (Box((0, 3), (8, 6)),))
    half = [Box((3, 0), (5, 5)), Box((3, 5), (5, 4))]
    binding, values, scales = sink(half, [Box((0, 0), (2, 3))], (3, 3))
    staged = stage_wide(plan_of(wide), binding)
    assert [spec.name for spec in staged.layout.tensors] == ["w", "s", wide_name("w")]
    (landing,) = staged.landings
    (region,) = landing.staging
    assert staged.staging_bytes == region.nbytes
    rubbish = bits(values[0][:, :3])
    for seed in range(3):
        whole = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(region.dtype)
        wanted, wanted_scales = reference(whole, (4, 3))
        region.copy_(whole[:8, 3:])
        landing.land()
        assert bits(values[0][:, 3:]) == bits(wanted[3:8, 3:5])
        assert bits(values[1]) == bits(wanted[3:8, 5:])
        assert bits(scales[0][:, 1:]) == bits(wanted_scales[:2, 1:])
        assert bits(values[0][:, :3]) == rubbish
        assert scales[0][:, 0].isnan().all()


@pytest.mark.parametrize("grid", [(10,), (10, 1)])
def test_rows_with_a_scale_each(grid: tuple[int, ...]) -> None:
    block = QuantRule(scheme="fp8_channel").block_of(SHAPE)
    wide = Wide(wide_name("w"), "w", "s", "bfloat16", SHAPE, block, (Box((2, 0), (4, 9)),))
    own = Box((1,), (4,)) if len(grid) == 1 else Box((1, 0), (4, 1))
    binding, values, scales = sink([Box((1, 0), (4, 9))], [own], grid)
    (landing,) = stage_wide(plan_of(wide), binding).landings
    whole = torch.randn(SHAPE).bfloat16()
    wanted, wanted_scales = reference(whole, block)
    landing.staging[0].copy_(whole[2:6])
    landing.land()
    assert bits(values[0][1:]) == bits(wanted[2:5])
    assert bits(scales[0][1:].flatten()) == bits(wanted_scales[2:5].flatten())


def test_nothing_wide_changes_nothing() -> None:
    binding, _, _ = sink([Box((0, 0), SHAPE)], [], (3, 3))
    assert stage_wide(plan_of(), binding) is binding


def test_a_group_has_one_landing_that_says_what_it_makes() -> None:
    wides = [
        Wide(wide_name(values), values, scales, "bfloat16", (4, 4), (2, 2), ())
        for values, scales in (
            ("layers.0.up", "layers.0.up_scale_inv"),
            ("layers.1.up", ""),
            ("layers.0.down", ""),
        )
    ]
    binding, _, _ = sink([Box((0, 0), SHAPE)], [], (3, 3))
    landings = stage_wide(plan_of(*wides), binding).landings
    assert [landing.groups for landing in landings] == [{"layers.0"}, {"layers.1"}]
    assert [landing.makes for landing in landings] == [
        ("layers.0.up", "layers.0.up_scale_inv", "layers.0.down"),
        ("layers.1.up",),
    ]
