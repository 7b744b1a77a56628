"""Layouts recorded from loaders, against what the loaders really do."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from streamsync.errors import LayoutError
from streamsync.layout.binding import torch_dtype
from streamsync.layout.recorder import Recording, record_loader
from streamsync.layout.region import Box, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Weights = Iterable[tuple[str, torch.Tensor]]


def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape).to(dtype), requires_grad=False)


def specs(checkpoint: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for name, t in checkpoint.items()
    }


def fingerprint(module: nn.Module) -> dict[str, str]:
    """Of every parameter and buffer, also those that aren't persistent."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        name: hashlib.sha256(
            bytes(t.detach().contiguous().view(-1).view(torch.uint8).tolist())
        ).hexdigest()
        + f" at {t.data_ptr()}"
        for name, t in tensors.items()
    }


def record(
    module: nn.Module,
    checkpoint: Mapping[str, torch.Tensor],
    load: Callable[[Weights], object] | None = None,
) -> Recording:
    before = fingerprint(module)
    recording = record_loader(module, specs(checkpoint), load or module.load_weights)
    assert fingerprint(module) == before
    return recording


def poison(module: nn.Module) -> None:
    for tensor in module.state_dict().values():
        tensor.fill_(torch.nan if tensor.is_floating_point() else -77)


def replay(recording: Recording, checkpoint: Mapping[str, torch.Tensor]) -> None:
    binding = recording.binding
    for entry in binding.layout.entries:
        spec = binding.layout.tensors[entry.tensor]
        where = tuple(slice(a, b) for a, b in zip(entry.box.start, entry.box.stop, strict=True))
        place = binding.view(entry.view, entry.box.shape, torch_dtype(spec.dtype))
        place.copy_(checkpoint[spec.name][where])


def deliver(recording: Recording, checkpoint: Mapping[str, torch.Tensor]) -> None:
    """What a sync does at a sink, landings included."""
    replay(recording, checkpoint)
    for landing in recording.binding.landings:
        landing.land()


def assert_replay_is_load(module: nn.Module, checkpoint: dict[str, torch.Tensor]) -> Recording:
    recording = record(module, checkpoint)
    assert recording.opaque == {}
    poison(module)
    module.load_weights(iter(checkpoint.items()))
    expected = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    poison(module)
    replay(recording, checkpoint)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name
    return recording


