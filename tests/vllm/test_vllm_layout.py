"""Recorded layouts of vLLM's models against what vLLM's loaders really do, rank by rank."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from streamsync.errors import LayoutError
from streamsync.layout.binding import torch_dtype
from streamsync.layout.landing import Transform, check_transform
from tests.vllm.models import CONFIGS, cuts, write_config
from tests.vllm.recordings import read

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import nn

    from streamsync.layout.binding import Binding
    from streamsync.layout.region import TensorSpec

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # of code that is not ours
]


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    wanted = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def checkpoint(tensors: Mapping[str, TensorSpec], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(spec.shape, generator=generator).to(torch_dtype(spec.dtype))
        for name, spec in tensors.items()
    }


def poison(module: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name: tensor.detach().clone().view(-1).view(torch.uint8) for name, tensor in tensors}


def deliver(binding: Binding, tensors: Mapping[str, torch.Tensor]) -> None:
    """What a sync does: every entry's box of its tensor goes to the entry's view."""
    for entry in binding.layout.entries:
        spec = binding.layout.tensors[entry.tensor]
        where = tuple(slice(a, b) for a, b in zip(entry.box.start, entry.box.stop, strict=True))
        view = binding.view(entry.view, entry.box.shape, torch_dtype(spec.dtype))
        view.copy_(tensors[spec.name][where])


@pytest.mark.parametrize("family", CONFIGS)
def test_delivered_is_loaded(family: str, tmp_path: Path) -> None:
    """Cases 3, 4, 7, 14, 17: on every rank of every engine a sync by the recorded layout into a
    model that was loaded before equals a load into a poisoned one, bit for bit and buffers
    included; no parameter keeps poison, no rank's layout depends on memory, and the ranks of an
    engine cover the checkpoint."""
    from streamsync.engines.vllm_layout import (
        checkpoint_tensors,
        record_rank,
        record_vllm,
        vllm_ranks,
    )

    model_dir = write_config(tmp_path, family)
    tensors = checkpoint_tensors(model_dir)
    old, new = checkpoint(tensors, 0), checkpoint(tensors, 1)
    for cut in cuts(family):
        planned = record_vllm(model_dir, **cut._asdict(), tensors=tensors)
        covered = {
            name: torch.zeros(spec.shape, dtype=torch.bool) for name, spec in tensors.items()
        }
        for rank, module in vllm_ranks(model_dir, **cut._asdict(), device="cpu"):
            recording = record_rank(module, tensors)
            assert recording.opaque == {}, (cut, rank)
            assert recording.binding.layout == planned[rank], (cut, rank)
            with torch.no_grad():
                poison(module)
                module.load_weights(iter(new.items()))
                wanted = state(module)
                poison(module)
                module.load_weights(iter(old.items()))
                before = state(module)
                deliver(recording.binding, new)
            found = state(module)
            assert [n for n in wanted if not torch.equal(wanted[n], found[n])] == [], (cut, rank)
            assert any(not torch.equal(before[n], found[n]) for n in found), (cut, rank)
            assert [n for n, p in module.named_parameters() if p.isnan().any()] == [], (cut, rank)
            for entry in recording.binding.layout.entries:
                name = recording.binding.layout.tensors[entry.tensor].name
                start, stop = entry.box.start, entry.box.stop
                covered[name][tuple(map(slice, start, stop))] = True
        assert [n for n, seen in covered.items() if not seen.all()] == [], cut
    assert not dist.is_initialized()


@pytest.mark.parametrize("family", CONFIGS)
def test_the_recordings_are_what_vllm_does(family: str) -> None:
    """The files that are looked at elsewhere. Write them again with tests/vllm/record.py."""
    from tests.vllm.record import record

    kept, now = read(family), record(family)
    assert kept.config == CONFIGS[family]
    assert kept.tensors == now.tensors
    assert kept.engines == now.engines


def test_recording_leaves_no_trace(tmp_path: Path) -> None:
    """What vLLM and torch keep in globals is as before, also when a recording is left half way."""
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
    from vllm.model_executor.models import utils

    from streamsync.engines.vllm_layout import vllm_ranks

    def globals_now() -> list[object]:
        kept = [v for n, v in vars(parallel_state).items() if n.isupper() and n.startswith("_")]
        functions = [dist.new_group, parallel_state.init_model_parallel_group]
        functions += [parallel_state._node_count, ExpertMapManager.__init__]
        other = [dict(utils._model_to_pp_missing_layer_names), dict(rotary_embedding._ROPE_DICT)]
        default = [torch.get_default_dtype(), torch.get_default_device()]
        return [*kept, *functions, *other, *default, sys.excepthook]

    before = globals_now()
    ranks = vllm_ranks(write_config(tmp_path, "qwen3_moe"), tp=2, pp=2, ep=True)
    assert next(ranks)[0] == 0
    assert dist.is_initialized()
    ranks.close()
    assert not dist.is_initialized()
    assert globals_now() == before


def test_experts_that_vllm_prepacks(tmp_path: Path) -> None:
    """Case 18: on a CPU vLLM pads and packs stacked experts once, at start-up, and loads raw
    weights into the packed memory ever after. Declared as transforms they are as in a fresh engine,
    sync after sync, at the same addresses; not declared, the recording no longer fits."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    from streamsync.engines.vllm_layout import checkpoint_tensors, record_rank, vllm_ranks

    model_dir = write_config(tmp_path, "qwen3_moe")
    tensors = checkpoint_tensors(model_dir)

    def started(seed: int) -> Iterator[nn.Module]:
        """One rank's model in memory with a checkpoint loaded; packed when it is asked again."""
        for _, module in vllm_ranks(model_dir, device="cpu"):
            module.load_weights(iter(checkpoint(tensors, seed).items()))
            yield module
            for part in list(module.modules()):
                if hasattr(part, "w13_weight"):
                    part.quant_method.process_weights_after_loading(part)
            yield module

    wanted = [state(list(started(seed))[1]) for seed in range(3)]
    engine = started(0)
    raw = next(engine)
    shapes = {n: p.shape for n, p in raw.named_parameters() if "w13" in n or "w2" in n}
    assert len(shapes) == 4
    half = {name: shape[1] // 2 for name, shape in shapes.items()}

    def pack(name: str):
        def land(staged: torch.Tensor, live: torch.Tensor) -> None:
            spread = torch.zeros_like(live)
            if "w13" in name:
                for k in range(2):
                    begin = k * live.shape[1] // 2
                    rows = staged[:, k * half[name] : (k + 1) * half[name]]
                    spread[:, begin : begin + half[name]] = rows
            else:
                spread[:, :, : staged.shape[2]] = staged
            layer = packed.get_submodule(name.rpartition(".")[0])
            isa = layer.quant_method.moe_kernel.fused_experts.isa
            live.copy_(cpu_prepack_moe_weight(spread, isa))

        return land

    transforms = [Transform(parameter=name, land=pack(name)) for name in shapes]
    plain = record_rank(raw, tensors)
    recording = record_rank(raw, tensors, transforms=transforms)
    packed = next(engine)
    with pytest.raises(LayoutError, match="w13_weight"):
        plain.binding.rebind()
    recording.binding.rebind()
    assert {n: p.shape for n, p in packed.named_parameters() if n in shapes} != shapes
    addresses = [p.data_ptr() for p in packed.parameters()]
    with torch.no_grad():
        for transform in transforms:
            check_transform(recording.binding, transform, checkpoint(tensors, 0), packed)
        for seed in (1, 2, 0):
            deliver(recording.binding, checkpoint(tensors, seed))
            for landing in recording.binding.landings:
                landing.land()
            found = state(packed)
            differing = [n for n in found if not torch.equal(found[n], wanted[seed][n])]
            assert [n for n in differing if "_scale" not in n] == []
    assert [p.data_ptr() for p in packed.parameters()] == addresses
    engine.close()
