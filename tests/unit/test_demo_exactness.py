from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from streamsync.demo.exactness import (
    mismatched,
    paste,
    same_bits,
    write_parameters,
    write_shards,
)
from streamsync.errors import IntegrityError

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("0.weight", "0.bias", "1.weight")


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Embedding(3, 4))


@pytest.fixture
def copies(tmp_path: Path) -> tuple[list[Path], Path]:
    """Two trainer ranks that hold rows of an fp32 model, unevenly, and an engine in bf16."""
    model = build()
    paths = []
    for rank, keep in enumerate((slice(0, 3), slice(3, None))):
        shards, places = {}, {}
        for name, parameter in model.named_parameters():
            shard = parameter.detach()[keep]
            corner = [keep.start if shard.numel() else len(parameter), *[0] * (parameter.ndim - 1)]
            places[name] = {"shape": list(parameter.shape), "corner": corner}
            if shard.numel():  # the embedding has 3 rows: nothing is left for rank 1
                shards[name] = shard.contiguous()
        paths.append(tmp_path / f"shards-{rank}")
        save_file(shards, paths[-1], metadata={"places": json.dumps(places)})
    engine = tmp_path / "engine"
    write_parameters(build().to(torch.bfloat16), engine)
    return paths, engine


def test_equal_copies_are_equal(copies: tuple[list[Path], Path]) -> None:
    assert mismatched(*copies) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bit", range(16))
def test_one_flipped_bit_anywhere_is_found(
    copies: tuple[list[Path], Path], name: str, bit: int
) -> None:
    """Case 42: the checker itself, on corrupted data."""
    shards, engine = copies
    landed = load_file(engine)
    flat = landed[name].flatten().view(torch.int16)
    flat[-1] = flat[-1].item() ^ (1 << bit if bit < 15 else -(1 << 15))
    save_file(landed, engine)
    assert mismatched(shards, engine) == [name]


def test_a_changed_trainer_is_found(copies: tuple[list[Path], Path]) -> None:
    """A whole old version instead of the new one, as a missed sync leaves it."""
    shards, engine = copies
    write_parameters(build(seed=1).to(torch.bfloat16), engine)
    assert mismatched(shards, engine) == sorted(NAMES)


def test_names_that_only_one_side_has_are_found(copies: tuple[list[Path], Path]) -> None:
    shards, engine = copies
    landed = load_file(engine)
    landed["more"] = landed.pop("0.bias")
    save_file(landed, engine)
    assert mismatched(shards, engine) == ["0.bias", "more"]


def test_another_dtype_and_shape_are_found(copies: tuple[list[Path], Path]) -> None:
    shards, engine = copies
    landed = load_file(engine)
    landed["0.bias"] = landed["0.bias"].reshape(1, 7)
    landed["1.weight"] = landed["1.weight"].to(torch.float16)
    save_file(landed, engine)
    assert mismatched(shards, engine) == ["0.bias", "1.weight"]


def test_shards_that_miss_rows_are_no_yardstick(copies: tuple[list[Path], Path]) -> None:
    shards, engine = copies
    with pytest.raises(IntegrityError, match="exactly once"):
        mismatched(shards[:1], engine)


def test_shards_that_lie_on_each_other_are_no_yardstick() -> None:
    with pytest.raises(IntegrityError, match="exactly once"):
        paste("w", (4,), [((0,), torch.zeros(3)), ((2,), torch.zeros(2))])


def test_a_tensor_without_any_shard_is_no_yardstick() -> None:
    with pytest.raises(IntegrityError, match="no trainer rank"):
        paste("w", (4,), [])
    assert paste("empty", (0, 4), []).shape == (0, 4)


def test_bits_and_not_numbers_are_compared() -> None:
    nan = torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(1), torch.zeros(1, dtype=torch.int32))
    assert same_bits(torch.tensor(1.5), torch.tensor(1.5))


def test_an_unsharded_model_is_its_own_shard(tmp_path: Path) -> None:
    write_shards(build(), tmp_path / "shards")
    write_parameters(build().to(torch.bfloat16), tmp_path / "engine")
    assert mismatched([tmp_path / "shards"], tmp_path / "engine") == []
