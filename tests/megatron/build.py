"""Real Megatron-Core models on the CPU: built, filled with known values, run forward."""

from __future__ import annotations

import contextlib
import sys
import zlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import experts, moe_utils
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.megatron.scenarios import Scenario


# Megatron asks for the current CUDA device wherever it makes a tensor, and moves shared embeddings.
torch.cuda.current_device = lambda: torch.device("cpu")
torch.Tensor.cuda = lambda self, *_args, **_kwargs: self


class _NoRandomness:
    """Stands in for the CUDA generators that attention forks even without dropout."""

    def fork(self, *_args: object, **_kwargs: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_initialized(self) -> bool:
        return True


for _module in list(sys.modules.values()):
    if getattr(_module, "__name__", "").startswith("megatron.core") and hasattr(
        _module, "get_cuda_rng_tracker"
    ):
        _module.get_cuda_rng_tracker = lambda *_args, **_kwargs: _NoRandomness()
# TransformerEngine is missing, and these two don't notice.
moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
multi_latent_attention.HAVE_TE = False


def _grouped_gemm(
    tokens: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, *, trans_b: bool
) -> torch.Tensor:
    """What the CUDA kernel of that name computes: each expert's rows times its own matrix."""
    assert not trans_b
    parts = tokens.split(counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


experts.gg = SimpleNamespace(
    assert_grouped_gemm_is_available=lambda: None, ops=SimpleNamespace(gmm=_grouped_gemm)
)


class _Attention(torch.nn.Module):
    """Plain attention without parameters; Megatron's own local one knows no latent heads, whose
    keys and values differ in size."""

    def __init__(self, config: MLATransformerConfig, softmax_scale: float, **_: object) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        **_: object,
    ) -> torch.Tensor:
        """[position, batch, head, channel] each -> [position, batch, head * value channel]."""
        scores = torch.einsum("qbhc,kbhc->bhqk", query, key) * self.softmax_scale
        weights = scores.masked_fill(mask, -torch.inf).softmax(-1)
        return torch.einsum("bhqk,kbhc->qbhc", weights, value).flatten(2)


def transformer_config(scenario: Scenario) -> TransformerConfig:
    """Megatron's config of the scenario's model, with nothing that needs CUDA."""
    hf = scenario.config
    dtype = getattr(torch, scenario.dtype)
    settings: dict[str, Any] = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": hf["head_dim"],
        "ffn_hidden_size": hf["intermediate_size"],
        "layernorm_epsilon": hf["rms_norm_eps"],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf["model_type"] == "qwen2",
        "qk_layernorm": hf["model_type"] in ("qwen3", "qwen3_moe", "deepseek_v3"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": scenario.tp,
        "pipeline_model_parallel_size": scenario.pp,
        "virtual_pipeline_model_parallel_size": scenario.vpp if scenario.vpp > 1 else None,
        "num_layers_in_first_pipeline_stage": scenario.first_stage_layers,
        "expert_model_parallel_size": scenario.ep,
        "expert_tensor_parallel_size": scenario.etp,
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "attention_softmax_in_fp32": True,
    }
    num_experts = hf.get("num_experts", hf.get("num_local_experts", hf.get("n_routed_experts")))
    if num_experts:
        settings |= {
            "num_moe_experts": num_experts,
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_ffn_hidden_size": hf.get("moe_intermediate_size", hf["intermediate_size"]),
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_token_dispatcher_type": "allgather",  # the others make CUDA streams
            "moe_grouped_gemm": scenario.grouped,
            "moe_use_legacy_grouped_gemm": scenario.grouped,
            "moe_router_dtype": "fp32",
        }
    if hf["model_type"] != "deepseek_v3":
        return TransformerConfig(**settings)
    return MLATransformerConfig(
        **settings,
        multi_latent_attention=True,
        q_lora_rank=hf["q_lora_rank"],
        kv_lora_rank=hf["kv_lora_rank"],
        qk_head_dim=hf["qk_nope_head_dim"],
        qk_pos_emb_head_dim=hf["qk_rope_head_dim"],
        v_head_dim=hf["v_head_dim"],
        rope_type="rope",
        rotary_base=hf["rope_theta"],
        rotary_scaling_factor=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
        moe_layer_freq=[
            int(layer >= hf["first_k_dense_replace"]) for layer in range(hf["num_hidden_layers"])
        ],
        moe_shared_expert_intermediate_size=hf["moe_intermediate_size"] * hf["n_shared_experts"],
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=hf["routed_scaling_factor"],
        mtp_num_layers=hf["num_nextn_predict_layers"] or None,
    )


def padded_vocab(scenario: Scenario) -> int:
    """The vocabulary's rows in Megatron: a multiple of the ranks and more than there are tokens."""
    rows: int = scenario.config["vocab_size"]
    return -(-rows // (8 * scenario.tp)) * 8 * scenario.tp


def build(scenario: Scenario) -> list[torch.nn.Module]:
    """This rank's chunks of the model, one for each virtual stage; makes the process groups."""
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=scenario.tp,
        pipeline_model_parallel_size=scenario.pp,
        virtual_pipeline_model_parallel_size=scenario.vpp if scenario.vpp > 1 else None,
        expert_model_parallel_size=scenario.ep,
        expert_tensor_parallel_size=scenario.etp,
    )
    config = transformer_config(scenario)
    chunks = [
        _chunk(scenario, config, stage if scenario.vpp > 1 else None)
        for stage in range(scenario.vpp)
    ]
    if scenario.wrapped:
        if scenario.dtype == "bfloat16":
            chunks = [Float16Module(config, chunk) for chunk in chunks]
        settings = DistributedDataParallelConfig()
        chunks = [DistributedDataParallel(config, settings, chunk) for chunk in chunks]
        for chunk in chunks:
            for module in chunk.modules():
                if hasattr(module, "_maintain_float32_expert_bias"):
                    module._maintain_float32_expert_bias()
    return chunks


def _chunk(scenario: Scenario, config: TransformerConfig, stage: int | None) -> torch.nn.Module:
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage
    )
    if scenario.config["model_type"] == "deepseek_v3":
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = _Attention
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=stage)
    model: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab(scenario),
        max_sequence_length=scenario.config["max_position_embeddings"],
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        parallel_output=False,
        share_embeddings_and_output_weights=scenario.config["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=scenario.config["rope_theta"],
        mtp_block_spec=mtp,
        vp_stage=stage,
    ).eval()
    return model


