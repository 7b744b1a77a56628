"""Layouts of vLLM models for every rank of an engine, recorded in one process without weights.

vLLM builds the real model of each rank on the meta device, and its own loader is recorded there
(`record_loader`). The ranks are torch's fake process group: no other process, no network, nothing
that computes. Written against vLLM 0.32.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from streamsync.errors import ConfigError, LayoutError, MissingExtraError
from streamsync.layout.recorder import record_loader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import nn

    from streamsync.layout.landing import Transform
    from streamsync.layout.recorder import Recording
    from streamsync.layout.region import Layout, TensorSpec


def record_vllm(
    model_dir: str | Path,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: bool = False,
    tensors: Mapping[str, TensorSpec] | None = None,
) -> list[Layout]:
    """The sink layouts of a vLLM engine for the model whose config.json lies in `model_dir`.

    One per rank, in vLLM's order: pipeline stages outermost. `tensors` are the checkpoint's, by
    default those that transformers would write (`checkpoint_tensors`). With `ep` (vLLM's
    `enable_expert_parallel`) whole experts are spread over the `tp` ranks of a stage instead of
    slices of all. For plans: the layouts have no memory. A rank takes what vLLM's own loader takes
    to look at the names, tens of milliseconds for a dense model of any size. Leaves no global state
    behind. A tensor that a loader does more to than copying is in `Layout.opaque`. Raises
    `LayoutError` when a parameter gets nothing.
    """
    tensors = checkpoint_tensors(model_dir) if tensors is None else tensors
    layouts: list[Layout] = []
    for rank, module in vllm_ranks(model_dir, tp=tp, pp=pp, ep=ep):
        recording = record_rank(module, tensors)
        for name, _ in module.named_parameters():  # buffers hold scales of the KV cache
            if count := recording.unwritten.get(name):
                raise LayoutError(
                    f"vLLM's loader puts nothing into {count} elements of it: the checkpoint's "
                    "list of tensors is not complete",
                    tensor=name,
                    rank=rank,
                )
        layouts.append(recording.binding.layout)
    return layouts


def checkpoint_tensors(model_dir: str | Path) -> dict[str, TensorSpec]:
    """The tensors of a checkpoint of the model whose config.json lies in `model_dir`, in order.

    Transformers makes them of a model on the meta device. Raises `LayoutError` for models whose
    checkpoints transformers converts by more than moving blocks.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from streamsync.layout.transformers import checkpoint_specs

    config = AutoConfig.from_pretrained(str(model_dir))
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return {spec.name: spec for spec in checkpoint_specs(model)}


def record_rank(
    module: nn.Module,
    tensors: Mapping[str, TensorSpec],
    *,
    transforms: Iterable[Transform] = (),
) -> Recording:
    """The recording of one vLLM model that was just built or loaded, and not yet repacked."""
    load: Any = module.load_weights
    return record_loader(module, tensors, load, transforms=transforms)


def vllm_ranks(
    model_dir: str | Path,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: bool = False,
    device: str = "meta",
) -> Iterator[tuple[int, nn.Module]]:
    """Builds vLLM's model for each rank in turn: `(rank, module)`, in memory of `device`.

    A module is of use until the next one is asked for: then its rank's process group is gone. What
    vLLM and torch keep in globals is as before once the iterator ends or is closed. The parameters
    hold no weights. Raises `MissingExtraError` without vLLM, and `ConfigError` where a process
    group exists already.
    """
    if dist.is_initialized():
        raise ConfigError("recording needs a process without a torch process group of its own")
    config = _engine_config(model_dir, tp=tp, pp=pp, ep=ep)
    for rank in range(tp * pp):
        with _as_rank(config, rank):
            yield rank, _build(config, device)


def _engine_config(model_dir: str | Path, *, tp: int, pp: int, ep: bool) -> Any:
    try:
        from vllm.engine.arg_utils import EngineArgs
    except ImportError:
        raise MissingExtraError("recording vLLM's layouts", "vllm") from None
    path = str(Path(model_dir).resolve())
    arguments = EngineArgs(
        model=path,
        tokenizer=path,
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        max_model_len=128,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        enable_expert_parallel=ep,
        # The one executor that takes ranks as they are and starts nothing.
        distributed_executor_backend="external_launcher" if tp * pp > 1 else "uni",
        kv_cache_memory_bytes=1 << 26,
    )
    return arguments.create_engine_config()


@contextmanager
def _as_rank(config: Any, rank: int) -> Iterator[None]:
    """vLLM's parallel state of `rank`, with nobody else there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.models import utils

    world_size = config.parallel_config.world_size
    new_group = dist.new_group
    init_group = parallel_state.init_model_parallel_group

    def fake_group(ranks: Any = None, *_args: Any, **_options: Any) -> Any:
        return new_group(ranks, backend="fake")

    def quiet_group(group_ranks: Any, local_rank: int, backend: str, **options: Any) -> Any:
        options |= {"use_message_queue_broadcaster": False, "use_device_communicator": False}
        return init_group(group_ranks, local_rank, backend, **options)

    with ExitStack() as stack:
        stack.enter_context(_replaced(dist, "new_group", fake_group))
        stack.enter_context(_replaced(parallel_state, "init_model_parallel_group", quiet_group))
        stack.enter_context(_replaced(parallel_state, "_node_count", lambda _group: 1))
        for name in ("_WORLD", "_NODE_COUNT", "_INNER_DP_WORLD"):
            stack.enter_context(_replaced(parallel_state, name, None))
        # By id of a model, which the next one may get; and buffers of the last one's device.
        stack.enter_context(_replaced(utils, "_model_to_pp_missing_layer_names", {}))
        stack.enter_context(_replaced(rotary_embedding, "_ROPE_DICT", {}))
        stack.enter_context(_replaced(sys, "excepthook", sys.excepthook))  # torch adds the rank
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        stack.enter_context(set_current_vllm_config(config))
        parallel_state.init_distributed_environment(
            world_size=world_size,
            rank=rank,
            local_rank=rank,
            distributed_init_method="tcp://127.0.0.1:1",
            backend="fake",
        )
        stack.callback(parallel_state.destroy_model_parallel)
        parallel = config.parallel_config
        parallel_state.initialize_model_parallel(
            parallel.tensor_parallel_size, parallel.pipeline_parallel_size, backend="fake"
        )
        yield


def _build(config: Any, device: str) -> nn.Module:
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    init = ExpertMapManager.__init__

    def init_in_memory(self: Any, *args: Any, **options: Any) -> None:
        # Which experts are here is data that the loader reads, also when the model is on meta.
        with torch.device("cpu"):
            init(self, *args, **options)

    # Layers note themselves here by name and refuse to do it twice.
    config.compilation_config.static_forward_context.clear()
    with (
        _replaced(ExpertMapManager, "__init__", init_in_memory),
        set_default_torch_dtype(config.model_config.dtype),
        torch.device(device),
    ):
        module: nn.Module = initialize_model(vllm_config=config)
    return module


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
