"""Shared memory without a name: a sealed memfd that this process maps and others may be passed."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

import numpy as np
import torch

from streamsync.errors import ConfigError

_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 0x1, 0x2, 0x4


class Region:
    """`nbytes` of page-aligned memory behind a file descriptor.

    Made with `create` (zero pages, touched on first use) or `attach` (a descriptor received over a
    unix socket, which the region then owns). Having no name in any file system, it disappears with
    the last process that maps it, also after kill -9. The seals keep a peer from shrinking it under
    our feet. `tensor` and `array` are views of the whole region as bytes; views keep the mapping
    alive, so a region may be closed while a lease is still being read.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes)
        self.memory = memoryview(self._map)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.array: np.ndarray[tuple[int], np.dtype[np.uint8]] = np.frombuffer(
            self._map, dtype=np.uint8
        )

    @classmethod
    def create(cls, nbytes: int, name: str) -> Region:
        """Allocates; raises `ConfigError` when the machine refuses that much."""
        try:
            fd = os.memfd_create(f"streamsync-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise ConfigError(f"no shared memory for pool {name}: {error}") from error
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, _ADD_SEALS, _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW)
            return cls(fd, nbytes)
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"can't map {nbytes} bytes of shared memory for pool {name}: {error}; "
                "lower pool_bytes"
            ) from error

    @classmethod
    def attach(cls, fd: int) -> Region:
        """Maps a peer's region; takes ownership of `fd`. Raises `OSError` when the peer could still
        shrink it, which would kill this process at the next access."""
        if not fcntl.fcntl(fd, _GET_SEALS) & _SEAL_SHRINK:
            raise PermissionError(errno.EPERM, "the shared memory is not sealed against shrinking")
        return cls(fd, os.fstat(fd).st_size)

    def close(self) -> None:
        """Closes the descriptor; the mapping goes when its last view does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
