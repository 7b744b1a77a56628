"""Control sessions over real loopback sockets: who gets in, what a broken peer looks like."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import zmq

from streamsync.control import messages as m
from streamsync.control import sockets
from streamsync.control.curve import Curve
from streamsync.control.hub import Hub
from streamsync.control.sockets import Dialer, Listener, error_message, resolve_endpoint
from streamsync.errors import (
    ConfigError,
    ControlError,
    EngineError,
    PeerLost,
    PlanError,
    StreamsyncError,
    TransferTimeout,
    TransportError,
    VersionError,
)
from streamsync.types import Version

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

SECRET = "a job's shared secret"
SECONDS = 20.0
"""A deadline that is only reached when something is wrong."""

BEGIN = m.Begin(version=Version(1, 2))


@pytest.fixture
def curve() -> Iterator[Curve]:
    """For tests that need no handshake."""
    curve = Curve(SECRET)
    yield curve
    curve.context.destroy(linger=0)


class Far:
    """A listener that keeps what it hears, and answers as the test says."""

    def __init__(self, curve: Curve, host: str, port: int = 0) -> None:
        self.heard: asyncio.Queue[tuple[bytes, m.AnyMessage]] = asyncio.Queue()
        self.lost: asyncio.Queue[tuple[bytes, str]] = asyncio.Queue()
        self.answer: Callable[[bytes, m.AnyMessage], None] = lambda _peer, _message: None
        self.listener = Listener(
            curve, host, port, self.handle, lambda peer, text: self.lost.put_nowait((peer, text))
        )

    def handle(self, peer: bytes, message: m.AnyMessage) -> None:
        self.heard.put_nowait((peer, message))
        self.answer(peer, message)


class Near:
    """A dialer that keeps what it hears."""

    def __init__(self, curve: Curve, endpoint: str) -> None:
        self.heard: asyncio.Queue[m.AnyMessage] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.dialer = Dialer(curve, endpoint, "far", self.heard.put_nowait, self.lost.put_nowait)


@asynccontextmanager
async def curves(secret: str = SECRET) -> AsyncIterator[Curve]:
    curve = Curve(secret)
    try:
        curve.start()
        yield curve
    finally:
        curve.close()


@asynccontextmanager
async def far_end(host: str = "127.0.0.1") -> AsyncIterator[Far]:
    async with curves() as curve:
        far = Far(curve, host)
        task = asyncio.ensure_future(far.listener.run())
        try:
            yield far
        finally:
            task.cancel()
            await asyncio.wait({task})
            far.listener.close()


@asynccontextmanager
async def near_end(endpoint: str, secret: str = SECRET) -> AsyncIterator[Near]:
    async with curves(secret) as curve:
        near = Near(curve, endpoint)
        task = asyncio.ensure_future(near.dialer.run())
        try:
            yield near
        finally:
            task.cancel()
            await asyncio.wait({task})
            near.dialer.close()


async def get(queue: asyncio.Queue[object]) -> object:
    async with asyncio.timeout(SECONDS):
        return await queue.get()


# --- who gets in ---------------------------------------------------------------------------------


async def test_messages_travel_both_ways_in_order() -> None:
    async with far_end() as far, near_end(far.listener.endpoint) as near:
        await near.dialer.connect(SECONDS)
        for step in range(100):
            near.dialer.send(m.Begin(version=Version(1, step)))
        heard = [await get(far.heard) for _ in range(100)]
        peer = heard[0][0]
        assert heard == [(peer, m.Begin(version=Version(1, step))) for step in range(100)]
        far.listener.send(peer, BEGIN)
        assert await get(near.heard) == BEGIN


async def test_a_wrong_secret_is_named() -> None:
    async with far_end() as far, near_end(far.listener.endpoint, SECRET + "!") as near:
        near.dialer.send(m.Goodbye())
        with pytest.raises(ControlError, match="job secret differs") as raised:
            await near.dialer.connect(SECONDS)
        assert raised.value.where["peer"] == "far"
        assert far.heard.empty()


async def test_nobody_there_is_named() -> None:
    with socket.socket() as holder:  # bound but not listening: refuses connections
        holder.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        async with near_end(endpoint) as near:
            with pytest.raises(ControlError, match=f"{endpoint} is unreachable after 0.3 s"):
                await near.dialer.connect(0.3)


async def test_a_listener_that_speaks_another_language_is_named() -> None:
    """Accepts and stays silent: reached, but no handshake."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        async with near_end(f"tcp://127.0.0.1:{mute.getsockname()[1]}") as near:
            with pytest.raises(ControlError, match="refuses the handshake"):
                await near.dialer.connect(0.3)


