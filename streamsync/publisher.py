"""The source's face: `Publisher` for blocking trainers, `AsyncPublisher` for asyncio ones."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from torch import nn

from streamsync.config import Config
from streamsync.control.place import here
from streamsync.errors import ConfigError, VersionError
from streamsync.layout.binding import Binding
from streamsync.layout.model import bind_model
from streamsync.layout.state_dict import bind_tensors
from streamsync.observability.probe import Probe
from streamsync.runtime.loop import LoopThread
from streamsync.session.source_rank import SourceRank
from streamsync.transports import ucx_library

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self, TypeVar

    import torch

    from streamsync.types import Outcome, SyncReport, Version

    T = TypeVar("T")

Require = Literal["all", "any"] | int


def _bind(source: nn.Module | Mapping[str, torch.Tensor] | Binding) -> Binding:
    if isinstance(source, Binding):
        return source
    if isinstance(source, nn.Module):
        return bind_model(source, side="source")
    return bind_tensors(source)


def _check_required(outcomes: tuple[Outcome, ...], require: Require) -> list[Outcome]:
    """Raises `VersionError` unless enough replicas committed."""
    committed = sum(outcome.state == "committed" for outcome in outcomes)
    needed = max(1, len(outcomes)) if require == "all" else 1 if require == "any" else require
    if committed >= needed:
        return list(outcomes)
    if not outcomes:
        raise VersionError(
            "no replica was subscribed when this version was published: call wait_for_replicas() "
            "first, or wait with require=0"
        )
    bad = "; ".join(f"{o.replica} {o.state}: {o.text}" for o in outcomes if o.state != "committed")
    raise VersionError(
        f"{committed} of {len(outcomes)} replicas committed, {needed} required ({bad}); publish "
        "the parameters again under a new step to heal the others",
        version=outcomes[0].version if outcomes else None,
    )


class _SourceFace:
    """What both faces share: the thread in which the source rank lives."""

    def __init__(
        self,
        source: nn.Module | Mapping[str, torch.Tensor] | Binding,
        *,
        hub: str,
        secret: str,
        rank: int = 0,
        num_ranks: int = 1,
        group: str = "trainer",
        config: Config | None = None,
        probe: Probe | None = None,
    ) -> None:
        self.config = config or Config()
        self.probe = probe or Probe()
        if not 0 <= rank < num_ranks:
            raise ConfigError(f"rank {rank} is not below num_ranks {num_ranks}")
        self.name = f"{group}/{rank}"
        self._thread = LoopThread(self.name, self.config.copy_threads)
        self._rank: SourceRank
        self._source = source
        self._settings = {"hub": hub, "secret": secret, "group": group}
        self._place_in_group = (rank, num_ranks)

    def _start(self) -> None:
        # Not in `__init__`: it reads the disk, which an async caller's loop must not wait for.
        rank, num_ranks = self._place_in_group
        self._rank = SourceRank(
            _bind(self._source),
            name=self.name,
            rank=rank,
            num_ranks=num_ranks,
            place=here(has_ucx=ucx_library.is_installed(), has_rdma=ucx_library.has_rdma()),
            config=self.config,
            probe=self.probe,
            executor=self._thread.executor,
            **self._settings,
        )
        self._thread.start(self._rank.main)

    def _close(self) -> None:
        self._thread.post(self._rank.stop)
        self._thread.join()

    def report(self, version: Version) -> SyncReport:
        """This rank's account of the sync of `version` (so far, if it still runs)."""

        async def read() -> SyncReport:
            return self._rank.report(version)

        return self._thread.call(read())

    def transports(self) -> dict[str, str]:
        """Which transport each subscribed sink rank uses."""

        async def read() -> dict[str, str]:
            return self._rank.transports_in_use()

        return self._thread.call(read())