def core_of(chunk: torch.nn.Module) -> GPTModel:
    """The model inside its wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def tensors(chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Global Megatron names, tensors and whether an expert's, of all parameters and router biases.

    Layers and experts are numbered over the whole model, as Megatron itself counts them.
    """
    for chunk in chunks:
        core = core_of(chunk)
        layers = core.decoder.layers
        biases = ((n, b) for n, b in core.named_buffers() if n.endswith("expert_bias"))
        for name, tensor in (*core.named_parameters(), *biases):
            words = name.split(".")
            if words[:2] == ["decoder", "layers"]:
                words[2] = str(layers[int(words[2])].layer_number - 1)
            if "local_experts" in words:
                at = words.index("local_experts") + 1
                num_local = (
                    core.config.num_moe_experts // mpu.get_expert_model_parallel_world_size()
                )
                first = mpu.get_expert_model_parallel_rank() * num_local
                words[at] = str(first + int(words[at]))
            yield ".".join(words), tensor, "experts" in words


def fill(scenario: Scenario, chunks: list[torch.nn.Module], step: int) -> None:
    """New values for everything, the same on ranks that hold the same part; padding is NaN.

    What a rank holds of a parameter decides its values, not who holds it, so data parallel
    replicas and the copies of shared embeddings agree as they do in training.
    """
    shared = scenario.config["tie_word_embeddings"]
    rows = scenario.config["vocab_size"]
    with torch.no_grad():
        for name, tensor, is_expert in tensors(chunks):
            tp = (
                mpu.get_expert_tensor_parallel_rank
                if is_expert
                else mpu.get_tensor_model_parallel_rank
            )
            ep = (
                mpu.get_expert_model_parallel_rank()
                if "weight1" in name or "weight2" in name
                else 0
            )
            cut = tp() if getattr(tensor, "tensor_model_parallel", False) else 0
            vocabulary = name in ("embedding.word_embeddings.weight", "output_layer.weight")
            key = "vocabulary" if vocabulary and shared else name
            generator = torch.Generator().manual_seed(
                zlib.crc32(f"{key} {cut} {ep} {step}".encode())
            )
            if name.endswith("expert_bias"):
                # Neighbours that bfloat16 can't tell apart.
                values = 0.5 + torch.randperm(len(tensor), generator=generator) * 1e-4
            elif tensor.ndim == 1:
                values = torch.rand(tensor.shape, generator=generator) + 0.5
            else:
                values = torch.randn(tensor.shape, generator=generator) * 0.08
            tensor.copy_(values)
            if vocabulary:
                first = cut * tensor.shape[0]
                tensor[max(0, rows - first) :] = torch.nan


@contextlib.contextmanager
def _forward_config(chunks: list[torch.nn.Module]) -> Iterator[None]:
    """Lets draft layers be (they would ask for labels), and lets stacked experts compute in any
    dtype (they ask for a config that says bf16)."""
    cores = [core_of(chunk) for chunk in chunks]
    config = cores[0].config
    before = config.bf16, config.mtp_num_layers, [core.mtp_process for core in cores]
    config.bf16, config.mtp_num_layers = True, None
    for core in cores:
        core.mtp_process = False
    yield
    config.bf16, config.mtp_num_layers = before[:2]
    for core, mtp_process in zip(cores, before[2], strict=True):
        core.mtp_process = mtp_process


def logits(scenario: Scenario, chunks: list[torch.nn.Module], ids: torch.Tensor) -> torch.Tensor:
    """The model's logits [batch, position, vocabulary] on every rank of the last stage; elsewhere
    something of no use. All ranks call it."""
    size = ids.shape[1]
    positions = torch.arange(size)[None]
    masked = torch.triu(torch.ones(size, size), 1).bool()[None, None]
    rank = mpu.get_pipeline_model_parallel_rank()
    before, after = (
        mpu.get_pipeline_model_parallel_prev_rank,
        mpu.get_pipeline_model_parallel_next_rank,
    )
    hidden = torch.empty(
        size, ids.shape[0], scenario.config["hidden_size"], dtype=getattr(torch, scenario.dtype)
    )
    out = hidden
    stages = scenario.pp * scenario.vpp
    with torch.no_grad(), _forward_config(chunks):
        for stage in range(rank, stages, scenario.pp):
            model = core_of(chunks[stage // scenario.pp])
            if stage > 0 and scenario.pp > 1:
                dist.recv(hidden, before())
                model.set_input_tensor(hidden)
            out = model(ids, positions, masked)
            if stage < stages - 1 and scenario.pp > 1:
                dist.send(out.contiguous(), after())
    return out
