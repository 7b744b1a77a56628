"""What a sink rank hears and does: its states, events and actions. Pure; see `rank_machine`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal

from streamsync.control.protocol.timer import CancelTimer, SetTimer, TimerExpired

if TYPE_CHECKING:
    from streamsync.types import Version


class RankState(Enum):
    """Where a sink rank stands; the names of PROTOCOL.md."""

    JOINING = "joining"
    SERVING = "serving"
    QUARANTINED = "quarantined"
    RECEIVING = "receiving"
    VERIFIED = "verified"
    ARMING = "arming"
    ARMED = "armed"
    INSTALLING = "installing"


@dataclass(frozen=True, slots=True)
class SourcesChanged:
    """A new plan: these sources must announce a version before it competes."""

    sources: frozenset[str]


@dataclass(frozen=True, slots=True)
class Announced:
    """A source began `version`."""

    source: str
    version: Version


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A source will never send `version` (superseded there, or it failed there)."""

    source: str
    version: Version
    text: str
    superseded: bool = False


@dataclass(frozen=True, slots=True)
class SourceLost:
    """A source's session or link ended."""

    source: str
    text: str


@dataclass(frozen=True, slots=True)
class AskedToDrop:
    """A source says that the others have `version` already and it wants its leases back."""

    source: str
    version: Version


@dataclass(frozen=True, slots=True)
class Prepare:
    """Coordinator: receive `version`."""

    version: Version


@dataclass(frozen=True, slots=True)
class Arm:
    """Coordinator: close the gates between two forwards; write nothing."""

    version: Version


@dataclass(frozen=True, slots=True)
class Go:
    """Coordinator: the first write is allowed."""

    version: Version


@dataclass(frozen=True, slots=True)
class Commit:
    """Coordinator: every rank installed `version`."""

    version: Version


@dataclass(frozen=True, slots=True)
class Abort:
    """Coordinator: give `version` up; nobody was allowed to write."""

    version: Version
    text: str
    state: Literal["failed", "superseded", "dropped"] = "failed"


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Coordinator: `version` failed after GO."""

    version: Version
    text: str


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """Own engine could not take `version` after COMMIT: it is installed, but nothing may leave."""

    version: Version
    text: str


@dataclass(frozen=True, slots=True)
class CoordinatorLost:
    """The coordinator's session ended."""

    text: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Own pipeline: `version` may be armed now. `starved`: because no credit can be granted.
    `verified`: all of it is here and its digests matched (`apply="version"`)."""

    version: Version
    starved: bool = False
    verified: bool = False


@dataclass(frozen=True, slots=True)
class GatesArmed:
    """Own engine: gates closed, no forward of the old version runs."""

    version: Version


@dataclass(frozen=True, slots=True)
class AllLanded:
    """Own pipeline: every group was loaded and its digest matched."""

    version: Version


@dataclass(frozen=True, slots=True)
class Failed:
    """Own pipeline or engine: `version` can't go on here."""

    version: Version
    text: str


Event = (
    SourcesChanged | Announced | Withdrawn | SourceLost | AskedToDrop | Prepare | Arm | Go | Commit
    | Abort | Quarantine | CommitFailed | CoordinatorLost | Ready | GatesArmed | AllLanded | Failed
    | TimerExpired
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TellCoordinator:
    """Send the coordinator what `kind` says of `version` at this rank."""

    kind: Literal["announced", "ready", "starved", "armed", "installed", "failed", "quarantined"]
    version: Version
    text: str = ""
    state: Literal["failed", "superseded", "dropped"] = "failed"


@dataclass(frozen=True, slots=True)
class StartReceiving:
    """Grant credits for `version` and receive."""

    version: Version


@dataclass(frozen=True, slots=True)
class ArmGates:
    """Close the engine's gates; answer with `GatesArmed` or `Failed`."""

    version: Version


@dataclass(frozen=True, slots=True)
class StartLoading:
    """Load what was received and what still comes."""

    version: Version


@dataclass(frozen=True, slots=True)
class DropReceived:
    """Stop receiving `version`, give its leases back; `disarm`: open the gates on the old one."""

    version: Version
    disarm: bool


@dataclass(frozen=True, slots=True)
class CommitEngine:
    """Let outputs of `version` leave."""

    version: Version


@dataclass(frozen=True, slots=True)
class QuarantineEngine:
    """No token leaves until a full transfer heals."""

    version: Version
    text: str


@dataclass(frozen=True, slots=True)
class AckSources:
    """Tell every source of the plan how `version` ended here."""

    version: Version
    state: Literal["committed", "failed", "superseded", "dropped"]
    text: str = ""


Action = (
    TellCoordinator | StartReceiving | ArmGates | StartLoading | DropReceived | CommitEngine
    | QuarantineEngine | AckSources | SetTimer | CancelTimer
)  # fmt: skip
