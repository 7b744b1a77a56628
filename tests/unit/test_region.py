"""Shared memory without a name: what it views, who keeps it, what it refuses."""

from __future__ import annotations

import gc
import os
import socket

import numpy as np
import pytest

from streamsync.errors import ConfigError
from streamsync.runtime.region import Region

pytestmark = pytest.mark.allow_blocking


def _passed(region: Region) -> int:
    """The region's descriptor as another process gets it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b"x"], [region.fd])
        return socket.recv_fds(theirs, 1, 1)[1][0]


def test_all_views_are_of_the_same_bytes() -> None:
    region = Region.create(1 << 16, "test")
    region.tensor[5] = 7
    region.array[6] = 8
    region.memory[7] = 9
    assert bytes(region.memory[4:9]) == bytes([0, 7, 8, 9, 0])
    assert region.tensor.numel() == region.array.size == len(region.memory) == 1 << 16
    assert not any(region.array[8:])
    region.close()


def test_a_passed_region_is_the_same_memory() -> None:
    region = Region.create(1 << 16, "test")
    other = Region.attach(_passed(region))
    assert other.nbytes == region.nbytes
    region.array[100:200] = 3
    assert (other.array[100:200] == 3).all()
    other.array[:] = 4
    assert (region.array == 4).all()
    region.close()
    other.close()


def test_views_outlive_a_close_and_descriptors_do_not() -> None:
    before = len(os.listdir("/proc/self/fd"))
    region = Region.create(1 << 16, "test")
    view = region.array[10:20]
    region.close()
    region.close()
    view[:] = 5
    assert (view == np.full(10, 5)).all()
    del view, region
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_nobody_can_shrink_or_grow_it() -> None:
    region = Region.create(1 << 16, "test")
    fd = _passed(region)
    for size in (0, 1 << 15, 1 << 17):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)
    region.close()


def test_it_has_no_name_in_any_file_system() -> None:
    before = set(os.listdir("/dev/shm"))
    region = Region.create(1 << 16, "test")
    assert set(os.listdir("/dev/shm")) <= before
    region.close()


def test_more_than_the_machine_has_is_a_config_error() -> None:
    """Case 28."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="lower pool_bytes"):
        Region.create(1 << 62, "test")
    assert len(os.listdir("/proc/self/fd")) == before
