"""Binding Megatron's parameters, on stand-ins with its names, shapes and marks: needs no Megatron.

`tests/integration/test_megatron.py` does it with real models.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from streamsync.errors import LayoutError
from streamsync.layout.binding import torch_dtype
from streamsync.models.megatron_binding import bind_megatron
from streamsync.models.megatron_rules import Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from streamsync.layout.binding import Binding

HIDDEN, HEADS, GROUPS, HEAD, FFN, VOCAB, EXPERTS = 6, 8, 2, 4, 12, 11, 8
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD,
    "num_experts": EXPERTS,
    "moe_intermediate_size": 4,
    "tie_word_embeddings": False,
}
ATTENTION = "model.layers.0.self_attn."
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


def gpt(tensors: Mapping[str, torch.Tensor], layers: Iterable[int] = (0,)) -> nn.Module:
    """A module with parameters (buffers for biases of routers) of those names, whose local layers
    are the model's `layers`."""
    root = nn.Module()
    root.config = SimpleNamespace(num_moe_experts=EXPERTS)
    root.decoder = nn.Module()
    root.decoder.layers = nn.ModuleList(nn.Module() for _ in layers)
    for layer, number in zip(root.decoder.layers, layers, strict=True):
        layer.layer_number = number + 1
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        owner = root
        for word in path:
            if not hasattr(owner, word):
                owner.add_module(word, nn.Module())
            owner = getattr(owner, word)
        if last == "expert_bias":
            owner.register_buffer(last, tensor)
        else:
            owner.register_parameter(last, tensor)
    return root


def cut(tensor: torch.Tensor, dim: int = 0, *, stride: int = 1, allreduce: bool = True) -> Any:
    """A parameter with the marks of a tensor parallel one."""
    parameter = nn.Parameter(tensor, requires_grad=False)
    parameter.tensor_model_parallel = True
    parameter.partition_dim, parameter.partition_stride = dim, stride
    parameter.allreduce = allreduce
    return parameter


def whole(tensor: torch.Tensor) -> Any:
    """A parameter that every rank has in full."""
    return nn.Parameter(tensor, requires_grad=False)


def counted(*shape: int, start: int = 0) -> torch.Tensor:
    """Every element another value."""
    size = torch.Size(shape).numel()
    return torch.arange(start, start + size, dtype=torch.float32).view(shape)


def gathered(bindings: Iterable[Binding]) -> dict[str, torch.Tensor]:
    """The checkpoint tensors that the ranks hold together; what no rank holds is NaN, and ranks
    that hold the same must hold the same values."""
    tensors: dict[str, torch.Tensor] = {}
    for binding in bindings:
        layout = binding.layout
        for entry in layout.entries:
            spec = layout.tensors[entry.tensor]
            value = binding.view(entry.view, entry.box.shape, torch_dtype(spec.dtype))
            made = tensors.setdefault(spec.name, torch.full(spec.shape, torch.nan))
            for dim, (start, length) in enumerate(
                zip(entry.box.start, entry.box.shape, strict=True)
            ):
                made = made.narrow(dim, start, length)
            assert (made.isnan() | (made == value)).all(), spec.name
            made.copy_(value)
    return tensors