class Fused(nn.Module):
    """One of two tensor-parallel ranks of an attention and an MLP as engines fuse them."""

    HIDDEN, HEADS, KV, DIM, FFN, TP = 6, 4, 2, 3, 10, 2

    def __init__(self, rank: int = 1) -> None:
        super().__init__()
        q, kv, ffn = (n // self.TP for n in (self.HEADS * self.DIM, self.KV * self.DIM, self.FFN))
        self.rank, self.q, self.kv, self.ffn = rank, q, kv, ffn
        self.embed_tokens = nn.Embedding(7, self.HIDDEN)
        self.qkv_proj = parameter(q + 2 * kv, self.HIDDEN)
        self.o_proj = parameter(self.HIDDEN, q)
        self.gate_up_proj = parameter(2 * ffn, self.HIDDEN)
        self.down_proj = parameter(self.HIDDEN, ffn)
        self.norm = parameter(self.HIDDEN, dtype=torch.float32)
        self.lm_head = self.embed_tokens
        self.register_buffer("correction", torch.randn(3))
        self.register_buffer("cos", torch.randn(4), persistent=False)

    def load_weights(self, weights: Weights) -> set[str]:
        q, kv, ffn = self.q, self.kv, self.ffn
        rows = {
            "q_proj": (self.qkv_proj, 0, q),
            "k_proj": (self.qkv_proj, q, kv),
            "v_proj": (self.qkv_proj, q + kv, kv),
            "gate_proj": (self.gate_up_proj, 0, ffn),
            "up_proj": (self.gate_up_proj, ffn, ffn),
        }
        done = set()
        for name, weight in weights:
            if name in rows:
                target, start, size = rows[name]
                shard = weight.narrow(0, self.rank * size, size)
                target.data[start : start + size].copy_(shard)
            elif name in ("o_proj", "down_proj"):
                target = getattr(self, name)
                size = target.shape[1]
                target.data.copy_(weight.narrow(1, self.rank * size, size))
            elif name != "lm_head":
                target = self.embed_tokens.weight if name == "embed_tokens" else getattr(self, name)
                assert target.shape == weight.shape
                target.data.copy_(weight)
            done.add(name)
        return done

    @classmethod
    def checkpoint(cls) -> dict[str, torch.Tensor]:
        q, kv = cls.HEADS * cls.DIM, cls.KV * cls.DIM
        shapes = {
            "down_proj": (cls.HIDDEN, cls.FFN),
            "embed_tokens": (7, cls.HIDDEN),
            "q_proj": (q, cls.HIDDEN),
            "k_proj": (kv, cls.HIDDEN),
            "v_proj": (kv, cls.HIDDEN),
            "o_proj": (cls.HIDDEN, q),
            "gate_proj": (cls.FFN, cls.HIDDEN),
            "up_proj": (cls.FFN, cls.HIDDEN),
            "norm": (cls.HIDDEN,),
            "correction": (3,),
            "lm_head": (7, cls.HIDDEN),
        }
        return {
            name: torch.randn(shape, dtype=torch.float32 if len(shape) == 1 else torch.bfloat16)
            for name, shape in shapes.items()
        }


@pytest.mark.parametrize("rank", [0, 1])
def test_fused_loader(rank: int) -> None:
    """Cases 12, 14, 17: a poisoned module filled by the recorded layout is the loaded one."""
    recording = assert_replay_is_load(Fused(rank), Fused.checkpoint())
    names = [t.name for t in recording.binding.layout.tensors]
    in_order = (
        "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj norm correction embed_tokens"
    )
    assert names == in_order.split()  # the module's order, not the checkpoint's
    assert recording.ignored == ("lm_head",)
    assert recording.unwritten == {}


def test_dtype_in_the_layout_is_the_sinks() -> None:
    """Case 16: an fp32 checkpoint loads into bf16; the layout shows it and the plan decides."""
    checkpoint = {name: tensor.float() for name, tensor in Fused.checkpoint().items()}
    recording = assert_replay_is_load(Fused(), checkpoint)
    dtypes = {t.name: t.dtype for t in recording.binding.layout.tensors}
    assert dtypes["q_proj"] == "bfloat16"
    assert dtypes["correction"] == "float32"


class Grouped(nn.Module):
    """Grouped QKV as Megatron lays it out: per group its query heads, its key, its value."""

    GROUPS, PER_GROUP, DIM, HIDDEN = 3, 2, 4, 5

    def __init__(self) -> None:
        super().__init__()
        g, h, d = self.GROUPS, self.PER_GROUP, self.DIM
        self.linear_qkv = parameter(g * (h + 2) * d, self.HIDDEN)

    def load_weights(self, weights: Weights) -> None:
        g, h, d = self.GROUPS, self.PER_GROUP, self.DIM
        rows = self.linear_qkv.data.view(g, h + 2, d, self.HIDDEN)
        parts = {"q": rows[:, :h], "k": rows[:, h : h + 1], "v": rows[:, h + 1 :]}
        for name, weight in weights:
            parts[name].copy_(weight.view(parts[name].shape))


def test_grouped_qkv() -> None:
    """Case 2: rows interleave by group; the naive concatenation [Q; K; V] is another tensor."""
    g, h, d, hidden = Grouped.GROUPS, Grouped.PER_GROUP, Grouped.DIM, Grouped.HIDDEN
    checkpoint = {
        "q": torch.randn(g * h * d, hidden, dtype=torch.bfloat16),
        "k": torch.randn(g * d, hidden, dtype=torch.bfloat16),
        "v": torch.randn(g * d, hidden, dtype=torch.bfloat16),
    }
    module = Grouped()
    recording = assert_replay_is_load(module, checkpoint)
    assert len(recording.binding.layout.entries) == 3 * g  # a block per group, not per row
    assert not torch.equal(module.linear_qkv, torch.cat(list(checkpoint.values())))


class Padded(nn.Module):
    """A vocabulary padded to a multiple: its loader fills the rows that no token has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(8, 4)
        self.other = parameter(3)

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            if name == "weight":
                self.weight.data[: len(weight)].copy_(weight)
                self.weight.data[len(weight) :].fill_(0)
            else:
                self.other.data.copy_(weight)


def test_padding_is_not_filled_and_leaves_its_tensor_plain() -> None:
    """The rows that no token has were filled by the first load, and nothing changes them."""
    checkpoint = {"weight": torch.randn(6, 4).bfloat16(), "other": torch.randn(3).bfloat16()}
    module = Padded()
    recording = record(module, checkpoint)  # compares every byte before and after
    assert module.weight[6:].ne(0).all()
    assert recording.opaque == {}
    assert recording.filled == {"weight": 8}
    assert recording.unwritten == {}
    assert recording.binding.staging_bytes == 0


def test_rows_nobody_loads_are_counted() -> None:
    """Case 11: what no tensor of the checkpoint fills is said, not skipped in silence."""
    module = Padded()

    def load(weights: Weights) -> None:
        for name, weight in weights:
            getattr(module, name).data[: len(weight)].copy_(weight)

    recording = record(module, {"weight": torch.randn(6, 4)}, load)
    assert recording.unwritten == {"weight": 8, "other": 3}
    assert recording.opaque == {}


class One(nn.Module):
    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.p = parameter(*shape, dtype=dtype)
        self.plain = torch.zeros(3)
        self.register_buffer("scale", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(3), persistent=False)


def test_copies_that_stay_copies() -> None:
    """Casts, moves, cat, stack, transposes and broadcasts on the way are still geometry."""
    module = One(4, 2, 6)

    def load(weights: Weights) -> None:
        got = dict(weights)
        gate = got["gate"].to(module.p.device, torch.float32)
        pair = torch.cat([gate.t(), got["up"].t().contiguous()], dim=0).t()
        module.p.data[1:3].copy_(torch.stack([pair, pair * 2])[:1].expand(2, 2, 6))
        module.p.data[0].copy_(torch.stack([got["a"], got["b"]]))
        module.p.data[3].view(-1).copy_(got["flat"].to(torch.float32).flatten())

    checkpoint = {
        "gate": torch.randn(2, 4).bfloat16(),
        "up": torch.randn(2, 2),
        "a": torch.randn(6),
        "b": torch.randn(6),
        "flat": torch.randn(3, 4).half(),
    }
    recording = record(module, checkpoint, load)
    assert recording.opaque == {}
    assert recording.unwritten == {"scale": 1}
    load(checkpoint.items())
    expected = module.p.clone()
    poison(module)
    replay(recording, checkpoint)
    assert torch.equal(module.p, expected)


def _mul(m: One, w: torch.Tensor) -> None:
    m.p.data.copy_(w * 2)


def _in_place_before(m: One, w: torch.Tensor) -> None:
    w.mul_(2)
    m.p.data.copy_(w)


def _clone_changed(m: One, w: torch.Tensor) -> None:
    w = w.clone()
    w[0] = 1
    m.p.data.copy_(w)


def _add(m: One, w: torch.Tensor) -> None:
    m.p.data.add_(w)


def _index_put(m: One, w: torch.Tensor) -> None:
    m.p.data[torch.tensor([1, 0, 2, 3])] = w


def _narrow_cast(m: One, w: torch.Tensor) -> None:
    m.p.data.copy_(w.bfloat16())


def _reinterpreted(m: One, w: torch.Tensor) -> None:
    m.p.data.copy_(w.view(torch.int32))


def _raw_bytes(m: One, w: torch.Tensor) -> None:
    m.p.data.view(torch.int32).copy_(w)


def _partly_other(m: One, w: torch.Tensor) -> None:
    m.p.data.copy_(torch.cat([w[:2], torch.zeros(2, 6, device=w.device)]))


def _replaced(m: One, w: torch.Tensor) -> None:
    m.p = nn.Parameter(w, requires_grad=False)


def _foreach(m: One, w: torch.Tensor) -> None:
    torch._foreach_add_([m.p.data], [w])


def _out(m: One, w: torch.Tensor) -> None:
    torch.add(w, 1, out=m.p.data)


def _non_persistent(m: One, w: torch.Tensor) -> None:
    m.p.data.copy_(w)
    m.cache.copy_(w[0, :3])


def _twice_elsewhere(m: One, w: torch.Tensor) -> None:
    m.p.data.copy_(w)
    m.p.data[:2].copy_(w[2:])


def _scale(m: One, w: torch.Tensor) -> None:
    m.p.data.copy_(w * 2)
    m.scale.copy_(w.float().abs().max())


def _from_the_module(m: One, w: torch.Tensor) -> None:
    m.p.data[:3].copy_(w[:3])
    m.p.data[3].copy_(m.p.data[0])


def _fill_last(m: One, w: torch.Tensor) -> None:
    m.p.data.copy_(w)
    m.p.data[1].zero_()


def _through_a_temporary(m: One, w: torch.Tensor) -> None:
    spare = torch.zeros(4, 6, device=w.device)
    spare.copy_(w)
    m.p.data.copy_(spare)


def _through_real_memory(m: One, w: torch.Tensor) -> None:
    spare = torch.zeros(6, 6)
    spare[:4].copy_(w)
    m.p.data.copy_(spare[:4])


@pytest.mark.parametrize(
    "load",
    [
        _mul,
        _in_place_before,
        _clone_changed,
        _add,
        _index_put,
        _narrow_cast,
        _reinterpreted,
        _raw_bytes,
        _partly_other,
        _replaced,
        _foreach,
        _out,
        _non_persistent,
        _twice_elsewhere,
        _scale,
        _from_the_module,
        _fill_last,
        _through_a_temporary,
        _through_real_memory,
    ],
)
def test_more_than_copies_is_opaque(load: Callable[[One, torch.Tensor], None]) -> None:
    """What is not geometry is received whole and handed to the loader: three syncs, bit for bit."""
    module, other = One(4, 6), One(4, 6)
    original = module.p
    checkpoint = {"w": torch.randn(4, 6)}
    recording = record(module, checkpoint, lambda weights: load(module, dict(weights)["w"]))
    assert module.p is original
    assert set(recording.opaque) == {"w"}
    layout = recording.binding.layout
    assert layout.opaque == ("w",)
    assert [e.box for e in layout.entries] == [Box.whole((4, 6))]
    assert recording.binding.staging_bytes == 4 * 6 * 4
    for _ in range(3):
        checkpoint = {"w": torch.randn(4, 6)}
        for one in (module, other):
            one.p.data.fill_(0.5)
        address = module.p.data_ptr()
        deliver(recording, checkpoint)
        load(other, checkpoint["w"].clone())
        for mine, theirs in ((module.p, other.p), (module.cache, other.cache)):
            assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))
        assert torch.equal(module.scale, other.scale)
        assert (module.p, module.p.data_ptr()) == (original, address)


def _zero_first(m: One, w: torch.Tensor) -> None:
    m.p.data.zero_()
    m.p.data.copy_(w)


def _fill_first(m: One, w: torch.Tensor) -> None:
    m.p.data.fill_(7)
    m.p.data[:2].copy_(w[:2])


def _own_values(m: One, w: torch.Tensor) -> None:
    m.p.data[:2].copy_(w[:2])
    m.p.data[2:] = torch.arange(6.0, device=w.device)


def _fill_beside(m: One, w: torch.Tensor) -> None:
    m.p.data[:, :5].copy_(w[:, :5])
    m.p.data[:, 5] = 0
    m.p.data[:, 5].copy_(torch.zeros_like(w[:, 5]))


@pytest.mark.parametrize(
    ("load", "filled"), [(_zero_first, 0), (_fill_first, 12), (_own_values, 12), (_fill_beside, 4)]
)
def test_constant_values_that_no_copy_meets_later_are_harmless(
    load: Callable[[One, torch.Tensor], None], filled: int
) -> None:
    module = One(4, 6)
    recording = record(
        module, {"w": torch.randn(4, 6)}, lambda weights: load(module, dict(weights)["w"])
    )
    assert recording.opaque == {}
    assert recording.filled == ({"p": filled} if filled else {})
    assert recording.unwritten == {"scale": 1}


def test_who_shares_a_parameter_with_an_opaque_tensor_is_opaque() -> None:
    """A late run of the loader must not undo plain copies; of other parameters it knows nothing."""
    module = Fused(0)

    def load(weights: Weights) -> None:
        module.load_weights((n, w * 1 if n == "k_proj" else w) for n, w in weights)

    recording = record(module, Fused.checkpoint(), load)
    assert set(recording.opaque) == {"q_proj", "k_proj", "v_proj"}
    assert recording.binding.layout.opaque == ("k_proj", "q_proj", "v_proj")
    assert recording.unwritten == {}
    poison(module)
    checkpoint = Fused.checkpoint()
    deliver(recording, checkpoint)
    found = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.load_weights(checkpoint.items())
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), found[name].view(torch.uint8)), name


def test_narrowed_experts_are_plain() -> None:
    """Case 4: an expert's place is the loader's; one `narrow` per expert and shard is geometry."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w13 = parameter(2, 6, 4)  # [num_local_experts, gate and up of this shard, hidden]

        def load_weights(self, weights: Weights) -> None:
            for name, weight in weights:
                expert, part = name.split(".")
                if int(expert) < 2:
                    continue  # of another rank
                half = self.w13.data[int(expert) - 2].narrow(0, 0 if part == "gate" else 3, 3)
                half.copy_(torch.narrow(weight, 0, 3, 3))

    checkpoint = {
        f"{e}.{part}": torch.full((6, 4), float(10 * e)).bfloat16()
        for e in range(4)
        for part in ("gate", "up")
    }
    recording = assert_replay_is_load(Experts(), checkpoint)
    assert recording.ignored == ("0.gate", "0.up", "1.gate", "1.up")
    assert {e.box for e in recording.binding.layout.entries} == {Box((3, 0), (3, 4))}


class Interleaved(nn.Module):
    """Gate and up row by row, as some fused kernels want them."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = parameter(2, 6, 4)  # [num_experts, interleaved gate and up, hidden]

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            self.w13.data[:, ["gate", "up"].index(name) :: 2].copy_(weight)


def test_interleaved_gate_and_up_are_plain() -> None:
    """Case 8: rows of gate and up alternate: a stride, not a reason to copy twice."""
    checkpoint = {name: torch.randn(2, 3, 4).bfloat16() for name in ("gate", "up")}
    module = Interleaved()
    recording = assert_replay_is_load(module, checkpoint)
    assert len(recording.binding.layout.entries) == 2
    pairs = torch.stack([checkpoint["gate"], checkpoint["up"]], dim=2).view(2, 6, 4)
    assert torch.equal(module.w13, pairs)
    assert not torch.equal(module.w13, torch.cat(list(checkpoint.values()), dim=1))


def test_a_module_without_memory_is_recorded_for_plans_only() -> None:
    with torch.device("meta"):
        module = Fused()
    recording = record_loader(module, specs(Fused.checkpoint()), module.load_weights)
    assert recording.binding.layout == record(Fused(), Fused.checkpoint()).binding.layout
    assert (recording.opaque, recording.unwritten) == ({}, {})
    with pytest.raises(LayoutError, match="serves plans"):
        replay(recording, Fused.checkpoint())


def test_opaque_tensors_of_a_module_without_memory_take_none() -> None:
    module = One(4, 6)
    on_meta = One(4, 6).to("meta")
    spec = {"w": TensorSpec("w", (4, 6), "float32")}
    recordings = [
        record_loader(m, spec, lambda weights, m=m: _mul(m, dict(weights)["w"]))
        for m in (module, on_meta)
    ]
    assert recordings[0].binding.layout == recordings[1].binding.layout
    assert recordings[1].binding.landings == ()


def test_foreach_copies_are_copies() -> None:
    module = One(4, 6)
    recording = record(
        module,
        {"w": torch.randn(4, 6)},
        lambda weights: torch._foreach_copy_([module.p.data], [w for _, w in weights]),
    )
    assert recording.opaque == {}
    assert recording.unwritten == {"scale": 1}


def test_writes_beside_parameters_are_prevented() -> None:
    """Case 17: non-persistent buffers and plain attributes stay too, and are nobody's concern."""
    module = One(4, 6)

    def load(weights: Weights) -> None:
        for _, weight in weights:
            module.p.data.copy_(weight)
        module.cache.fill_(5)
        module.plain.add_(1)

    recording = record(module, {"w": torch.randn(4, 6)}, load)
    assert module.cache.eq(0).all()
    assert module.plain.eq(0).all()
    assert recording.opaque == {}


def test_two_names_in_one_place_are_a_tie() -> None:
    """Case 12: tied at the sink, both names in the checkpoint: one is the alias of the other."""
    module = One(4, 6)

    def load(weights: Weights) -> None:
        for _, weight in weights:
            module.p.data.copy_(weight)

    recording = record(module, {"a": torch.randn(4, 6), "b": torch.randn(4, 6)}, load)
    assert recording.binding.layout.ties == {"b": "a"}
    assert recording.opaque == {}


def test_two_names_that_overlap_are_opaque() -> None:
    """Case 4: two tensors loaded into the same bytes can't both be right."""
    module = One(4, 6)

    def load(weights: Weights) -> None:
        for name, weight in weights:
            module.p.data[: 2 if name == "a" else 4].copy_(weight)

    recording = record(module, {"a": torch.randn(2, 6), "b": torch.randn(4, 6)}, load)
    assert set(recording.opaque) == {"a", "b"}
    assert "same memory" in recording.opaque["a"]


def test_everything_under_a_long_overlap_is_opaque() -> None:
    module = One(4, 6)

    def load(weights: Weights) -> None:
        for name, weight in weights:
            module.p.data[int(name) : int(name) + len(weight)].copy_(weight)

    checkpoint = {"0": torch.randn(4, 6), "1": torch.randn(1, 6), "3": torch.randn(1, 6)}
    assert set(record(module, checkpoint, load).opaque) == {"0", "1", "3"}


@pytest.mark.parametrize(
    ("load", "says"),
    [
        (lambda w: float(w[0, 0]), "looks at values"),
        (lambda w: w.sum().item(), "looks at values"),
        (lambda w: torch.zeros(4, 6).copy_(w).sum().item(), "looks at values"),
        (lambda w: 1 / 0, "ZeroDivisionError"),
        (lambda w: w.numpy(), "numpy"),
    ],
)
def test_a_loader_that_fails_is_explained(
    load: Callable[[torch.Tensor], object], says: str
) -> None:
    module = One(4, 6)
    with pytest.raises(LayoutError, match=says):
        record(module, {"w": torch.randn(4, 6)}, lambda weights: load(dict(weights)["w"]))


def test_a_loader_that_fails_leaves_the_module_as_it_was() -> None:
    module = One(4, 6)
    original, before = module.p, fingerprint(module)

    def load(weights: Weights) -> None:
        module.p = nn.Parameter(torch.zeros(4, 6))
        raise RuntimeError("half way")

    with pytest.raises(LayoutError, match="half way"):
        record(module, {"w": torch.randn(4, 6)}, load)
    assert module.p is original
    assert fingerprint(module) == before


def test_refresh_follows_the_module() -> None:
    module = Fused()
    checkpoint = Fused.checkpoint()
    recording = record(module, checkpoint)
    assert not recording.binding.rebind()
    module.qkv_proj.data = torch.zeros_like(module.qkv_proj)
    assert recording.binding.rebind()
    replay(recording, checkpoint)
    assert module.qkv_proj.ne(0).any()
    module.qkv_proj.data = torch.zeros(1, 6).bfloat16()
    with pytest.raises(LayoutError, match="when it was bound"):
        recording.binding.rebind()


def test_zero_size_tensors_are_listed() -> None:
    """Case 24."""
    module = One(0, 4)

    def load(weights: Weights) -> None:
        for _, weight in weights:
            module.p.data.copy_(weight)

    recording = record(module, {"w": torch.randn(0, 4)}, load)
    assert [t.shape for t in recording.binding.layout.tensors] == [(0, 4)]
    assert recording.ignored == ()