async def test_a_port_in_use_is_named(curve: Curve) -> None:
    """Case 39."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"can't listen on 127.0.0.1:{port}: .*in use"):
            Far(curve, "127.0.0.1", port)


async def test_a_host_that_does_not_resolve_is_named(curve: Curve) -> None:
    with pytest.raises(ConfigError, match="host 'no such host' can't be resolved"):
        Far(curve, "no such host")


@pytest.mark.parametrize("endpoint", ["", "nonsense", "tcp://", "tcp://127.0.0.1"])
async def test_what_is_no_endpoint_is_named(endpoint: str) -> None:
    curve = Curve(SECRET)
    try:
        with pytest.raises(ConfigError, match="not an endpoint"):
            Near(curve, endpoint)
    finally:
        curve.context.destroy(linger=0)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="needs IPv6 on the loopback device")


@pytest.mark.parametrize(
    ("host", "begins"),
    [
        pytest.param("::1", "tcp://[::1]:", marks=needs_ipv6),
        ("localhost", "tcp://"),
        ("127.0.0.1", "tcp://127.0.0.1:"),
    ],
)
async def test_ipv6_and_host_names(host: str, begins: str) -> None:
    """Case 39."""
    async with far_end(host) as far:
        assert far.listener.endpoint.startswith(begins)
        async with near_end(far.listener.endpoint) as near:
            await near.dialer.connect(SECONDS)
            near.dialer.send(BEGIN)
            assert (await get(far.heard))[1] == BEGIN


def test_endpoints() -> None:
    assert resolve_endpoint("127.0.0.1", 0) == "tcp://127.0.0.1:*"
    assert resolve_endpoint("127.0.0.1", 77) == "tcp://127.0.0.1:77"
    assert resolve_endpoint("::1", 77) == "tcp://[::1]:77"


def test_two_hubs_on_one_host() -> None:
    """Case 39: two jobs, each with its own port."""
    with Hub(secret=SECRET) as one, Hub(secret=SECRET) as two:
        assert one.address != two.address
        port = int(one.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            Hub(secret=SECRET, port=port).start()


# --- broken peers --------------------------------------------------------------------------------


async def test_a_listener_that_closes_is_lost_once() -> None:
    async with far_end() as far, near_end(far.listener.endpoint) as near:
        await near.dialer.connect(SECONDS)
        asking = asyncio.ensure_future(
            near.dialer.request(m.AskReplica(replica="r"), m.ReplicaInfo, SECONDS)
        )
        await get(far.heard)
        far.listener.close()
        assert await get(near.lost) == "its control connection closed"
        with pytest.raises(PeerLost, match="its control connection closed"):
            await asking
        with pytest.raises(PeerLost):
            await near.dialer.request(m.AskReplica(replica="r"), m.ReplicaInfo, SECONDS)
        near.dialer.send(BEGIN)
        near.dialer.fail("again")
        assert near.lost.empty()


async def test_a_dialer_that_closes_is_lost_when_told_something() -> None:
    async with far_end() as far:
        async with near_end(far.listener.endpoint) as near:
            await near.dialer.connect(SECONDS)
            near.dialer.send(BEGIN)
            peer, _ = await get(far.heard)
        async with asyncio.timeout(SECONDS):
            while far.lost.empty():
                far.listener.send(peer, BEGIN)
                await asyncio.sleep(0.01)
        assert await get(far.lost) == (peer, "its control session is gone")


async def test_a_peer_never_seen_is_lost() -> None:
    async with far_end() as far:
        far.listener.send(b"nobody", BEGIN)
        assert await get(far.lost) == (b"nobody", "its control session is gone")


async def test_malformed_frames_are_refused_and_logged_and_the_session_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Case 41."""
    async with far_end() as far, near_end(far.listener.endpoint) as near:
        await near.dialer.connect(SECONDS)
        whole = m.encode(BEGIN)
        bad = [b"", b"\xc1", whole[:-1], whole + b"x", b"\xdf\xff\xff\xff\xff", b"\x91" * 5000]
        with caplog.at_level(logging.WARNING, "streamsync.control"):
            for data in bad:
                await near.dialer._socket.send(data)
            await near.dialer._socket.send_multipart([b"two", b"frames"])
            near.dialer.send(BEGIN)
            peer, message = await get(far.heard)
        assert message == BEGIN
        assert far.heard.empty()
        refusals = [await get(near.heard) for _ in bad]
        assert all(isinstance(r, m.Error) and "malformed" in r.text for r in refusals)
        assert sum("malformed" in text for text in caplog.messages) == len(bad)
        assert "refused a control message of 3 frames" in caplog.messages

        caplog.clear()
        with caplog.at_level(logging.WARNING, "streamsync.control"):
            for data in bad:
                far.listener._socket.send_multipart([peer, data])
            far.listener._socket.send_multipart([peer, b"two", b"frames"])
            far.listener.send(peer, BEGIN)
            assert await get(near.heard) == BEGIN
        assert near.heard.empty()
        assert near.lost.empty()
        assert len(caplog.messages) == len(bad) + 1


