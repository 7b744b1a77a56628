"""UCXX as this process has it: its settings, its one worker, its errors, and what it can do."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from streamsync.errors import ConfigError, IntegrityError, MissingExtraError, PeerLost

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

_log = logging.getLogger("streamsync.transports")

SETTINGS = {
    "UCX_RNDV_FRAG_MEM_TYPE": "host",  # the package's default is cuda
    "UCX_RNDV_THRESH": "64K",  # larger ones go straight into the lease and can be cancelled
    "UCX_MEMTYPE_CACHE": "n",
    "UCX_CMA_MEMORY_INVALIDATE": "y",  # else error handling rules CMA out
    "UCX_TCP_TX_SEG_SIZE": "256K",  # the defaults cost three times the CPU
    "UCX_TCP_RX_SEG_SIZE": "256K",
    "UCX_KEEPALIVE_INTERVAL": "2s",
    "UCX_LOG_LEVEL": "error",
    "UCX_LOG_FILE": "stderr",  # the default is stdout; as /dev/stderr it would truncate a log file
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
"""Environment that UCX reads when it is loaded. What the user has set stays."""

_RDMA = ("rc_", "dc_", "ud_", "gga_", "srd")  # how UCX names its RDMA transports


def is_installed() -> bool:
    """Whether ucxx can be imported, without importing it."""
    return importlib.util.find_spec("ucxx") is not None


def has_rdma() -> bool:
    """Whether this host has an RDMA device and a UCX that was built for it. Reads the disk.

    The wheels of libucx have no RDMA; a system's UCX is believed to.
    """
    if not is_installed() or not any(Path("/sys/class/infiniband").glob("*")):
        return False
    if os.environ.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "false").lower() != "false":
        return True
    wheel = importlib.util.find_spec("libucx")
    if wheel is None or not wheel.submodule_search_locations:
        return True
    return any(Path(wheel.submodule_search_locations[0]).glob("lib/ucx/libuct_ib*"))


@contextlib.contextmanager
def errors(doing: str) -> Iterator[None]:
    """The one place where UCXX's exceptions become ours."""
    ucxx = load_ucxx()
    try:
        yield
    except ucxx.exceptions.UCXMessageTruncatedError as error:
        raise IntegrityError(f"a longer frame came than was planned, {doing}") from error
    except ucxx.exceptions.UCXError as error:
        raise PeerLost(f"UCX lost the peer {doing}: {error or type(error).__name__}") from error


@functools.cache
def load_ucxx() -> ModuleType:
    """The ucxx module, imported with `SETTINGS`; raises `MissingExtraError` or `ConfigError`."""
    if not is_installed():
        raise MissingExtraError("the ucx transport", "ucx")
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ucxx
    except (ImportError, OSError) as error:
        raise ConfigError(f"ucxx is installed and does not load: {error}") from error
    return ucxx  # type: ignore[no-any-return]


class Worker:
    """The one UCXX worker of a process, bound to the loop that first used it."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.num_users = 0
        self._watched = False

    def enter(self) -> None:
        """Starts UCX for the first user; raises `ConfigError`, `MissingExtraError`."""
        ucxx, loop = load_ucxx(), asyncio.get_running_loop()
        if self.num_users and self.loop is not loop:
            raise ConfigError(
                "UCX works with one event loop per process, and another one of this process uses "
                "it: give the Publisher and the Subscriber one loop, or use transport='auto'"
            )
        if not self.num_users:
            try:
                ucxx.init(progress_mode="thread", enable_python_future=True)
            except RuntimeError as error:
                raise ConfigError(f"another library of this process uses ucxx: {error}") from error
            except ucxx.exceptions.UCXError as error:
                raise ConfigError(f"UCX does not start: {error}") from error
            self.loop = loop
            self._watch()
        self.num_users += 1

    async def leave(self) -> None:
        """Stops UCX after its last user."""
        self.num_users -= 1
        if self.num_users:
            return
        ucxx = load_ucxx()
        # UCXX waits for its thread here, which may take a second.
        await asyncio.to_thread(ucxx.stop_notifier_thread)
        try:
            ucxx.reset()
        except ucxx.exceptions.UCXError as error:
            _log.warning("UCX did not stop cleanly: %s", error)

    def _watch(self) -> None:
        """Keeps an exit without `close` from hanging in UCXX's thread, which is no daemon."""
        if self._watched:
            return
        self._watched = True

        def stop() -> None:
            threading.main_thread().join()
            load_ucxx().stop_notifier_thread()

        threading.Thread(target=stop, name="ucx-exit", daemon=True).start()


worker = Worker()
"""The process's own."""


def describe() -> str:
    """What UCX really uses in this process, in one line; needs a started transport."""
    ucxx = load_ucxx()
    transports = sorted(ucxx.get_active_transports())
    version = ".".join(map(str, ucxx.get_ucx_version()))
    if any(name.startswith(_RDMA) for name in transports):
        rdma = "RDMA in use"
    elif has_rdma():
        rdma = "an RDMA device is here, but UCX does not use it"
    else:
        rdma = "no RDMA (not compiled into this UCX, or no device)"
    return f"UCX {version}, UCXX {ucxx.__version__}: {', '.join(transports)}; {rdma}"
