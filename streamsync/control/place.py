"""Where this process runs, and whether a process on the same host still lives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from streamsync.control.messages import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@cache
def _process_id(pid: int) -> str:
    """One id per life of a process; the pid as the key makes a fork get its own."""
    return f"{pid}-{uuid.uuid4().hex[:12]}"


def here(*, has_ucx: bool = False, has_rdma: bool = False) -> Place:
    """This process's place. Reads /proc: call it outside the loop."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net")]
    pid = os.getpid()
    return Place(
        host_id=" ".join([boot, *spaces]),
        process_id=_process_id(pid),
        pid=pid,
        has_ucx=has_ucx,
        has_rdma=has_rdma,
    )


@contextlib.contextmanager
def watch_process(pid: int, ended: Callable[[], None]) -> Iterator[None]:
    """Calls `ended` on the loop when process `pid` of this host ends (at once if it has ended).

    Uses a pidfd, so a reused pid can't deceive it once watching. Where the kernel has none, nothing
    is called: sockets tell later.
    """
    loop = asyncio.get_running_loop()
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        loop.call_soon(ended)
        yield
        return
    except OSError:
        yield
        return

    def fire() -> None:
        loop.remove_reader(fd)
        ended()

    loop.add_reader(fd, fire)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        os.close(fd)
