"""What the pipeline benchmark can be told."""

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
    """Bytes of the synthetic model in the wire dtype: what one sync moves."""
    bucket_bytes: int = 4 * MIB
    pool_bytes: int = 512 * MIB
    tensors: int = 64
    """The model is cut into this many tensors of about equal size."""
    digest: bool = True
    apply: Apply = "layer"
    json: Path | None = None
    """Where the results go; `-` is stdout."""

    def __post_init__(self) -> None:
        for name in ("bytes", "bucket_bytes", "pool_bytes", "tensors"):
            if getattr(self, name) < 1:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} must be at least 1, got {getattr(self, name)}")
        if self.tensors > self.bytes:
            raise ConfigError(f"--tensors {self.tensors} tensors need at least as many --bytes")
