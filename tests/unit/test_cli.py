from __future__ import annotations

import importlib.util
import logging
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import streamsync
from streamsync import cli
from streamsync.bench.options import PipelineOptions
from streamsync.demo.options import DemoOptions
from streamsync.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def _log_level_as_before() -> Iterator[None]:
    logger = logging.getLogger("streamsync")
    level = logger.level
    yield
    logger.setLevel(level)


def replace(monkeypatch: pytest.MonkeyPatch, name: str, main: Callable[[Any], int]) -> None:
    """Puts a module with that `main` in the place of `streamsync.<name>`."""
    package, module = name.split(".")
    fake = types.ModuleType(f"streamsync.{name}")
    fake.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, f"streamsync.{name}", fake)
    monkeypatch.setattr(f"streamsync.{package}.{module}", fake, raising=False)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"streamsync {streamsync.__version__}\n"


def test_demo_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DemoOptions] = []
    replace(monkeypatch, "demo.run", lambda options: seen.append(options) or 1)
    assert cli.main(["demo"]) == 1, "the demo's own exit code"
    line = "--syncs 4 --model tiny --transport tcp --source-ranks 3 --apply version --no-live"
    cli.main(["demo", *line.split(), "--json", "out.json", "--trace", "t.json"])
    assert seen[0] == DemoOptions()
    assert seen[1] == DemoOptions(
        syncs=4, model="tiny", transport="tcp", source_ranks=3, apply="version", live=False,
        json=Path("out.json"), trace=Path("t.json"),
    )  # fmt: skip


def test_bench_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[PipelineOptions] = []
    replace(monkeypatch, "bench.pipeline", lambda options: seen.append(options) or 0)
    assert cli.main(["bench", "pipeline"]) == 0
    line = (
        "--transport shm --bytes 12 --bucket-bytes 8 --pool-bytes 7 --tensors 6 --digest off --cast"
    )
    cli.main(["bench", "pipeline", *line.split(), "--json", "-"])
    assert seen[0] == PipelineOptions()
    assert seen[1] == PipelineOptions(
        transport="shm", bytes=12, bucket_bytes=8, pool_bytes=7, tensors=6, digest=False,
        cast=True, json=Path("-"),
    )  # fmt: skip


def test_an_error_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: DemoOptions) -> int:
        raise PlanError("shapes differ; add a rule", tensor="w", rank=1)

    replace(monkeypatch, "demo.run", fail)
    assert cli.main(["demo"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "streamsync: shapes differ; add a rule [tensor=w, rank=1]\n"
    assert captured.out == ""
    assert cli.main(["--debug", "demo"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("demo --syncs 0", "--syncs must be at least 1"),
        ("demo --source-ranks 0", "--source-ranks must be"),
        ("demo --model huge", "huge"),
        ("demo --transport pigeon", "pigeon"),
        ("bench pipeline --bytes 0", "--bytes must be at least 1"),
        ("bench pipeline --bytes 3 --tensors 4", "need at least as many --bytes"),
        ("hub --port 70000", "65535"),
        ("hub", "STREAMSYNC_SECRET"),
        ("hub --secret-file /nowhere", "can't read the secret file"),
        ("hub --secret-file /dev/null", "is empty"),
        ("fly", "fly"),
    ],
)
def test_bad_usage_says_what_and_exits_with_2(
    line: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("STREAMSYNC_SECRET", raising=False)
    assert cli.main(line.split()) == 2
    assert text in capsys.readouterr().err


def test_secret_comes_from_the_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from streamsync.cli.app import read_secret

    monkeypatch.setenv("STREAMSYNC_SECRET", "from the environment")
    (tmp_path / "secret").write_text("from the file\n")
    assert read_secret(None) == "from the environment"
    assert read_secret(tmp_path / "secret") == "from the file"
    (tmp_path / "secret").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="can't read"):
        read_secret(tmp_path / "secret")


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_extra_is_named(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else found(name)
    )
    assert cli.main(["demo"]) == 2
    assert "pip install 'streamsync[cli]'" in capsys.readouterr().err
