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

_MOST_RANKS = 8
"""FSDP cuts a tensor by rows; with more trainer processes a laptop has no core left for them."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DemoOptions:
    """Options of `streamsync demo`. Raises `ConfigError` for what can't be done, before anything
    starts."""

    syncs: int = 3
    """Versions that are delivered: the checkpoint's own weights first, then trained ones."""
    model: ModelName = "smollm2"
    """`tiny` is a random Llama with odd sizes: no package, no judged answers, seconds."""
    transport: TransportName = "auto"
    source_ranks: int = 2
    """Trainer processes, each holding one FSDP2 shard."""
    apply: Apply = "layer"
    json: Path | None = None
    """Where the results go; `-` is stdout, and all that a person reads then goes to stderr."""
    trace: Path | None = None
    """Where the Chrome trace of all processes goes; by default a new file in the temporary
    folder."""
    live: bool = True
    """A live view where stdout is a terminal; plain lines elsewhere and without it."""

    def __post_init__(self) -> None:
        if self.syncs < 1:
            raise ConfigError(f"--syncs must be at least 1, got {self.syncs}")
        if not 1 <= self.source_ranks <= _MOST_RANKS:
            raise ConfigError(
                f"--source-ranks must be between 1 and {_MOST_RANKS}, got {self.source_ranks}"
            )
        if self.transport == "memory":
            raise ConfigError(
                "--transport memory stays inside one process and the demo runs several; "
                "use shm, tcp or ucx"
            )
        for name in ("json", "trace"):
            path: Path | None = getattr(self, name)
            if path is not None and str(path) != "-" and not path.absolute().parent.is_dir():
                raise ConfigError(f"--{name}: the folder {path.absolute().parent} does not exist")

    @property
    def json_to_stdout(self) -> bool:
        """Whether stdout belongs to the results alone."""
        return self.json is not None and str(self.json) == "-"
