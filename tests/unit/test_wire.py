"""Frames over a blocking socket in a loop: nothing is left unread, and others get their turn."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import zmq

from streamsync.control.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context = zmq.Context()
    one, other = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    try:
        one.bind("inproc://pair")
        other.connect("inproc://pair")
        yield one, other
    finally:
        one.close(0)
        other.close(0)
        context.term()


async def until(heard: list[object], count: int) -> None:
    async with asyncio.timeout(10):
        while len(heard) < count:  # noqa: ASYNC110 - nothing tells of it but the list
            await asyncio.sleep(0.001)


async def test_everything_that_came_is_read_however_much() -> None:
    with pair() as (one, other):
        for number in range(500):
            other.send_multipart([b"head", str(number).encode()])
        heard: list[list[bytes]] = []
        wire = Wire(one)
        wire.start(heard.append)
        await until(heard, 500)
        assert heard == [[b"head", str(number).encode()] for number in range(500)]
        wire.stop()
        other.send(b"too late")
        await asyncio.sleep(0.02)
        assert len(heard) == 500


async def test_an_answer_sent_from_within_does_not_hide_what_comes_next() -> None:
    """The descriptor tells of a change once; sending may take that word away."""
    with pair() as (one, other):
        ours, theirs = Wire(one), Wire(other)
        heard: list[list[bytes]] = []

        def echo(frames: list[bytes]) -> None:
            theirs.send(frames)

        def again(frames: list[bytes]) -> None:
            heard.append(frames)
            if len(heard) < 300:
                ours.send(frames)

        ours.start(again)
        theirs.start(echo)
        ours.send([b"a", b"", b"c" * 100_000], copy=False)
        await until(heard, 300)
        ours.stop()
        theirs.stop()
        assert all(frames == [b"a", b"", b"c" * 100_000] for frames in heard)


async def test_a_flood_does_not_starve_the_loop() -> None:
    with pair() as (one, other):
        for _ in range(1000):
            other.send(b"x")
        heard: list[list[bytes]] = []
        wire = Wire(one)
        wire.start(heard.append)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(heard) < 1000, "others had a turn in between"
        await until(heard, 1000)
        wire.stop()


async def test_what_the_handler_raises_ends_the_run() -> None:
    def refuse(_frames: list[bytes]) -> None:
        raise KeyError("broken")

    with pair() as (one, other):
        other.send(b"x")
        with pytest.raises(KeyError, match="broken"):
            async with asyncio.timeout(10):
                await Wire(one).run(refuse)
