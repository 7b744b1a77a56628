"""The processes of a real trainer, started with torchrun and ended in any case."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec
import psutil

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

ROOT = Path(__file__).parents[1]


class Trainer:
    """A context manager: `num_ranks` processes run `module` while it is open, and leave none
    behind. Each is given `folder`, where `job` lies as job.json; `environment` is added to this
    process's own."""

    def __init__(
        self,
        module: str,
        job: msgspec.Struct,
        folder: Path,
        num_ranks: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self._module, self._num_ranks = module, num_ranks
        self._environment = environment or {}
        self._log = folder / "trainer.log"
        (folder / "job.json").write_bytes(msgspec.json.encode(job))

    def __enter__(self) -> Self:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(self._num_ranks), "-m", self._module]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, str(self.folder)],
                cwd=ROOT,
                env=environment | dict(self._environment),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        workers: list[psutil.Process] = []
        if self._process.poll() is None:
            workers = psutil.Process(self._process.pid).children(recursive=True)
            self._process.terminate()  # which ends the workers too, unless it is stuck itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        for process in (self._process, *workers):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        if error is not None:
            error.add_note(f"the trainer said:\n{self._log.read_text()[:8000]}")

    def file(self, name: str, seconds: float) -> Path:
        """The file of that name in the job's folder, once it is there; fails when the trainer
        ended without it."""
        path, end = self.folder / name, time.monotonic() + seconds
        while not path.exists():
            code = self._process.poll()
            assert code is None or path.exists(), f"the trainer ended ({code}) without {name}"
            assert time.monotonic() < end, f"no {name} after {seconds} s"
            time.sleep(0.05)
        return path

    def finish(self, seconds: float) -> None:
        """Until all ranks ended well."""
        assert self._process.wait(seconds) == 0, "the trainer failed"
