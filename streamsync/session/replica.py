"""How a sink rank and its replica's coordinator (rank 0) reach each other."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from streamsync.control import messages as m
from streamsync.control.protocol import coordinator as c
from streamsync.control.protocol import rank as r
from streamsync.control.protocol.timer import CancelTimer, SetTimer
from streamsync.control.sockets import Dialer, Listener
from streamsync.errors import (
    ControlError,
    StreamsyncError,
    root_error,
)
from streamsync.runtime.loop import check_cancelled
from streamsync.session.timers import Timers

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamsync.config import Config
    from streamsync.control.curve import Curve
    from streamsync.control.member import HubMember

_log = logging.getLogger("streamsync.replica")

Orders = r.Prepare | r.Arm | r.Go | r.Commit | r.Abort | r.Quarantine
_ORDERS: dict[str, type[r.Prepare | r.Arm | r.Go | r.Commit]] = {
    "prepare": r.Prepare,
    "arm": r.Arm,
    "go": r.Go,
    "commit": r.Commit,
}


def to_message(order: Orders) -> m.Order:
    """An order as it travels."""
    match order:
        case r.Abort(version, text, state):
            return m.Order(kind="abort", version=version, text=text, state=state)
        case r.Quarantine(version, text):
            return m.Order(kind="quarantine", version=version, text=text)
        case _:
            kind = type(order).__name__.lower()
            return m.Order(kind=kind, version=order.version)  # type: ignore[arg-type]


def to_order(message: m.Order) -> Orders:
    """An order as the machine takes it."""
    if message.kind == "abort":
        return r.Abort(message.version, message.text, message.state)
    if message.kind == "quarantine":
        return r.Quarantine(message.version, message.text)
    return _ORDERS[message.kind](message.version)


class Coordinator:
    """Rank 0's office: hears every rank's word, tells every rank the orders.

    `own(order)` delivers to the rank in this process; `all_subscribed()` is called there, and said
    to the others, each time that every rank has (again) all its sessions. Loop thread only.
    """

    def __init__(
        self,
        curve: Curve,
        replica: str,
        num_ranks: int,
        config: Config,
        own: Callable[[Orders], None],
        all_subscribed: Callable[[], None],
    ) -> None:
        self._replica = replica
        self._num_ranks = num_ranks
        self._own = own
        self._all_subscribed = all_subscribed
        self._subscribed: set[int] = set()
        self._machine = c.CoordinatorMachine(num_ranks)
        self._timers = Timers(config.deadlines, self._feed)
        self._ranks: dict[int, bytes] = {}
        self._listener = Listener(curve, config.host, 0, self._on_message, self._on_lost)
        self.endpoint = self._listener.endpoint
        self.is_reachable = True

    async def run(self) -> None:
        """Serves until cancelled."""
        await self._listener.run()

    def tell(self, word: m.Word) -> None:
        """A rank's word, the own rank's included."""
        if word.kind != "subscribed":
            self._feed(c.RankSays(word.rank, word.kind, word.version, word.text, word.state))
            return
        self._subscribed.add(word.rank)
        if len(self._subscribed) == self._num_ranks:
            self._tell_ranks(m.AllSubscribed())
            self._all_subscribed()

    def _tell_ranks(self, message: m.Message) -> None:
        for control_id in list(self._ranks.values()):
            self._listener.send(control_id, message)

    def _on_message(self, control_id: bytes, message: m.AnyMessage) -> None:
        match message:
            case m.Enlist():
                if message.replica != self._replica or message.num_ranks != self._num_ranks:
                    raise ControlError(
                        f"this is the coordinator of {self._replica} with {self._num_ranks} ranks, "
                        f"not of {message.replica} with {message.num_ranks}"
                    )
                if not 0 < message.rank < self._num_ranks:
                    raise ControlError(f"rank {message.rank} is not one that enlists here")
                if message.rank in self._ranks:
                    self._feed(c.RankLost(message.rank, "it enlisted again"))
                self._ranks[message.rank] = control_id
                self._listener.send(control_id, m.Enlisted(request=message.request))
            case m.Word():
                if self._ranks.get(message.rank) != control_id:
                    raise ControlError(f"rank {message.rank} has not enlisted from there")
                self.tell(message)
            case m.Goodbye():
                self._on_lost(control_id, "it said goodbye")
            case _:
                raise ControlError(f"a coordinator takes no {type(message).__name__}")

    def _on_lost(self, control_id: bytes, text: str) -> None:
        for rank, known in list(self._ranks.items()):
            if known == control_id:
                del self._ranks[rank]
                self._subscribed.discard(rank)
                self._feed(c.RankLost(rank, text))

    def _feed(self, event: c.Event) -> None:
        for action in self._machine.feed(event):
            match action:
                case SetTimer() | CancelTimer():
                    self._timers.apply(action)
                case c.Broadcast(order):
                    self._tell_ranks(to_message(order))
                    self._own(order)

    def close(self) -> None:
        """Closes the socket."""
        self._timers.close()
        self._listener.close()


class RemoteCoordinator:
    """The coordinator as a rank other than 0 sees it. Loop thread only."""

    def __init__(
        self,
        curve: Curve,
        member: HubMember,
        replica: str,
        rank: int,
        num_ranks: int,
        config: Config,
        order: Callable[[Orders], None],
        all_subscribed: Callable[[], None],
        lost: Callable[[str], None],
    ) -> None:
        self._curve = curve
        self._member = member
        self._replica = replica
        self._rank = rank
        self._num_ranks = num_ranks
        self._config = config
        self._order = order
        self._all_subscribed = all_subscribed
        self._lost = lost
        self._dialer: Dialer | None = None

    async def run(self) -> None:
        """Finds the coordinator through the hub, stays enlisted, dials again when it is lost."""
        while True:
            try:
                await self._attend()
            except StreamsyncError as error:
                check_cancelled()
                _log.debug("no coordinator of %s yet: %s", self._replica, error)
            await asyncio.sleep(0.3)

    async def _attend(self) -> None:
        info = await self._member.ask(m.AskReplica(replica=self._replica), m.ReplicaInfo)
        if not info.coordinator:
            return
        seconds = self._config.deadlines.connect
        dialer = Dialer(
            self._curve, info.coordinator, f"{self._replica}/0", self._on_message, self._on_lost
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(dialer.run())
                try:
                    await dialer.connect(seconds, patient=False)
                    await dialer.request(
                        m.Enlist(replica=self._replica, rank=self._rank, num_ranks=self._num_ranks),
                        m.Enlisted,
                        seconds,
                    )
                    self._dialer = dialer
                    await asyncio.wait({running})
                finally:
                    running.cancel()
        except BaseExceptionGroup as group:
            raise root_error(group) from None
        finally:
            self._dialer = None
            dialer.close()

    def _on_message(self, message: m.AnyMessage) -> None:
        if isinstance(message, m.Order):
            self._order(to_order(message))
        elif isinstance(message, m.AllSubscribed):
            self._all_subscribed()

    def _on_lost(self, text: str) -> None:
        self._lost(text)

    @property
    def is_reachable(self) -> bool:
        """Whether this rank is enlisted."""
        return self._dialer is not None

    def tell(self, word: m.Word) -> None:
        """Sends this rank's word; lost with the coordinator (its deadline then ends the sync)."""
        if self._dialer is not None:
            self._dialer.send(word)

    def close(self) -> None:
        """Says goodbye."""
        if self._dialer is not None:
            self._dialer.send(m.Goodbye())
