"""What the sinks must hold: the model's Hugging Face tensors, gathered and taken apart the plain
way, and proofs that this is right which share no code with it nor with streamsync.

Rules of the export: `linear_qkv` holds, for each group of heads, its query heads, then its key,
then its value; `linear_fc1` holds gate and up of each rank; all else is concatenated.
"""

from __future__ import annotations

import tempfile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from tests.megatron.build import core_of, logits, padded_vocab, tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.megatron.scenarios import Scenario

Shards = dict[str, list[torch.Tensor]]


def export(scenario: Scenario, chunks: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """The model's tensors by Hugging Face name, whole, on rank 0; empty on the others.

    All ranks call it. Ranks that hold the same part must hold the same bits.
    """
    held: dict[str, tuple[int, int, torch.Tensor]] = {}
    for name, tensor, is_expert in tensors(chunks):
        of = "expert_tensor" if is_expert else "tensor_model"
        cut = getattr(tensor, "tensor_model_parallel", False)
        rank = getattr(mpu, f"get_{of}_parallel_rank")() if cut else 0
        for part_name, part in _experts(scenario, name, tensor.detach()):
            held[part_name] = (
                rank,
                getattr(mpu, f"get_{of}_parallel_world_size")() if cut else 1,
                part,
            )
    everything: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(held, everything)
    if everything is None:
        return {}
    shards: Shards = {}
    for of_rank in everything:
        for name, (rank, size, part) in of_rank.items():
            parts = shards.setdefault(name, [torch.empty(0)] * size)
            assert not parts[rank].numel() or same_bits(parts[rank], part), (
                f"{name}: replicas differ"
            )
            parts[rank] = part
    return _canonical(scenario.config, shards)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dtype and every bit are equal."""
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def _experts(
    scenario: Scenario, name: str, tensor: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stacked experts one by one, in the form of sequential ones; anything else as it is."""
    base, _, last = name.rpartition(".")
    if not base.endswith("mlp.experts") or last not in ("weight1", "weight2"):
        yield name, tensor
        return
    hidden = scenario.config["hidden_size"]
    num_local = scenario.config["num_experts"] // scenario.ep
    first = mpu.get_expert_model_parallel_rank() * num_local
    shape = (num_local, hidden, -1) if last == "weight1" else (num_local, -1, hidden)
    for number, expert in enumerate(tensor.view(shape)):
        linear = "linear_fc1" if last == "weight1" else "linear_fc2"
        yield f"{base}.local_experts.{first + number}.{linear}.weight", expert.t()


_NORMS = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
}
_MLA = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
}
_MTP = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "final_layernorm": "shared_head.norm",
}


def _canonical(config: dict[str, Any], shards: Shards) -> dict[str, torch.Tensor]:
    vocab, num_layers = config["vocab_size"], config["num_hidden_layers"]
    made: dict[str, torch.Tensor] = {}
    for name, parts in shards.items():
        words = name.split(".")
        if name == "embedding.word_embeddings.weight":
            made["model.embed_tokens.weight"] = torch.cat(parts)[:vocab]
        elif name == "output_layer.weight":
            made["lm_head.weight"] = torch.cat(parts)[:vocab]
        elif name == "decoder.final_layernorm.weight":
            made["model.norm.weight"] = parts[0]
        elif words[:2] == ["decoder", "layers"]:
            made |= _layer(config, f"model.layers.{words[2]}.", ".".join(words[3:]), parts)
        elif words[3] == "transformer_layer":
            prefix = f"model.layers.{num_layers + int(words[2])}."
            made |= _layer(config, prefix, ".".join(words[4:]), parts)
        else:
            layer = f"model.layers.{num_layers + int(words[2])}."
            made[f"{layer}{_MTP[words[3]]}.weight"] = torch.cat(parts)
    if config["tie_word_embeddings"] and "lm_head.weight" in made:
        assert same_bits(made.pop("lm_head.weight"), made["model.embed_tokens.weight"])
    return {name: tensor.contiguous() for name, tensor in made.items()}


