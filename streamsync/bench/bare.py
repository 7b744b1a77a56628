"""The transport alone: how fast bytes go through with no work on either side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import socket

BARES = {
    "memory": "a memcpy of as many bytes by one thread",
    "shm": "a memcpy of as many bytes by one thread",
    "tcp": "one connection with blocking sockets",
    "ucx": "the roof's move without copies and reads",
}
"""What `bare_gb_per_s` is, by transport."""

_COPY_BYTES = 64 << 20  # beyond any cache


def copy_memory(nbytes: int) -> None:
    """Copies about `nbytes`, from one array to another."""
    size = min(nbytes, _COPY_BYTES)
    if size not in _arrays:
        _arrays[size] = np.ones(size, np.uint8), np.ones(size, np.uint8)
    into, out = _arrays[size]
    for at in range(0, nbytes, size):
        np.copyto(into[: nbytes - at], out[: nbytes - at])


_arrays: dict[int, tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], ...]] = {}


def send_bytes(connection: socket.socket, nbytes: int, block: memoryview) -> None:
    """Sends `nbytes` from `block` over a blocking socket."""
    for at in range(0, nbytes, len(block)):
        connection.sendall(block[: nbytes - at])


def receive_bytes(connection: socket.socket, nbytes: int, block: memoryview) -> None:
    """Receives `nbytes` into `block` from a blocking socket."""
    left = nbytes
    while left:
        count = connection.recv_into(block[: min(left, len(block))])
        if not count:
            raise ConnectionResetError("the other side of the bare transport is gone")
        left -= count
