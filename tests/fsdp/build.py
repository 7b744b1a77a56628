"""Real transformers models under FSDP2, trained; and their checkpoints, gathered without us."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fsdp.scenarios import Scenario

_TP_LAYER = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    # Each rank norms its own heads, so the gradients have to be summed over ranks.
    "self_attn.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
    "self_attn.k_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


class Training:
    """One rank's part of a model and its optimizer. Made by all ranks of the job at once, because
    meshes are; those outside the scenario have no `model`."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        inner = scenario.tp * scenario.ep
        shape = (scenario.copies, scenario.num_ranks // scenario.copies // inner, inner)
        mesh = DeviceMesh(
            "cpu",
            torch.arange(scenario.num_ranks).view(shape),
            mesh_dim_names=("copy", "shard", "inner"),
        )
        coordinate = mesh.get_coordinate()
        self.model: nn.Module | None = None
        if coordinate is None:
            return
        self._batch = coordinate[0] * shape[1] + coordinate[1]
        self.model = model = fresh(scenario)
        if scenario.tp > 1:
            _parallelize(model, mesh["inner"])
        if scenario.ep > 1:
            _deal_out_experts(model, mesh["inner"])
        sharding: dict[str, Any] = {
            "mesh": mesh["copy", "shard"] if scenario.copies > 1 else mesh["shard"],
            "offload_policy": (
                CPUOffloadPolicy(pin_memory=False) if scenario.offload else OffloadPolicy()
            ),
            "shard_placement_fn": lambda p: Shard(scenario.expert_dim if p.ndim == 3 else 0),
        }
        for layer in model.model.layers:
            fully_shard(layer, **sharding)
        fully_shard(model, **sharding)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)

    def step(self, number: int) -> None:
        """A step of the optimizer; the integer map changes, too."""
        model: Any = self.model
        generator = torch.Generator().manual_seed(1000 * number + self._batch)
        if self._scenario.forward:
            ids = torch.randint(0, model.config.vocab_size, (2, 9), generator=generator)
            model(input_ids=ids, labels=ids).loss.backward()
        else:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter) * number
        self._optimizer.step()
        self._optimizer.zero_grad()
        model.model.token_map.add_(number)

    def save(self, path: Path) -> None:
        """Rank 0 writes the checkpoint, as transformers saves it. All ranks of the scenario call.

        Torch gathers, tensor by tensor; nothing of streamsync has a part in it.
        """
        assert self.model is not None
        state = {
            name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for name, tensor in self.model.state_dict().items()
        }
        if dist.get_rank() == 0:
            plain = fresh(self._scenario)
            plain.load_state_dict(state, assign=True)
            plain.tie_weights()
            folder = path.with_suffix(".saved")
            plain.save_pretrained(folder)
            path.parent.mkdir(exist_ok=True)
            (folder / "model.safetensors").rename(path)  # appears complete

    def digest(self) -> int:
        """Of every bit that this rank holds."""
        assert self.model is not None
        tensors = [*self.model.parameters(), *self.model.buffers()]
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        return hash(
            tuple(
                t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in local
            )
        )


def fresh(scenario: Scenario) -> Any:
    """The model on one rank, the same on all."""
    torch.manual_seed(1)
    config = scenario.config
    config._experts_implementation = "eager"  # grouped matmul wants even dimensions
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.to(getattr(torch, scenario.dtype))
    model.model.register_buffer("token_map", torch.arange(config.vocab_size))
    return model


def _parallelize(model: Any, mesh: DeviceMesh) -> None:
    for layer in model.model.layers:
        plan = {name: style for name, style in _TP_LAYER.items() if _has_module(layer, name)}
        parallelize_module(layer, mesh, plan)
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        ends = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, ends)


def _has_module(module: nn.Module, name: str) -> bool:
    return any(name == known for known, _ in module.named_modules())


def _deal_out_experts(model: Any, mesh: DeviceMesh) -> None:
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for name, parameter in list(experts.named_parameters(recurse=False)):
            dealt = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            experts.register_parameter(name, nn.Parameter(dealt))
