from __future__ import annotations

from pathlib import Path

import pytest

from streamsync.demo.options import DemoOptions
from streamsync.errors import ConfigError


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"syncs": 0}, "--syncs"),
        ({"source_ranks": 0}, "--source-ranks"),
        ({"source_ranks": 9}, "between 1 and 8"),
        ({"transport": "memory"}, "use shm, tcp or ucx"),
        ({"json": Path("/nowhere/at/all.json")}, "/nowhere/at does not exist"),
        ({"trace": Path("/nowhere/at/all.json")}, "--trace"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_starts(
    wrong: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        DemoOptions(**wrong)  # type: ignore[arg-type]


def test_a_dash_gives_stdout_to_the_results_alone() -> None:
    assert DemoOptions(json=Path("-")).json_to_stdout
    assert not DemoOptions(json=Path("out.json")).json_to_stdout
    assert not DemoOptions().json_to_stdout