def test_query_heads_alone_where_groups_are_fewer_than_ranks() -> None:
    """Cases 1 and 2: 8 query and 2 KV heads of 4 over TP 4, sliced by raw rows: ranks 0 and 2 hold
    query heads alone; compared head by head, and the plain [Q; K; V] would be wrong."""
    heads = counted(GROUPS, HEADS // GROUPS + 2, HEAD, HIDDEN)
    rows = heads.flatten(0, 2)
    bindings = [
        bind_megatron(gpt({QKV: cut(part.clone())}), CONFIG, place=Place(tp=rank, tp_size=4))
        for rank, part in enumerate(rows.chunk(4))
    ]
    held = [{b.layout.tensors[e.tensor].name[-13:-7] for e in b.layout.entries} for b in bindings]
    assert held == [{"q_proj"}, {"q_proj", "k_proj", "v_proj"}] * 2
    made = gathered(bindings)
    for group in range(GROUPS):
        for number in range(4):
            head = made[f"{ATTENTION}q_proj.weight"].view(HEADS, HEAD, HIDDEN)[4 * group + number]
            assert torch.equal(head, heads[group, number])
        for at, name in ((4, "k_proj"), (5, "v_proj")):
            head = made[f"{ATTENTION}{name}.weight"].view(GROUPS, HEAD, HIDDEN)[group]
            assert torch.equal(head, heads[group, at])
    assert not torch.equal(made[f"{ATTENTION}q_proj.weight"], rows[: HEADS * HEAD])


def test_gate_and_up_and_columns() -> None:
    gate, up, down = counted(FFN, HIDDEN), counted(FFN, HIDDEN, start=500), counted(HIDDEN, FFN)
    config = {**CONFIG, "model_type": "llama"}
    mlp = "decoder.layers.0.mlp."
    bindings = [
        bind_megatron(
            gpt(
                {
                    f"{mlp}linear_fc1.weight": cut(torch.cat([g, u]), stride=2),
                    f"{mlp}linear_fc2.weight": cut(d.clone(), 1),
                    f"{mlp}linear_fc1.layer_norm_weight": whole(counted(HIDDEN)),
                }
            ),
            config,
            place=Place(tp=rank, tp_size=3),
        )
        for rank, (g, u, d) in enumerate(
            zip(gate.chunk(3), up.chunk(3), down.chunk(3, 1), strict=True)
        )
    ]
    made = gathered(bindings)
    assert torch.equal(made["model.layers.0.mlp.gate_proj.weight"], gate)
    assert torch.equal(made["model.layers.0.mlp.up_proj.weight"], up)
    assert torch.equal(made["model.layers.0.mlp.down_proj.weight"], down)
    assert torch.equal(made["model.layers.0.post_attention_layernorm.weight"], counted(HIDDEN))


@pytest.mark.parametrize("form", ["sequential", "numbered", "stacked"])
def test_experts_are_numbered_over_all_ranks(form: str) -> None:
    """Case 4: EP 4 of 8 experts whose values are their numbers, in all three forms that Megatron
    keeps them in, each cut over two more ranks."""
    ffn, local = 4, EXPERTS // 4
    gates = [counted(ffn, HIDDEN, start=1000 * e) for e in range(EXPERTS)]
    downs = [counted(HIDDEN, ffn, start=1000 * e + 500) for e in range(EXPERTS)]
    prefix, bindings = "decoder.layers.0.mlp.experts.", []
    for ep in range(4):
        for etp in range(2):
            ours = range(ep * local, (ep + 1) * local)
            up = [torch.cat([g.chunk(2)[etp], -g.chunk(2)[etp]]) for g in (gates[e] for e in ours)]
            down = [downs[e].chunk(2, 1)[etp].clone() for e in ours]
            tensors: dict[str, Any] = {}
            if form == "stacked":
                flat = torch.cat([t.t().reshape(-1) for t in up])
                tensors[f"{prefix}weight1"] = cut(flat.view(HIDDEN, -1), 1, allreduce=False)
                flat = torch.cat([t.t().reshape(-1) for t in down])
                tensors[f"{prefix}weight2"] = cut(flat.view(-1, HIDDEN), 0, allreduce=False)
            for number in range(local) if form != "stacked" else ():
                names = (
                    (f"linear_fc1.weight{number}", f"linear_fc2.weight{number}")
                    if form == "numbered"
                    else tuple(f"local_experts.{number}.linear_fc{k}.weight" for k in (1, 2))
                )
                tensors[prefix + names[0]] = cut(up[number], stride=2, allreduce=False)
                tensors[prefix + names[1]] = cut(down[number], 1, allreduce=False)
            place = Place(ep=ep, ep_size=4, etp=etp, etp_size=2)
            bindings.append(bind_megatron(gpt(tensors), CONFIG, place=place))
    made = gathered(bindings)
    for e in range(EXPERTS):
        expert = f"model.layers.0.mlp.experts.{e}."
        assert torch.equal(made[f"{expert}gate_proj.weight"], gates[e])
        assert torch.equal(made[f"{expert}up_proj.weight"], -gates[e])
        assert torch.equal(made[f"{expert}down_proj.weight"], downs[e])


def test_layers_of_virtual_stages_know_their_numbers() -> None:
    """Case 7: two chunks whose local layer 0 are the model's layers 1 and 3."""
    norm = "decoder.layers.0.input_layernorm.weight"
    chunks = [gpt({norm: whole(counted(HIDDEN, start=n))}, [n]) for n in (1, 3)]
    made = gathered([bind_megatron(chunks, CONFIG, place=Place())])
    assert {name: t[0].item() for name, t in made.items()} == {
        "model.layers.1.input_layernorm.weight": 1,
        "model.layers.3.input_layernorm.weight": 3,
    }


def test_padding_of_the_vocabulary_is_nobodys() -> None:
    """A rank may hold padding alone."""
    table = torch.cat([counted(VOCAB, HIDDEN), torch.full((20 - VOCAB, HIDDEN), torch.nan)])
    name = "embedding.word_embeddings.weight"
    bindings = [
        bind_megatron(gpt({name: cut(part.clone())}), CONFIG, place=Place(tp=rank, tp_size=4))
        for rank, part in enumerate(table.chunk(4))
    ]
    assert [len(b.layout.entries) for b in bindings] == [1, 1, 1, 0]
    assert torch.equal(gathered(bindings)["model.embed_tokens.weight"], table[:VOCAB])
    assert not any("lm_head" in t.name for b in bindings for t in b.layout.tensors)


def test_tied_embeddings_of_two_stages() -> None:
    """Case 12: the first stage and the last hold the same table, each under both names."""
    config = {**CONFIG, "tie_word_embeddings": True}
    table = counted(12, HIDDEN)
    names = ("embedding.word_embeddings.weight", "output_layer.weight")
    bindings = [
        bind_megatron(gpt({name: cut(table.clone())}), config, place=Place()) for name in names
    ]
    for binding in bindings:
        assert binding.layout.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    assert torch.equal(gathered(bindings)["model.embed_tokens.weight"], table[:VOCAB])


def test_the_configs_that_users_have(tmp_path: Path) -> None:
    model = gpt({QKV: cut(counted(48, HIDDEN))})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    configs = [CONFIG, str(tmp_path), tmp_path / "config.json"]
    configs.append(SimpleNamespace(to_dict=lambda: CONFIG))
    layouts = [bind_megatron(model, config, place=Place()).layout for config in configs]
    assert all(layout == layouts[0] for layout in layouts)


def test_wrappers_are_taken_off_and_other_models_refused() -> None:
    core = gpt({QKV: cut(counted(48, HIDDEN))})
    wrapped = nn.Module()
    wrapped.module = nn.Module()
    wrapped.module.module = core
    assert (
        bind_megatron([wrapped], CONFIG, place=Place()).layout
        == bind_megatron(core, CONFIG, place=Place()).layout
    )
    with pytest.raises(LayoutError, match="a Linear holds no GPTModel"):
        bind_megatron(nn.Linear(2, 2), CONFIG, place=Place())


def test_parameters_may_move() -> None:
    """Offloaded and brought back elsewhere: found again; of another geometry: refused."""
    parameter = cut(counted(48, HIDDEN))
    binding = bind_megatron(gpt({QKV: parameter}), CONFIG, place=Place())
    assert not binding.rebind()
    parameter.data = parameter.data + 1
    assert binding.rebind()
    made = gathered([binding])[f"{ATTENTION}k_proj.weight"]
    assert torch.equal(made[:HEAD], parameter.view(GROUPS, -1, HEAD, HIDDEN)[0, -2])
    parameter.data = parameter.data.to(torch.bfloat16)
    with pytest.raises(LayoutError, match="bind it again") as refused:
        binding.rebind()
    assert "bfloat16" in str(refused.value)


def spoil(**marks: Any) -> Any:
    parameter = cut(counted(12, HIDDEN))
    for name, value in marks.items():
        if value is None:
            delattr(parameter, name)
        else:
            setattr(parameter, name, value)
    return parameter


@pytest.mark.parametrize(
    ("name", "parameter", "words"),
    [
        ("decoder.layers.0.mlp.gadget.weight", whole(counted(2)), ["no rule of qwen3_moe"]),
        ("vision.weight", whole(counted(2)), ["no rule", "streamsync/models"]),
        (QKV, cut(counted(24, HIDDEN)), ["[24, 6]", "[12, 6]", "config"]),
        (QKV, spoil(tensor_model_parallel=None), ["lacks Megatron's marks", "dim 0", "copy"]),
        (QKV, spoil(tensor_model_parallel=False), ["one of 4 parts", "lacks Megatron's marks"]),
        (QKV, spoil(partition_dim=1), ["along dim 1", "0 and 1"]),
        (QKV, spoil(partition_stride=2), ["stride 2"]),
        (QKV, spoil(allreduce=False), ["allreduce", "expert parallelism is 1"]),
        (
            "decoder.layers.0.input_layernorm.weight",
            cut(counted(HIDDEN)),
            ["along dim 0", "None"],
        ),
        (
            "decoder.layers.0.mlp.router.expert_bias",
            torch.zeros(EXPERTS, dtype=torch.bfloat16),
            ["bfloat16", "float32", "_maintain_float32_expert_bias"],
        ),
        ("embedding.word_embeddings.weight", cut(counted(2, HIDDEN)), ["2 rows", "4 ranks", "11"]),
        (
            "decoder.layers.0.self_attention.linear_proj.weight",
            cut(counted(8, HIDDEN).t(), 1),
            ["strides [1, 6]"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, parameter: Any, words: list[str]) -> None:
    """Case 5, and every other way in which a parameter contradicts the rules."""
    with pytest.raises(LayoutError) as refused:
        bind_megatron(gpt({name: parameter}), CONFIG, place=Place(tp=1, tp_size=4))
    for word in (name, *words):
        assert word in str(refused.value)


def test_unknown_families_are_refused_with_the_known_ones() -> None:
    config = {**CONFIG, "model_type": "mamba"}
    with pytest.raises(LayoutError, match=r"'mamba'.*deepseek_v3, llama"):
        bind_megatron(gpt({}), config, place=Place())
