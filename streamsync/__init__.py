"""Streams a model's new weights from a trainer into engines that keep generating."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from streamsync._version import __version__

if TYPE_CHECKING:
    from streamsync.config import Config, Deadlines
    from streamsync.control.hub import Hub
    from streamsync.engines.torch_module import TorchEngine
    from streamsync.errors import (
        ConfigError,
        ControlError,
        EngineError,
        IntegrityError,
        LayoutError,
        MissingExtraError,
        PeerLost,
        PlanError,
        PoisonedStepError,
        QuarantinedError,
        StreamsyncError,
        TransferTimeout,
        TransportError,
        VersionError,
    )
    from streamsync.layout.lora import merge_lora
    from streamsync.layout.recorder import record_loader
    from streamsync.models.megatron_binding import bind_megatron
    from streamsync.plan.conversion import QuantRule
    from streamsync.plan.plan import CastRule, Rename, Rules, Waiver
    from streamsync.publisher import AsyncPublisher, Publisher
    from streamsync.subscriber import Subscriber
    from streamsync.types import Outcome, StageReport, SyncReport, Version

__all__ = [
    "AsyncPublisher",
    "CastRule",
    "Config",
    "ConfigError",
    "ControlError",
    "Deadlines",
    "EngineError",
    "Hub",
    "IntegrityError",
    "LayoutError",
    "MissingExtraError",
    "Outcome",
    "PeerLost",
    "PlanError",
    "PoisonedStepError",
    "Publisher",
    "QuantRule",
    "QuarantinedError",
    "Rename",
    "Rules",
    "StageReport",
    "StreamsyncError",
    "Subscriber",
    "SyncReport",
    "TorchEngine",
    "TransferTimeout",
    "TransportError",
    "Version",
    "VersionError",
    "Waiver",
    "__version__",
    "bind_megatron",
    "merge_lora",
    "record_loader",
]

# Imported at first use: `import streamsync` costs milliseconds and never pulls in torch.
_HOMES = {
    "streamsync.config": ("Config", "Deadlines"),
    "streamsync.control.hub": ("Hub",),
    "streamsync.engines.torch_module": ("TorchEngine",),
    "streamsync.layout.lora": ("merge_lora",),
    "streamsync.layout.recorder": ("record_loader",),
    "streamsync.models.megatron_binding": ("bind_megatron",),
    "streamsync.plan.conversion": ("QuantRule",),
    "streamsync.plan.plan": ("CastRule", "Rename", "Rules", "Waiver"),
    "streamsync.publisher": ("AsyncPublisher", "Publisher"),
    "streamsync.subscriber": ("Subscriber",),
    "streamsync.types": ("Outcome", "StageReport", "SyncReport", "Version"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_MODULES.get(name, "streamsync.errors"))
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
