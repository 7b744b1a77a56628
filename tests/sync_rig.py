"""What tests of whole syncs share: an engine without a model, and comparing bit for bit."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from streamsync.engines.base import Engine
from streamsync.layout.binding import Binding
from streamsync.layout.state_dict import bind_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from streamsync.types import Version


class StillEngine(Engine):
    """Plain tensors instead of a model. `calls` is what it was asked to do, in order; the named
    call in `fail` raises `error` once for each entry, `slow_seconds` is spent in each `post_load`.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor] | Binding) -> None:
        self._binding = tensors if isinstance(tensors, Binding) else bind_tensors(tensors)
        self.calls: list[str] = []
        self.fail: list[str] = []
        self.error: Exception = RuntimeError("the loader choked on layer 7")
        self.slow_seconds = 0.0
        self.committed: Version | None = None
        self.quarantined = ""

    def binding(self) -> Binding:
        return self._binding

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            self.fail.remove(name)
            raise self.error

    def arm(
        self, version: Version, groups: tuple[str, ...], *, whole: bool, deadline: float
    ) -> None:
        self._called("arm")

    def disarm(self, version: Version) -> None:
        self._called("disarm")

    def open_gate(self, version: Version, group: str) -> None:
        self._called("open_gate")

    def post_load(self, group: str) -> None:
        time.sleep(self.slow_seconds)
        self._called("post_load")

    def commit(self, version: Version) -> None:
        self._called("commit")
        self.committed, self.quarantined = version, ""

    def quarantine(self, reason: str) -> None:
        self._called("quarantine")
        self.quarantined = reason


def bits(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes in row-major order: equal only if every bit is (NaN payloads too)."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def differing(source: Mapping[str, torch.Tensor], sink: Mapping[str, torch.Tensor]) -> list[str]:
    """Names whose bits differ."""
    return [name for name in sink if bits(source[name]) != bits(sink[name])]


def fill(tensors: Mapping[str, torch.Tensor], seed: int) -> None:
    """Random bits of every kind, in place; floats stay finite so that they can be cast."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        if tensor.dtype is torch.bool:
            tensor.copy_(torch.randint(0, 2, tensor.shape, generator=generator).bool())
        elif tensor.dtype.is_floating_point:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        else:
            high = min(torch.iinfo(tensor.dtype).max, 1 << 40)
            tensor.copy_(torch.randint(0, high, tensor.shape, generator=generator))


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Returns once `condition` holds; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass in time"
        time.sleep(0.01)
