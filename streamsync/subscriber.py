"""The sink's face: `Subscriber`, which keeps one engine rank at the newest version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamsync.config import Config
from streamsync.control.place import here
from streamsync.errors import ConfigError
from streamsync.observability.probe import Probe
from streamsync.plan.plan import Rules
from streamsync.runtime.loop import LoopThread
from streamsync.session.sink_rank import SinkRank
from streamsync.transports import ucx_library

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from streamsync.engines.base import Engine
    from streamsync.plan.plan import Plan
    from streamsync.types import Apply, Arm, SyncReport, Version


class Subscriber:
    """One engine rank's inlet for new weights; a context manager.

    `engine` is written only between its gates, as the plan says. `hub` is the hub's address,
    `secret` the job's. `replica` names the copy of the model, `rank` of `num_ranks` its part of it;
    rank 0 coordinates. `rules` allow what is not one to one (casts, renames, waivers).

    `apply="layer"` lets forwards run through the layers of a new version as they land, armed late
    (or with `arm="begin"` at the start of each sync); `apply="version"` receives a whole version
    first and loads it between two forwards, and needs a pool as large as the share.

    The work runs in a thread of its own; methods may be called from any thread.
    Raises `ConfigError`, `ControlError` (hub unreachable, wrong secret), `LayoutError`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        hub: str,
        secret: str,
        replica: str = "engine",
        rank: int = 0,
        num_ranks: int = 1,
        apply: Apply = "layer",
        arm: Arm = "late",
        rules: Rules | None = None,
        config: Config | None = None,
        probe: Probe | None = None,
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise ConfigError(f"rank {rank} is not below num_ranks {num_ranks}")
        self.config = config or Config()
        self.probe = probe or Probe()
        self.name = f"{replica}/{rank}"
        self._thread = LoopThread(self.name, self.config.copy_threads)
        self._rank = SinkRank(
            engine,
            hub=hub,
            secret=secret,
            replica=replica,
            rank=rank,
            num_ranks=num_ranks,
            apply=apply,
            arm=arm,
            rules=rules or Rules(),
            place=here(has_ucx=ucx_library.is_installed(), has_rdma=ucx_library.has_rdma()),
            config=self.config,
            probe=self.probe,
            executor=self._thread.executor,
        )

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
        """Joins the hub; returns when registered. Subscribing goes on in the background."""
        self._thread.start(self._rank.main)

    def close(self) -> None:
        """Leaves. A sync before its first write is given up, and the engine goes on with the
        version that it serves; later than that it is quarantined. Idempotent."""
        self._thread.post(self._rank.stop)
        self._thread.join()

    def wait(self, step: int = 0, timeout: float = 300.0) -> Version:
        """Returns the committed version once its step is at least `step`.

        Raises `PlanError` when no plan with the sources is possible, `TransportError` after
        `timeout` seconds with the last trouble.
        """
        return self._thread.call(self._rank.wait(step, timeout))

    @property
    def version(self) -> Version | None:
        """The version that this rank serves; None before the first commit and in quarantine."""
        return self._rank.version

    @property
    def state(self) -> str:
        """Where this rank stands: joining, receiving, verified, arming, armed, installing, serving
        or quarantined."""
        return self._rank.state.value

    @property
    def plan(self) -> Plan | None:
        """The current plan, None before the sources are all there."""
        return self._rank.plan

    @property
    def reports(self) -> tuple[SyncReport, ...]:
        """Accounts of the last committed syncs, oldest first."""
        return self._rank.reports
