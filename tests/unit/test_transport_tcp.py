"""What is particular to tcp: where it listens, and who gets in."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest

from streamsync.errors import ConfigError, PeerLost, TransportError
from streamsync.runtime.pool import Pool
from streamsync.transports.admission import MAX_STRANGERS, Door
from streamsync.transports.base import Offer
from streamsync.transports.tcp import TcpTransport
from tests.transport_rig import filled, rig, until


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        *(
            pytest.param(h, marks=pytest.mark.skipif(not _has_ipv6(), reason="needs IPv6"))
            for h in ("::1", "[::1]")
        ),
    ],
)
async def test_literals_and_names_are_reached(host: str) -> None:
    """Case 39: IPv6 literals and host names."""
    pool = Pool(1 << 16, "test")
    source, sink = TcpTransport(host), TcpTransport("127.0.0.1")
    await source.start()
    await sink.start()
    offer = source.offer(pool)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(source.accept(offer, b""))
        group.create_task(sink.connect(offer))
    await source.close()
    await sink.close()
    pool.close()


async def test_a_port_in_use_is_named() -> None:
    """Case 39: two jobs on one host with one fixed port."""
    first = TcpTransport("127.0.0.1")
    await first.start()
    _, port = msgspec.msgpack.decode(first._address)
    second = TcpTransport("127.0.0.1", port)
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: Address already in use"):
        await second.start()
    await first.close()
    await second.start()
    await second.close()


async def test_two_jobs_on_one_host_get_ports_of_their_own() -> None:
    """Case 39."""
    both = [TcpTransport("127.0.0.1") for _ in range(2)]
    for transport in both:
        await transport.start()
    assert both[0]._address != both[1]._address
    for transport in both:
        await transport.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_every_interface_is_no_address_to_tell_a_peer(host: str) -> None:
    with pytest.raises(ConfigError, match="every interface"):
        await TcpTransport(host).start()


async def test_a_name_that_does_not_resolve_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.invalid"):
        await TcpTransport("nowhere.invalid").start()


async def test_an_unreachable_source_is_named() -> None:
    transport = TcpTransport("127.0.0.1")
    await transport.start()
    offer = Offer(transport._address, bytes(32))
    await transport.close()
    with pytest.raises(TransportError, match="can't reach the source at 127"):
        await transport.connect(offer)
    with pytest.raises(TransportError, match="not one of tcp"):
        await transport.connect(Offer(b"junk", bytes(32)))


async def _knock(transport: TcpTransport, said: bytes) -> socket.socket:
    loop = asyncio.get_running_loop()
    _, port = msgspec.msgpack.decode(transport._address)
    stranger = socket.socket()
    stranger.setblocking(False)
    await loop.sock_connect(stranger, ("127.0.0.1", port))
    await loop.sock_sendall(stranger, said)
    return stranger


async def _is_shown_out(stranger: socket.socket) -> bool:
    try:
        async with asyncio.timeout(20):
            return await asyncio.get_running_loop().sock_recv(stranger, 1) == b""
    except ConnectionResetError:
        return True
    finally:
        stranger.close()


@pytest.mark.parametrize("said", [b"", b"half", bytes(32), b"GET / HTTP/1.1\r\n" * 10])
async def test_strangers_are_shown_out(said: bytes) -> None:
    """Case 41: a connection that shows no token in time, or a wrong one, is closed."""
    transport = TcpTransport("127.0.0.1", token_seconds=0.1)
    await transport.start()
    assert await _is_shown_out(await _knock(transport, said))
    assert transport._door is not None
    assert not transport._door._strangers
    await transport.close()


async def test_a_token_may_arrive_in_pieces_and_a_half_one_opens_nothing() -> None:
    pool = Pool(1 << 16, "test")
    transport = TcpTransport("127.0.0.1")
    await transport.start()
    offer = transport.offer(pool)
    (await _knock(transport, offer.token[:16])).close()
    stranger = await _knock(transport, offer.token[:5])
    await asyncio.sleep(0.01)
    await asyncio.get_running_loop().sock_sendall(stranger, offer.token[5:])
    async with asyncio.timeout(20):
        link = await transport.accept(offer, b"")
    await link.abort()
    stranger.close()
    await transport.close()
    pool.close()


async def test_only_so_many_strangers_may_wait() -> None:
    transport = TcpTransport("127.0.0.1", token_seconds=30)
    await transport.start()
    waiting = [await _knock(transport, b"") for _ in range(MAX_STRANGERS)]
    assert await _is_shown_out(await _knock(transport, b""))
    for stranger in waiting:
        stranger.close()
    await transport.close()


async def test_closing_the_door_closes_who_was_admitted_and_never_fetched() -> None:
    listener = socket.socket()
    listener.setblocking(False)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    door = Door(listener)
    token = door.expect()
    loop = asyncio.get_running_loop()
    stranger = socket.socket()
    stranger.setblocking(False)
    await loop.sock_connect(stranger, listener.getsockname())
    await loop.sock_sendall(stranger, token)
    await until(door._expected[token].done)
    door.close()
    assert await _is_shown_out(stranger)


async def test_a_loss_in_the_middle_tells_how_far_the_frame_was() -> None:
    pool = Pool(1 << 16, "test")
    transport = TcpTransport("127.0.0.1")
    await transport.start()
    offer = transport.offer(pool)
    account = pool.open_account("peer", 1000)
    lease = await filled(account, 1000, 1)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        accepting = group.create_task(transport.accept(offer, b""))
        connecting = group.create_task(transport.connect(offer))
    source, sink = accepting.result(), connecting.result()
    await asyncio.get_running_loop().sock_sendall(source._socket, lease.frame[:500])  # type: ignore[attr-defined]
    await source.abort()
    with pytest.raises(PeerLost, match="500 of 1064 bytes"):
        await sink.receive(lease, 1000)
    lease.release()
    await transport.close()
    account.close()
    pool.close()


async def test_a_link_left_half_way_is_not_used_again() -> None:
    async with rig("tcp") as ends:
        send_link, receive_link, _ = await ends.link()
        lease = await ends.sink_account.acquire(100)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await receive_link.receive(lease, 100)
        with pytest.raises(PeerLost, match="half way"):
            await receive_link.receive(lease, 100)
        await receive_link.abort()
        lease.release()
        await send_link.abort()


async def test_a_token_shown_twice_before_it_is_fetched_lets_the_first_in() -> None:
    pool = Pool(1 << 16, "test")
    transport = TcpTransport("127.0.0.1")
    await transport.start()
    offer = transport.offer(pool)
    assert transport._door is not None
    first = await _knock(transport, offer.token)
    await until(transport._door._expected[offer.token].done)
    assert await _is_shown_out(await _knock(transport, offer.token))
    await transport.accept(offer, b"")
    async with asyncio.timeout(20):
        assert await asyncio.get_running_loop().sock_recv(first, 1) == b"\x01"
    first.close()
    await transport.close()
    pool.close()


async def test_an_abort_returns_only_when_the_running_receive_is_over() -> None:
    async with rig("tcp") as ends:
        _, receive_link, _ = await ends.link()
        lease = await ends.sink_account.acquire(100)
        receiving = asyncio.ensure_future(receive_link.receive(lease, 100))
        await asyncio.sleep(0.01)
        await receive_link.abort()
        assert receiving.done()
        with pytest.raises(PeerLost):
            await receiving
        lease.release()


async def test_frames_that_pass_at_once_leave_the_loop_its_turn() -> None:
    async with rig("tcp") as ends:
        send_link, _, _ = await ends.link()
        turns = 0

        def turn() -> None:
            nonlocal turns
            turns += 1
            asyncio.get_running_loop().call_soon(turn)

        turn()
        lease = await filled(ends.source_account, 0, 0)
        for _ in range(100):  # far less than the socket's buffers hold
            await send_link.send(lease)
        lease.release()
        assert turns >= 100
