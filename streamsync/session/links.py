"""The transports that this process has open, one of each kind, opened when first needed."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from streamsync.transports.choice import open_transport

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from streamsync.config import Config, TransportName
    from streamsync.transports.base import Transport


class OpenTransports:
    """Owns transports; loop thread only."""

    def __init__(self, config: Config, executor: Executor) -> None:
        self._config = config
        self._executor = executor
        self._open: dict[str, Transport] = {}
        self._opening = asyncio.Lock()

    async def get(self, name: TransportName) -> Transport:
        """The transport called `name`; raises `ConfigError` or `MissingExtraError`."""
        async with self._opening:
            transport = self._open.get(name)
            if transport is None:
                # Its module is imported now, and imports wait for each other's.
                transport = await asyncio.get_running_loop().run_in_executor(
                    self._executor, partial(open_transport, name, self._config, self._executor)
                )
                await transport.start()
                self._open[name] = transport
            return transport

    async def close(self) -> None:
        """Closes all."""
        for transport in self._open.values():
            await transport.close()
        self._open.clear()
