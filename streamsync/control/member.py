"""A rank's registration with the hub: join, stay known, learn the epoch, ask."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, TypeVar

from streamsync.control.messages import (
    Alive,
    AliveReply,
    Changed,
    Describe,
    Join,
    Leave,
    Message,
    PlanRefused,
    Welcome,
)
from streamsync.control.sockets import Dialer
from streamsync.errors import (
    ControlError,
    StreamsyncError,
    root_error,
)
from streamsync.runtime.loop import check_cancelled

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamsync.control.curve import Curve
    from streamsync.control.messages import AnyMessage
    from streamsync.layout.outline import Outline

_log = logging.getLogger("streamsync.member")

M = TypeVar("M", bound=Message)


class HubMember:
    """Keeps one rank registered, through restarts of the hub. Loop thread only.

    `join(epoch)` makes the Join message; `content` is the outline that a source describes itself
    with; `changed()` is called when the hub would answer otherwise than before, `refused(message)`
    when a sink can't be served. Sessions with peers never depend on it.
    """

    def __init__(
        self,
        curve: Curve,
        hub: str,
        join: Callable[[int], Join],
        connect_seconds: float,
        *,
        content: Outline | None = None,
        changed: Callable[[], None] = lambda: None,
        refused: Callable[[PlanRefused], None] = lambda _message: None,
    ) -> None:
        self._curve = curve
        self._hub = hub
        self._join = join
        self._changed = changed
        self._refused = refused
        self._connect_seconds = connect_seconds
        self._content = content
        self._alive_seconds = 1.0
        self._dialer: Dialer | None = None
        self._wake = asyncio.Event()
        self._joined = asyncio.Event()
        self._failure: StreamsyncError | None = None
        self.epoch = 0
        self.epoch_known = asyncio.Event()

    async def wait_joined(self) -> None:
        """Returns when registered; raises what made the first registration fail."""
        await self._joined.wait()
        if self._failure is not None:
            raise self._failure

    async def run(self) -> None:
        """Registers and stays registered until cancelled. A failed first registration is kept for
        `wait_joined`; later ones are tried again."""
        first = True
        while True:
            try:
                await self._attend(first)
            except StreamsyncError as error:
                if not self._joined.is_set():
                    self._failure = error
                    self._joined.set()
                    return
                check_cancelled()
                _log.warning("the hub is away, running syncs go on: %s", error)
            first = False
            await asyncio.sleep(0.5)

    async def _attend(self, first: bool) -> None:
        dialer = Dialer(self._curve, self._hub, "hub", self._on_message, lambda _text: self._ring())
        try:
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(dialer.run())
                try:
                    await dialer.connect(self._connect_seconds)
                    await self._register(dialer)
                    self._dialer = dialer
                    self._joined.set()
                    if not first:
                        self._changed()
                    while not running.done():
                        await self._stay_known(dialer)
                finally:
                    running.cancel()
        except BaseExceptionGroup as group:
            raise root_error(group) from None
        finally:
            self._dialer = None
            dialer.close()

    def _ring(self) -> None:
        self._wake.set()

    async def _register(self, dialer: Dialer) -> None:
        message = self._join(self.epoch)
        welcome = await dialer.request(message, Welcome, self._connect_seconds)
        self._alive_seconds = welcome.alive_seconds
        if welcome.wants_outline and self._content is not None:
            description = Describe(
                name=message.name, incarnation=message.incarnation, outline=self._content
            )
            await dialer.request(description, Welcome, self._connect_seconds)

    async def _stay_known(self, dialer: Dialer) -> None:
        message = self._join(self.epoch)
        reply = await dialer.request(
            Alive(name=message.name, incarnation=message.incarnation),
            AliveReply,
            self._connect_seconds,
        )
        if not reply.known:
            await self._register(dialer)
            return
        self._learn(reply.epoch)
        self._wake.clear()
        try:
            async with asyncio.timeout(self._alive_seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _on_message(self, message: AnyMessage) -> None:
        if isinstance(message, Changed):
            self._learn(message.epoch)
            self._changed()
        elif isinstance(message, PlanRefused):
            self._refused(message)

    def _learn(self, epoch: int) -> None:
        if epoch:
            self.epoch = epoch
            self.epoch_known.set()

    def tell(self, message: Message) -> None:
        """Tells the hub, if it is there."""
        if self._dialer is not None:
            self._dialer.send(message)

    async def ask(self, message: Message, answer: type[M]) -> M:
        """Asks the hub; raises `ControlError` while it is away."""
        if self._dialer is None:
            raise ControlError("the hub is away", peer="hub")
        return await self._dialer.request(message, answer, self._connect_seconds)

    def leave(self) -> None:
        """Says goodbye to the hub, if it is there."""
        message = self._join(self.epoch)
        self.tell(Leave(name=message.name, incarnation=message.incarnation))
