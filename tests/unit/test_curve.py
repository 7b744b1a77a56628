"""Keys from the job secret, and sockets that admit only who knows it."""

from __future__ import annotations

import asyncio

import pytest
import zmq
from zmq.utils import z85

from streamsync.control.curve import MIN_SECRET_BYTES, Curve, job_keys
from streamsync.errors import ConfigError

SECRET = "a job's shared secret"


def test_the_same_secret_gives_the_same_keys_and_another_one_others() -> None:
    assert job_keys(SECRET) == job_keys(SECRET)
    assert job_keys(SECRET).public != job_keys(SECRET + "!").public
    assert zmq.curve_public(job_keys(SECRET).secret) == job_keys(SECRET).public


def test_keys_are_32_bytes_and_do_not_hold_the_secret() -> None:
    for key in job_keys(SECRET):
        assert len(z85.decode(key)) == 32
        assert SECRET.encode() not in z85.decode(key)


@pytest.mark.parametrize("secret", ["", "x", "x" * (MIN_SECRET_BYTES - 1)])
def test_a_short_secret_is_refused(secret: str) -> None:
    with pytest.raises(ConfigError, match="at least 8 bytes"):
        job_keys(secret)


def test_length_counts_in_bytes() -> None:
    job_keys("é" * (MIN_SECRET_BYTES // 2))


async def test_a_client_that_knows_only_the_servers_public_key_is_refused() -> None:
    """Were the public key to leak, the ZAP check still refuses who can't derive the secret one."""
    curve = Curve(SECRET)
    curve.start()
    server = curve.server(zmq.ROUTER, "tcp://127.0.0.1:*")
    server.bind("tcp://127.0.0.1:*")
    stranger = curve.context.socket(zmq.DEALER)
    try:
        stranger.linger = 0
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.curve_serverkey = job_keys(SECRET).public
        events = stranger.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        stranger.connect(server.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0"))
        async with asyncio.timeout(10):
            frames = await events.recv_multipart()
        assert int.from_bytes(frames[0][:2], "little") == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    finally:
        stranger.disable_monitor()
        events.close()
        stranger.close()
        server.close()
        curve.close()


async def test_a_client_without_curve_gets_nothing_through() -> None:
    curve = Curve(SECRET)
    curve.start()
    server = curve.server(zmq.ROUTER, "tcp://127.0.0.1:*")
    server.bind("tcp://127.0.0.1:*")
    plain = curve.context.socket(zmq.DEALER)
    try:
        plain.linger = 0
        plain.connect(server.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0"))
        plain.send(b"hello")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await server.recv_multipart()
    finally:
        plain.close()
        server.close()
        curve.close()
