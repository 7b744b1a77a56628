"""Real child processes, small ones: scripts that speak the demo's lines."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

import psutil
import pytest

from streamsync.demo.crew import ChildFailed, Crew, Sender
from streamsync.demo.messages import Done, Happened, Hello, Proceed, ToParent
from streamsync.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

ENGINE = Sender("engine", 0)
SILENCE = 20.0
# Popen and file access at start-up; nothing here shares the loop with a data path.
pytestmark = pytest.mark.allow_blocking

WORK = """
from streamsync.demo.link import run_child
from streamsync.demo.messages import Happened, Proceed
from streamsync.observability.probe import Event

def work(link):
    {body}

raise SystemExit(run_child("engine", 0, work))
"""


@pytest.fixture
async def crew(tmp_path: Path) -> AsyncIterator[Crew]:
    async with Crew(tmp_path) as crew:
        yield crew


async def start(crew: Crew, tmp_path: Path, body: str) -> None:
    (tmp_path / "child_script.py").write_text(WORK.format(body=body))
    path = f"{tmp_path}{os.pathsep}{os.getcwd()}"
    await crew.start("engine", ["child_script"], {"PYTHONPATH": path})


async def everything(crew: Crew) -> list[ToParent]:
    heard = []
    async for sender, message in crew.hear(SILENCE):
        assert sender == ENGINE
        heard.append(message)
        if isinstance(message, Hello):
            crew.tell("engine", Proceed(index=3))
        if isinstance(message, Done):
            break
    return heard


async def test_a_child_hears_and_is_heard(crew: Crew, tmp_path: Path) -> None:
    body = "at = link.receive(Proceed, 20).index; link.event(Event(name='token', started_at=at))"
    await start(crew, tmp_path, body)
    heard = await everything(crew)
    assert [type(message) for message in heard] == [Hello, Happened, Done]
    assert heard[1].event.started_at == 3  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        ('__import__("streamsync").PlanError("no such name", tensor="w")', "input", "tensor=w"),
        ('__import__("streamsync").PeerLost("gone")', "sync", "engine: gone"),
        ('KeyError("x")', "bug", "KeyError"),
    ],
)
async def test_a_childs_error_arrives_in_its_own_words(
    crew: Crew, tmp_path: Path, raised: str, kind: str, words: str
) -> None:
    await start(crew, tmp_path, f"raise {raised}")
    with pytest.raises(ChildFailed, match=words) as caught:
        await everything(crew)
    assert caught.value.kind == kind
    assert "Traceback" in caught.value.trace


async def test_a_child_that_dies_is_missed_with_its_last_words(crew: Crew, tmp_path: Path) -> None:
    await start(crew, tmp_path, 'print("out of memory", flush=True); __import__("os")._exit(9)')
    with pytest.raises(ChildFailed, match="engine ended without a word: out of memory"):
        await everything(crew)


async def test_a_child_that_never_connects_is_missed(crew: Crew, tmp_path: Path) -> None:
    await crew.start("engine", ["no_such_module"], {})
    with pytest.raises(ChildFailed, match="No module named no_such_module"):
        await everything(crew)


async def test_silence_has_a_deadline(crew: Crew, tmp_path: Path) -> None:
    await start(crew, tmp_path, "link.receive(Proceed, 20); link.receive(Proceed, 20)")
    with pytest.raises(ChildFailed, match="no process of the demo said anything"):
        async for _ in crew.hear(1.0):
            pass


async def test_of_two_failures_the_curable_one_is_told(crew: Crew) -> None:
    for kind in ("sync", "input", "bug"):
        crew._heard.put_nowait(ChildFailed(kind, kind=kind, trace=""))  # type: ignore[arg-type]
    with pytest.raises(ChildFailed, match="input"):
        await everything(crew)


async def test_leaving_ends_every_child_even_a_deaf_one(tmp_path: Path) -> None:
    deaf = "; ".join(
        (
            "import signal, time, os",
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
            'os.execvp("sleep", ["sleep", "60"])',
        )
    )
    (tmp_path / "deaf_script.py").write_text(deaf)
    before = psutil.Process().children()
    with contextlib.suppress(RuntimeError):
        async with Crew(tmp_path) as crew:
            await crew.start("engine", ["deaf_script"], {"PYTHONPATH": str(tmp_path)})
            await asyncio.sleep(0.3)
            raise RuntimeError
    assert [child for child in psutil.Process().children() if child not in before] == []


async def test_a_child_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    async with Crew(tmp_path) as crew:
        await start(crew, tmp_path, "link.receive(Proceed, 60)")
        async for _ in crew.hear(SILENCE):
            break
        process = crew._processes["engine"]
        for writer in crew._writers.values():
            writer.close()
        crew._is_closing = True
        async with asyncio.timeout(10):
            assert await process.wait() == 1


async def test_a_folder_too_long_for_a_socket_is_told(tmp_path: Path) -> None:
    deep = tmp_path / ("long" * 30)
    with pytest.raises(ConfigError, match="set TMPDIR"):
        async with Crew(deep):
            pass
