"""The memory of a module's tensors, remembered so that a loader can't take it away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from streamsync.layout.module import module_tensors
from streamsync.layout.trace import identity

if TYPE_CHECKING:
    import torch
    from torch import nn


class Replaced(NamedTuple):
    """A tensor of the module that a loader replaced: what it was, and what came (None: nothing)."""

    name: str
    memory: torch.Tensor
    value: torch.Tensor | None


class Memories:
    """What every parameter and buffer of `module` is now, as objects and as memory.

    Engines hold addresses (in CUDA graphs, in gates), so whatever a loader does, the tensors stay
    where they are. Keeps the memory alive.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts = [
            (path, part, dict(part._parameters), dict(part._buffers))
            for path, part in module.named_modules()
        ]
        self._tensors = [(name, tensor, tensor.detach()) for name, tensor in module_tensors(module)]

    def put_back(self) -> list[Replaced]:
        """Makes every tensor again the object, and the memory, that it was; returns what was not.

        Writes no value: what a loader put elsewhere is in the answer only.
        """
        replaced: list[Replaced] = []
        for path, part, parameters, buffers in self._parts:
            for was, now in ((parameters, part._parameters), (buffers, part._buffers)):
                changed = [n for n in {**was, **now} if was.get(n) is not now.get(n)]
                for name in changed:
                    old: Any = was.get(name)
                    if old is not None:
                        full = f"{path}.{name}".lstrip(".")
                        replaced.append(Replaced(full, old.detach(), now.get(name)))
                if changed:
                    now.clear()
                    now.update(was)
        moved: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
        for name, tensor, memory in self._tensors:
            if identity(tensor) != identity(memory):
                moved.setdefault(id(tensor), (name, tensor, memory))
        for name, tensor, memory in moved.values():
            replaced.append(Replaced(name, memory, tensor.detach()))
            tensor.data = memory
        return replaced
