"""Records that every layer shares: versions, sync reports and dtypes, free of torch and of IO."""

from __future__ import annotations

import sys
from typing import Final, Literal

import msgspec

if sys.byteorder != "little":  # pragma: no cover - no such machine runs this field's software
    raise ImportError("streamsync moves little-endian bytes and this machine is big-endian")

Apply = Literal["layer", "version"]
Arm = Literal["late", "begin"]
StageName = Literal["convert", "pin", "send", "receive", "load"]
STAGE_NAMES: Final[tuple[StageName, ...]] = ("convert", "pin", "send", "receive", "load")

DTYPE_ITEMSIZES: Final[dict[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes per element of every dtype that may travel, by torch's name without its prefix."""


class Version(msgspec.Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """A version of the weights: ordered lexicographically, only growing, never used twice.

    `epoch` names one life of a source group (the hub chooses it); `step` is the trainer's count
    within that life and may begin again after a restart.
    """

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"


class StageReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one stage of one rank did during one sync.

    `busy_seconds` is time spent working, `blocked_seconds` time spent waiting for input, output
    space, credits or leases; `bytes` counts what left the stage, in the wire dtype.
    """

    busy_seconds: float = 0.0
    blocked_seconds: float = 0.0
    bytes: int = 0


class SyncReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's account of one sync. A source fills the first three stages, a sink the last two.

    Times of day are `time.monotonic()` seconds of this rank's host. `wire_bytes` was counted by
    the transport; `needed_bytes` by the plan. A source's `first_layer_seconds` is 0 (only a sink
    sees a group land); a sink's `publish_blocked_seconds` is 0.
    """

    version: Version
    needed_bytes: int
    wire_bytes: int
    started_at: float
    seconds: float
    first_layer_seconds: float = 0.0
    install_seconds: float = 0.0
    publish_blocked_seconds: float = 0.0
    peak_pool_bytes: int = 0
    transport: str = ""
    stages: dict[str, StageReport] = {}


class Outcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one version ended at one replica.

    `state` is `committed`, `failed` (the replica kept its old version, or is quarantined),
    `superseded` (never competed there) or `dropped` (the replica lagged). `text` is the replica's
    own explanation, empty when committed. `needs_republish`: the replica lacks this version and no
    newer one is on its way; the same parameters may be published again under a new step.
    """

    replica: str
    version: Version
    state: Literal["committed", "failed", "superseded", "dropped"]
    text: str = ""
    needs_republish: bool = False
