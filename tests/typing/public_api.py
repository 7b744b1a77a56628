"""What the public names promise to a type checker; checked by mypy with the package."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_type

from streamsync import (
    AsyncPublisher,
    CastRule,
    Config,
    Deadlines,
    Hub,
    Outcome,
    Publisher,
    Rules,
    Subscriber,
    SyncReport,
    TorchEngine,
    Version,
)

if TYPE_CHECKING:
    import torch
    from torch import nn


def blocking(model: nn.Module, hub: Hub) -> None:
    with Publisher(model, hub=hub.address, secret="s", rank=0, num_ranks=1) as publisher:
        version = publisher.publish(3)
        assert_type(version, Version)
        assert_type(publisher.wait(version, require="any"), list[Outcome])
        assert_type(publisher.wait(version, require=2), list[Outcome])
        assert_type(publisher.report(version), SyncReport)
        assert_type(publisher.sync(), Version)
        publisher.publish("3")  # type: ignore[arg-type]
        publisher.wait(version, require="most")  # type: ignore[arg-type]


async def awaiting(tensors: dict[str, torch.Tensor]) -> None:
    async with AsyncPublisher(tensors, hub="tcp://127.0.0.1:1", secret="s") as publisher:
        assert_type(await publisher.publish(), Version)
        assert_type(await publisher.wait(Version(1, 2)), list[Outcome])


def engine(model: nn.Module) -> None:
    config = Config(transport="tcp", deadlines=Deadlines(gate=30.0))
    rules = Rules(casts=(CastRule(source="float32", sink="bfloat16"),))
    with Subscriber(
        TorchEngine(model), hub="tcp://127.0.0.1:1", secret="s", rules=rules, config=config
    ) as subscriber:
        assert_type(subscriber.wait(step=1), Version)
        assert_type(subscriber.version, Version | None)
        assert_type(subscriber.reports, tuple[SyncReport, ...])
    Config(transport="carrier pigeon")  # type: ignore[arg-type]