async def test_what_a_handler_refuses_is_answered_and_the_session_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(_peer: bytes, message: m.AnyMessage) -> None:
        if isinstance(message, m.AskReplica | m.Error):
            raise PlanError("no such replica", rank="hub")

    async with far_end() as far, near_end(far.listener.endpoint) as near:
        far.answer = refuse
        await near.dialer.connect(SECONDS)
        with pytest.raises(PlanError, match="no such replica") as raised:
            await near.dialer.request(m.AskReplica(replica="r"), m.ReplicaInfo, SECONDS)
        assert raised.value.peer_text == "no such replica [rank=hub]"
        near.dialer.send(m.Error(kind="control", text="never answered by an error"))
        near.dialer.send(BEGIN)
        for kind in (m.AskReplica, m.Error, m.Begin):
            assert type((await get(far.heard))[1]) is kind
        await asyncio.sleep(0.05)
        assert near.heard.empty()


# --- requests ------------------------------------------------------------------------------------


async def test_answers_find_their_questions_in_any_order() -> None:
    async with far_end() as far, near_end(far.listener.endpoint) as near:
        await near.dialer.connect(SECONDS)
        asking = [
            asyncio.ensure_future(
                near.dialer.request(m.AskReplica(replica=str(n)), m.ReplicaInfo, SECONDS)
            )
            for n in range(5)
        ]
        asked = [await get(far.heard) for _ in asking]
        for peer, message in reversed(asked):
            assert isinstance(message, m.AskReplica)
            far.listener.send(
                peer, m.ReplicaInfo(request=message.request, coordinator=message.replica)
            )
        assert [(await a).coordinator for a in asking] == list("01234")


async def test_no_answer_ends_at_the_deadline() -> None:
    async with far_end() as far, near_end(far.listener.endpoint) as near:
        await near.dialer.connect(SECONDS)
        with pytest.raises(ControlError, match=r"no answer to AskReplica within 0\.05 s"):
            await near.dialer.request(m.AskReplica(replica="r"), m.ReplicaInfo, 0.05)
        peer, message = await get(far.heard)
        late = m.ReplicaInfo(request=message.request, coordinator="late")
        far.listener.send(peer, late)
        assert await get(near.heard) == late  # nobody's answer any more: the handler's to judge


async def test_an_answer_of_the_wrong_kind_is_refused() -> None:
    async with far_end() as far, near_end(far.listener.endpoint) as near:
        far.answer = lambda peer, message: far.listener.send(
            peer, m.Enlisted(request=message.request)
        )
        await near.dialer.connect(SECONDS)
        with pytest.raises(ControlError, match="answered Enlisted"):
            await near.dialer.request(m.AskReplica(replica="r"), m.ReplicaInfo, SECONDS)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("x"), "config"),
        (PlanError("x"), "plan"),
        (ControlError("x"), "control"),
        (VersionError("x"), "version"),
        (TransportError("x"), "transport"),
        (TransferTimeout("x"), "transport"),
        (EngineError("x"), "control"),
        (StreamsyncError("x", peer_text="y"), "control"),
    ],
)
def test_errors_travel_by_kind_with_their_text(error: StreamsyncError, kind: str) -> None:
    assert error_message(error, 3) == m.Error(request=3, kind=kind, text=str(error))  # type: ignore[arg-type]


async def test_a_peer_may_not_be_another_context() -> None:
    """A plain socket that never handshakes neither gets in nor disturbs the others."""
    async with far_end() as far, near_end(far.listener.endpoint) as near:
        context = zmq.asyncio.Context()
        plain = context.socket(zmq.DEALER)
        try:
            plain.linger = 0
            plain.connect(far.listener.endpoint)
            plain.send(m.encode(BEGIN))
            await near.dialer.connect(SECONDS)
            near.dialer.send(m.Goodbye(text="member"))
            assert (await get(far.heard))[1] == m.Goodbye(text="member")
            assert far.heard.empty()
        finally:
            plain.close()
            context.destroy(linger=0)


async def test_a_dialer_that_is_gone_is_noticed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer on another host has no pidfd here, and nobody may have anything to say to it."""
    monkeypatch.setattr(sockets, "_PING_SECONDS", 0.05)
    async with far_end() as far:
        async with near_end(far.listener.endpoint) as near:
            await near.dialer.connect(SECONDS)
            near.dialer.send(BEGIN)
            peer, _ = await get(far.heard)
            await asyncio.sleep(0.2)
            assert near.heard.empty(), "a ping is no message"
            assert far.lost.empty()
        assert await get(far.lost) == (peer, "its control session is gone")