def _layer(
    config: dict[str, Any], layer: str, name: str, parts: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    base, _, kind = name.rpartition(".")
    moe = {"mixtral": "block_sparse_moe"}.get(config["model_type"], "mlp")
    if base == "self_attention.linear_qkv":
        groups, size = config["num_key_value_heads"], config["head_dim"]
        whole = torch.cat(parts)
        heads = whole.view(
            groups, config["num_attention_heads"] // groups + 2, size, *whole.shape[1:]
        )
        rest = whole.shape[1:]
        return {
            f"{layer}self_attn.q_proj.{kind}": heads[:, :-2].reshape(-1, *rest),
            f"{layer}self_attn.k_proj.{kind}": heads[:, -2].reshape(-1, *rest),
            f"{layer}self_attn.v_proj.{kind}": heads[:, -1].reshape(-1, *rest),
        }
    if base == "self_attention.linear_proj":
        return {f"{layer}self_attn.o_proj.weight": torch.cat(parts, 1)}
    if name == "mlp.router.weight":
        return {f"{layer}{moe}.gate.weight": parts[0]}
    if name == "mlp.router.expert_bias":
        return {f"{layer}{moe}.gate.e_score_correction_bias": parts[0]}
    if base.endswith(("linear_fc1", "linear_fc2")):
        words = base.split(".")
        gate, up, down, owner = "gate_proj", "up_proj", "down_proj", "mlp"
        if "local_experts" in words:
            owner = f"{moe}.experts.{words[-2]}"
            if moe == "block_sparse_moe":
                gate, up, down = "w1", "w3", "w2"
        elif "shared_experts" in words:
            owner = "mlp.shared_experts"
        if words[-1] == "linear_fc2":
            return {f"{layer}{owner}.{down}.weight": torch.cat(parts, 1)}
        halves = [part.chunk(2) for part in parts]
        return {
            f"{layer}{owner}.{gate}.weight": torch.cat([half[0] for half in halves]),
            f"{layer}{owner}.{up}.weight": torch.cat([half[1] for half in halves]),
        }
    names = _MLA if config["model_type"] == "deepseek_v3" else _NORMS
    return {f"{layer}{names[base]}.weight": torch.cat(parts) if len(parts) > 1 else parts[0]}


IDS = torch.tensor([[1, 17, 33, 99, 400, 7, 250, 3]])


def logits_errors(
    scenario: Scenario, chunks: list[torch.nn.Module], *exports: dict[str, torch.Tensor]
) -> list[float]:
    """The largest difference of logits between Megatron and transformers given each export.

    All ranks call it; rank 0 has the exports, and gets the answer.
    """
    ours = logits(scenario, chunks, IDS)
    # Ranks of the last pipeline stage come last.
    last = dist.get_world_size() - 1
    shape = (*IDS.shape, padded_vocab(scenario))
    if dist.get_rank() != last:
        ours = torch.empty(shape, dtype=getattr(torch, scenario.dtype))
    dist.broadcast(ours, last)
    if dist.get_rank():
        return []
    ours = ours[..., : scenario.config["vocab_size"]]
    return [
        (ours - _transformers_logits(scenario.config, exported, ours.dtype)).abs().max().item()
        for exported in exports
    ]


def spoiled(
    config: dict[str, Any], exported: dict[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    """Exports that are wrong in the ways that exports are, by what is wrong with them."""

    def swapped(one: str, other: str) -> dict[str, torch.Tensor]:
        return {
            name.replace(one, "?").replace(other, one).replace("?", other): tensor
            for name, tensor in exported.items()
        }

    query = "model.layers.0.self_attn.q_proj.weight"
    heads = exported[query].view(-1, config["head_dim"], config["hidden_size"])
    return {
        "gate and up swapped": swapped(".gate_proj.", ".up_proj."),
        "keys and values swapped": swapped(".k_proj.", ".v_proj."),
        "query heads off by one": {**exported, query: heads.roll(1, 0).flatten(0, 1)},
    }


def _transformers_logits(
    config: dict[str, Any], exported: dict[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    import json
    from pathlib import Path

    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    draft = f"model.layers.{config['num_hidden_layers']}."  # no part of transformers' model
    exported = {n: t for n, t in exported.items() if not n.startswith(draft)}
    with tempfile.TemporaryDirectory() as folder:
        save_file(exported, f"{folder}/model.safetensors", metadata={"format": "pt"})
        Path(folder, "config.json").write_text(json.dumps(config))
        # From a folder, because only that runs transformers' own conversion of checkpoints.
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
        )
    assert not any(info.values()), info
    with torch.no_grad():
        out: torch.Tensor = model.eval()(IDS).logits
    return out


class _TransformerEngineNames:
    """A chunk under the names that Megatron's other implementation gives its parameters: those
    that mbridge knows."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        self._core = core_of(chunk)
        self.decoder = self._core.decoder

    def _renamed(self, name: str) -> str:
        is_mla = self._core.config.multi_latent_attention
        words = name.split(".")
        if "local_experts" in words:
            at = words.index("local_experts")
            number = words[at + 1]
            return ".".join([*words[:at], *words[at + 2 :]]) + number
        if name.endswith("input_layernorm.weight") and not is_mla:
            return name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        dense = f"{name.rpartition('.pre_mlp_layernorm')[0]}.mlp.linear_fc1.weight"
        if name.endswith("pre_mlp_layernorm.weight") and dense in dict(
            self._core.named_parameters()
        ):
            return name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        if is_mla:
            name = name.replace(".q_layernorm.", ".linear_q_up_proj.layer_norm_")
            name = name.replace(".kv_layernorm.", ".linear_kv_up_proj.layer_norm_")
        return name

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((self._renamed(n), p) for n, p in self._core.named_parameters())

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {self._renamed(n): t for n, t in self._core.state_dict().items() if t is not None}


def mbridge_export(scenario: Scenario, chunks: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """The same by mbridge 0.15.1, a library of its own. All ranks call it; rank 0 gets it all.

    It can't do tensor parallel experts without expert parallelism, nor with TP 1.
    """
    from mbridge.core.auto_bridge import AutoBridge

    class Config(SimpleNamespace):
        def __contains__(self, name: str) -> bool:
            return hasattr(self, name)

    config = Config(
        **{
            "router_aux_loss_coef": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "attention_dropout": 0.0,
            **scenario.config,
        }
    )
    bridge = AutoBridge.from_config(
        config, dtype=getattr(torch, scenario.dtype), make_vocab_size_divisible_by=1
    )
    bridge.vocab_size, bridge.padded_vocab_size = config.vocab_size, padded_vocab(scenario)
    with torch.no_grad():
        shown = {
            n: t.clone()
            for n, t in bridge.export_weights([_TransformerEngineNames(c) for c in chunks])
        }
    # A tied model changed this for its whole class, and for the models after it.
    bridge._DIRECT_MAPPING["output_layer.weight"] = "lm_head.weight"
    return shown if dist.get_rank() == 0 else {}
