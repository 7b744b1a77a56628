"""What the benchmarks can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamsync.config import MIB
from streamsync.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from streamsync.config import TransportName
    from streamsync.types import Apply


@dataclass(kw_only=True, slots=True, frozen=True)
class PipelineOptions:
    """Options of `streamsync bench pipeline`. Raises `ConfigError` for sizes below 1."""

    transport: TransportName = "auto"
    bytes: int = 256 * MIB
    """Bytes of the synthetic model in the wire dtype: what one sync moves, but for rounding."""
    bucket_bytes: int = 4 * MIB
    pool_bytes: int = 512 * MIB
    tensors: int = 64
    """The model is cut into this many tensors of equal size."""
    digest: bool = True
    apply: Apply = "layer"
    cast: bool = False
    """The source holds float32 and the sink bfloat16, instead of bfloat16 both."""
    syncs: int = 5
    """How many are measured, after one that is not."""
    json: Path | None = None
    """Where the results go; `-` is stdout."""

    def __post_init__(self) -> None:
        for name in ("bytes", "bucket_bytes", "pool_bytes", "tensors", "syncs"):
            if getattr(self, name) < 1:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} must be at least 1, got {getattr(self, name)}")
        if 2 * self.tensors > self.bytes:
            raise ConfigError(
                f"--tensors {self.tensors} tensors of 2 bytes or more need at least as many --bytes"
            )


@dataclass(kw_only=True, slots=True, frozen=True)
class PlanOptions:
    """Options of `streamsync bench plan`."""

    model: str = ""
    """Only rows of this model; empty: all."""
    rows: str = ""
    """Only rows with this many ranks (`512→256`, also written `512:256`); empty: all."""
    quick: bool = False
    """Only the smallest clusters: seconds."""
    json: Path | None = None
    """Where the results go; `-` is stdout."""


_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6}
_UNITS |= {"gb": 10**9}


def parse_bytes(value: str | int) -> int:
    """A number of bytes, with a unit (KiB, MiB, GiB, kB, MB, GB) or without. `ConfigError`."""
    text = str(value)
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(number) :].strip().lower()
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(
            f"{text!r} is no number of bytes; write 268435456, 256MiB or 1GiB"
        ) from None
