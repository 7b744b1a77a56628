"""Any eager torch module as an engine: hooks that hold its forwards at gates. Torch only."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from streamsync.engines.base import Engine
from streamsync.engines.gate import Gates
from streamsync.engines.placement import Scope, place_gates, unguarded
from streamsync.errors import EngineError, StreamsyncError, VersionError
from streamsync.layout.group import group_of
from streamsync.layout.model import bind_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from streamsync.engines.forward import GateStatistics
    from streamsync.layout.binding import Binding
    from streamsync.types import Version

_POLL_SECONDS = 0.0002
"""Between two looks at a CUDA event: short against a forward, long against a call of the driver."""


class TorchEngine(Engine):
    """Gates of an eager `model` (transformers models included), until `close()`.

    Every call of the model, or of a part of it that is watched (see `place_gates`), is a forward:
    `model(...)` and `model.generate(...)` need no change. A call waits for the groups it reads, and
    returns when the version it ran on is committed; when that version can't finish it raises
    `PoisonedStepError`, and what it wrote (a KV cache) must be dropped with it. What is not seen:
    `model.forward(...)` without the call, calls of modules inside a layer from outside of it, and
    direct reads of parameters (also by hooks registered after the engine was made); put them into
    `with engine.forward():`, which also keeps several calls on one version.

    `binding` defaults to `bind_model(model, side="sink")`; the engine keeps it alive and takes no
    other reference to the weights. `gate_seconds` bounds what one forward waits in all.
    `post_load` refreshes derived tensors of a group in place, once per landed group, under
    `torch.no_grad`. Raises `EngineError` for tensors that no gate guards and for a hook of an
    unknown group.

    A gate is trusted from the first forward on that came through it, so that a module whose weights
    are read without calling it (`F.linear(x, embedding.weight)`) can't be read half written: until
    then forwards wait for its groups when they start. CUDA graphs and `torch.compile` skip hooks:
    not for this engine.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        binding: Binding | None = None,
        gate_seconds: float = 60.0,
        post_load: Mapping[str, Callable[[], None]] | None = None,
    ) -> None:
        self._binding = bind_model(model, side="sink") if binding is None else binding
        self._groups = frozenset(group_of(t.name) for t in self._binding.layout.tensors)
        self._post_load = dict(post_load or {})
        if unknown := sorted(self._post_load.keys() - self._groups):
            raise EngineError(
                f"post_load has a hook for {', '.join(unknown)}, which the binding does not have; "
                f"its groups are {', '.join(sorted(self._groups))}"
            )
        self._scopes = place_gates(model, self._binding)
        if free := unguarded(self._binding, self._scopes):
            raise EngineError(
                f"no gate guards {', '.join(free)}: no module of the model owns that memory; bind "
                "the tensors of this very model, and register them as parameters or buffers"
            )
        self._gates = Gates(gate_seconds)
        self._refreshed: set[tuple[Version, str]] = set()
        self._untrusted = {id(scope): scope.groups for scope in self._scopes if scope.groups}
        devices = {tensor.device for tensor in self._binding.storages}
        self._cuda = tuple(device for device in devices if device.type == "cuda")
        self._streams: set[torch.cuda.Stream] = set()
        self._handles: list[RemovableHandle] = []
        for scope in self._scopes:
            self._watch(scope)

    def close(self) -> None:
        """Removes the hooks; the model is a plain module again. May be called twice. Call it when
        no forward runs: one that does is not waited for, and nothing holds its outputs."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ---- Engine

    def binding(self) -> Binding:
        """The layout and live memory that the gates guard."""
        return self._binding

    def arm(
        self, version: Version, groups: tuple[str, ...], *, whole: bool, deadline: float
    ) -> None:
        """See `Engine.arm`. Also waits for the kernels of finished forwards, stream by stream and
        never for a whole device. Raises `EngineError` for groups that the binding does not have."""
        if unknown := sorted(set(groups) - self._groups):
            raise EngineError(
                f"can't arm groups that this engine does not have: {', '.join(unknown)}",
                version=version,
            )
        until = time.monotonic() + deadline
        self._gates.arm(version, groups, whole=whole, deadline=deadline)
        try:
            self._drain_streams(version, until)
        except BaseException:
            self._gates.disarm(version)
            raise

    def disarm(self, version: Version) -> None:
        """See `Engine.disarm`; `EngineError` when a group has landed already."""
        self._gates.disarm(version)

    def open_gate(self, version: Version, group: str) -> None:
        """See `Engine.open_gate`; `VersionError` for a late message."""
        self._gates.open(version, group)

    def commit(self, version: Version) -> None:
        """See `Engine.commit`; `EngineError` when a group of `version` has not landed."""
        self._gates.commit(version)

    def quarantine(self, reason: str) -> None:
        """See `Engine.quarantine`."""
        self._gates.quarantine(reason)

    def post_load(self, group: str) -> None:
        """Runs the group's hook, the first time it is asked within an armed version.

        Raises `VersionError` when no version is armed, and `EngineError` when the hook raises or
        moves a parameter or buffer of the modules it serves: addresses stay, so write with `copy_`.
        """
        hook = self._post_load.get(group)
        if hook is None:
            return
        armed = self._gates.statistics().armed
        if armed is None:
            raise VersionError(f"post-load of {group} came while no version is armed")
        if (armed, group) in self._refreshed:
            return
        self._refreshed = {done for done in self._refreshed if done[0] == armed} | {(armed, group)}
        before = self._addresses(group)
        try:
            with torch.no_grad():
                hook()
        except StreamsyncError as error:
            raise error.at(version=armed) from None
        except Exception as error:
            raise EngineError(
                f"post-load hook of {group} failed: {error}", version=armed
            ) from error
        after = self._addresses(group)
        if moved := sorted(name for name in before if before[name] != after.get(name)):
            raise EngineError(
                f"post-load hook of {group} replaced {', '.join(moved)}; write it in place (copy_)",
                version=armed,
            )

    # ---- for the user

    @property
    def version(self) -> Version | None:
        """The version that the last finished forward ran on: the calling thread's own, if it ran
        one, else the last of any thread. None before any, and before the first COMMIT."""
        return self._gates.last_version

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A block that is one forward: every call in it runs on one version.

        For what the hooks can't see, so it waits for every group before it begins; at its end it
        waits for COMMIT like any forward.
        """
        with self._gates.forward():
            self._note_streams()
            self._gates.pass_gate(self._groups)
            yield

    def statistics(self) -> GateStatistics:
        """A snapshot of the gates: who waits, how often and how long."""
        return self._gates.statistics()

    # ---- hooks

    def _watch(self, scope: Scope) -> None:
        watched, groups = scope.module, scope.groups
        always = self._scopes[0].groups

        # Functions and not methods: a deep copy of the model takes its hooks along, and must
        # neither copy the engine nor run under its gates.
        def enter(module: nn.Module, _args: Any) -> None:
            if module is not watched:
                return
            awaited = groups
            if self._gates.enter_forward(module, sys._getframe(1)):
                self._note_streams()
                awaited = groups.union(always, *tuple(self._untrusted.values()))
            if awaited:
                self._gates.pass_gate(awaited)
            self._untrusted.pop(id(scope), None)

        def hold(module: nn.Module, _args: Any, _output: Any) -> None:
            if module is watched:
                self._gates.hold_outputs()

        def leave(module: nn.Module, _args: Any, _output: Any) -> None:
            if module is watched:
                self._gates.leave_forward(module)

        # Holding comes before all hooks of the user, which could leak an output. Leaving comes
        # after those that were there first, which may read weights, and also after a failure (torch
        # turns what a hook raises then into a warning, so leaving never raises).
        self._handles += (
            watched.register_forward_pre_hook(enter, prepend=True),
            watched.register_forward_hook(hold, prepend=True),
            watched.register_forward_hook(leave, always_call=True),
        )

    def _addresses(self, group: str) -> dict[str, int]:
        return {
            f"{scope.name}.{name}" if scope.name else name: tensor.data_ptr()
            for scope in self._scopes
            if group in scope.groups
            for name, tensor in chain(scope.module.named_parameters(), scope.module.named_buffers())
        }

    # ---- CUDA

    def _note_streams(self) -> None:
        for device in self._cuda:
            self._streams.add(torch.cuda.current_stream(device))

    def _drain_streams(self, version: Version, until: float) -> None:
        """Waits for all work on the streams that forwards were launched on. No forward starts
        meanwhile, so what is enqueued now is all that reads the old weights."""
        for stream in tuple(self._streams):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch does not type it
            event.record(stream)
            while not event.query():  # type: ignore[no-untyped-call]
                if time.monotonic() > until:
                    raise EngineError(
                        f"not armed: kernels of the old version still run on {stream}",
                        version=version,
                    )
                time.sleep(_POLL_SECONDS)