class Publisher(_SourceFace):
    """One trainer rank's outlet for new weights; a context manager.

    `source` is a module (FSDP2 included), a mapping of tensors, or a `Binding`. Its tensors stay
    yours; streamsync reads them only inside `publish`. `hub` is the hub's address, `secret` the
    job's. All `num_ranks` ranks of a `group` publish the same steps. The work runs in a thread of
    its own with its own event loop; methods may be called from any thread, one at a time.

    Raises `ConfigError`, `ControlError` (hub unreachable, wrong secret), `LayoutError`.
    """

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Joins the hub; returns when registered."""
        self._start()

    def close(self) -> None:
        """Leaves: what is still being sent is given up. Idempotent."""
        self._close()

    def wait_for_replicas(self, num_replicas: int = 1, timeout: float = 120.0) -> None:
        """Returns when so many replicas have subscribed with all their ranks.

        Raises `PlanError` with the sink's reasons when one can't be served, `ControlError` after
        `timeout` seconds.
        """
        self._thread.call(self._rank.wait_for_replicas(num_replicas, timeout))

    def publish(self, step: int | None = None) -> Version:
        """Takes a snapshot of the weights as version (epoch, `step`); returns when the parameters
        may be stepped again.

        By default steps count from 0. It waits while the previous sync runs and, with a pool
        smaller than this rank's share, for the wire; never for the engines otherwise. Raises
        `VersionError` for a step that is not above the last one or was superseded while waiting,
        and what made the snapshot fail.
        """
        return self._thread.call(self._rank.publish(step))

    def wait(
        self, version: Version, require: Require = "all", timeout: float | None = None
    ) -> list[Outcome]:
        """Returns how `version` ended at each replica, once that is decided everywhere.

        Raises `VersionError` when fewer replicas than `require` committed it: `all` that took part
        (and at least one), `any` one, or a number; `TransportError` after `timeout` seconds
        (default: the total deadline and a little).
        """
        seconds = timeout if timeout is not None else self.config.deadlines.total + 10
        return _check_required(self._thread.call(self._rank.wait(version, seconds)), require)

    def sync(self, step: int | None = None, require: Require = "all") -> Version:
        """Publishes and waits; when a replica failed the version, publishes the same parameters
        once more under the next step, in full, which heals it. Returns the version that held.

        The parameters must not change during the call.
        """
        version = self.publish(step)
        try:
            self.wait(version, require)
        except VersionError:
            version = self.publish(version.step + 1)
            self.wait(version, require)
        return version


class AsyncPublisher(_SourceFace):
    """`Publisher` for trainers that live in an event loop: same arguments, awaitable methods.

    The caller's loop may be any. Cancelling `publish` before its snapshot is taken gives the
    version up for all sinks; once the cancel has passed on, nothing reads the parameters any more.
    """

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """See `Publisher.start`."""
        await asyncio.to_thread(self._start)

    async def close(self) -> None:
        """See `Publisher.close`."""
        await asyncio.to_thread(self._close)

    async def wait_for_replicas(self, num_replicas: int = 1, timeout: float = 120.0) -> None:
        """See `Publisher.wait_for_replicas`."""
        await self._thread.await_call(self._rank.wait_for_replicas(num_replicas, timeout))

    async def publish(self, step: int | None = None) -> Version:
        """See `Publisher.publish`."""
        return await self._thread.await_call(self._rank.publish(step))

    async def wait(
        self, version: Version, require: Require = "all", timeout: float | None = None
    ) -> list[Outcome]:
        """See `Publisher.wait`."""
        seconds = timeout if timeout is not None else self.config.deadlines.total + 10
        return _check_required(
            await self._thread.await_call(self._rank.wait(version, seconds)), require
        )

    async def sync(self, step: int | None = None, require: Require = "all") -> Version:
        """See `Publisher.sync`."""
        version = await self.publish(step)
        try:
            await self.wait(version, require)
        except VersionError:
            version = await self.publish(version.step + 1)
            await self.wait(version, require)
        return version
