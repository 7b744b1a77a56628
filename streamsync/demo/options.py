"""What the demo can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from streamsync.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from streamsync.config import TransportName
    from streamsync.types import Apply

ModelName = Literal["smollm2", "tiny"]


@dataclass(kw_only=True, slots=True, frozen=True)
class DemoOptions:
    """Options of `streamsync demo`. Raises `ConfigError` for counts below 1."""

    syncs: int = 3
    """Versions that are trained and delivered."""
    model: ModelName = "smollm2"
    """`tiny` is a random Llama with odd sizes: no download, no judged answers, seconds."""
    transport: TransportName = "auto"
    source_ranks: int = 2
    """Trainer processes, each holding one FSDP2 shard."""
    apply: Apply = "layer"
    json: Path | None = None
    """Where the results go; `-` is stdout."""
    trace: Path | None = None
    """Where the Chrome trace of all processes goes."""
    live: bool = True
    """A live view where stdout is a terminal; plain lines elsewhere and without it."""

    def __post_init__(self) -> None:
        for name in ("syncs", "source_ranks"):
            if getattr(self, name) < 1:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} must be at least 1, got {getattr(self, name)}")
