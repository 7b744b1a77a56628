"""LoRA adapters merged into the weights as they leave, without touching the weights.

Definition, for each element of a weight W `[out, in]` with A `[rank, in]` and B `[out, rank]`:

    b[k]  = float32(scale * B[i, k])                            once, in float32
    sum   = W[i, j];  for k in 0 .. rank-1: sum += b[k] * A[k, j]       in float64
    W'    = float32(sum), then rounded to the dtype of W

A product of two float32 is exact in float64, so each step rounds once whether or not a machine
fuses multiply and add. The order is fixed, so that the result depends neither on how W is cut nor
on where it is computed; a matrix product would depend on both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from streamsync.errors import LayoutError
from streamsync.layout.binding import Binding, torch_dtype
from streamsync.layout.held import assemble, hold, refreshed
from streamsync.layout.module import module_tensors
from streamsync.layout.region import Box
from streamsync.layout.scratch import Scratch
from streamsync.layout.state_dict import bind_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from streamsync.layout.region import Entry, TensorSpec

_scratch = Scratch()
_PREFIX: Final = "base_model.model."
_ADAPTED: Final = re.compile(r"^(.*)\.(lora_\w+)\.([^.]+)(?:\.(\w+))?$")
_SAVED: Final = re.compile(r"^(.*)\.modules_to_save\.([^.]+)\.(.*)$")


@dataclass(slots=True, frozen=True, kw_only=True)
class Adapter:
    """A LoRA pair of one weight `[out, in]`: `down` (A) is `[rank, in]`, `up` (B) `[out, rank]`,
    plain or DTensors. `scale` is what their product counts (PEFT: `lora_alpha / rank`)."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float


@dataclass(slots=True, frozen=True)
class _Part:
    """One matrix of an adapter: the boxes of it that this rank holds, in `binding`."""

    binding: Binding
    entries: tuple[Entry, ...]
    dtype: torch.dtype

    def holds(self, box: Box) -> bool:
        return any(entry.box.contains(box) for entry in self.entries)

    def read(self, box: Box) -> torch.Tensor:
        entry = next(e for e in self.entries if e.box.contains(box))
        return self.binding.view(entry.view.within(entry.box, box), box.shape, self.dtype)


@dataclass(slots=True, frozen=True)
class _Merge:
    """The `Computation` of one adapted weight."""

    down: _Part
    up: _Part
    rank: int
    scale: float

    def parts(self, box: Box) -> tuple[Box, Box]:
        """The boxes of `down` and `up` that `box` of the weight needs."""
        (row, column), (rows, columns) = box.start, box.shape
        return Box((0, column), (self.rank, columns)), Box((row, 0), (rows, self.rank))

    def compute(self, box: Box, base: torch.Tensor, out: torch.Tensor) -> None:
        of_down, of_up = self.parts(box)
        up = (self.up.read(of_up).float() * self.scale).double()
        down = self.down.read(of_down).double()
        total = _scratch.get(0, box.shape, torch.float64, base.device)
        total.copy_(base)
        for k in range(self.rank):
            total.addcmul_(up[:, k : k + 1], down[k : k + 1])
        rounded = _scratch.get(1, box.shape, torch.float32, base.device)
        rounded.copy_(total)
        if base.dtype not in (torch.float32, out.dtype):
            narrow = _scratch.get(0, box.shape, base.dtype, base.device)
            narrow.copy_(rounded)
            out.copy_(narrow)
        else:
            out.copy_(rounded)


def merge_lora(
    binding: Binding, adapters: Mapping[str, Adapter] | Callable[[], Mapping[str, Adapter]]
) -> Binding:
    """The source `binding` with `adapters` merged in: what it publishes under each adapted name is
    `W + scale * (B @ A)`, defined above; the memory of W, A and B stays as it is.

    `adapters` are keyed by the layout's names, of which none may be tied to another. Given a
    callable, a refresh calls it again and accepts new memory of the same geometry. Raises
    `LayoutError` for a name that the layout lacks, for shapes that don't belong together, and where
    this rank lacks rows of B or columns of A that its boxes of W need.
    """
    found = adapters() if callable(adapters) else adapters
    bound = _bind(found)
    specs = {spec.name: spec for spec in binding.layout.tensors}
    tied = {*binding.layout.ties, *binding.layout.ties.values()}
    merges: dict[str, _Merge] = {}
    for name, adapter in found.items():
        if name not in specs:
            raise LayoutError("an adapter for a tensor that is not bound", tensor=name)
        if name in tied or name in binding.computed:
            raise LayoutError(
                "an adapter for a tied tensor would change the other one, too: bind them apart"
                if name in tied
                else "two adapters for one tensor: merge one of them first",
                tensor=name,
            )
        _check_shapes(specs[name], adapter)
        merges[name] = _Merge(
            _part(bound, _down(name)), _part(bound, _up(name)), adapter.down.shape[0], adapter.scale
        )
    for entry in binding.layout.entries:
        name = binding.layout.tensors[entry.tensor].name
        if name in merges and entry.box.numel:
            _check_held(name, entry.box, merges[name])

    def refresh() -> Sequence[torch.Tensor]:
        binding.rebind()
        bound.rebind()
        return (*binding.storages, *bound.storages)

    if callable(adapters):
        look_up = adapters
        hint = "adapters are fixed once they are merged: merge again under a new plan"
        bound.refresh = lambda: refreshed(bound.layout, _bind(look_up()), hint)
    return Binding(
        layout=binding.layout,
        storages=(*binding.storages, *bound.storages),
        refresh=refresh,
        computed={**binding.computed, **merges},
    )


def bind_peft(module: nn.Module, *, adapter: str = "default") -> Binding:
    """The source binding of a module that PEFT wrapped: its base weights under the names they had
    before, with `adapter` merged in on the way out.

    Raises `LayoutError` for what is not plain LoRA of linear layers (DoRA, adapted embeddings,
    biases of B).
    """
    scales = {
        _canonical(f"{path}.weight"): float(owner.scaling[adapter])
        for path, owner in module.named_modules()
        if hasattr(owner, "lora_A") and adapter in getattr(owner, "scaling", ())
    }

    def look_up() -> tuple[dict[str, torch.Tensor], dict[str, Adapter]]:
        return find_lora(dict(module_tensors(module)), scales, adapter=adapter)

    return merge_lora(bind_tensors(lambda: look_up()[0]), lambda: look_up()[1])


def find_lora(
    tensors: Mapping[str, torch.Tensor],
    scale: float | Mapping[str, float],
    *,
    adapter: str = "default",
) -> tuple[dict[str, torch.Tensor], dict[str, Adapter]]:
    """Base tensors and adapters in `tensors` that are named as PEFT does, both under the names that
    the base model had before: without `base_model.model.` and `.base_layer`.

    `scale` is one for all, or by those names. Other adapters than `adapter` are left out; of
    modules in `modules_to_save` the saved one counts. Raises `LayoutError` for a half of a pair and
    for what is not plain LoRA of linear layers.
    """
    base: dict[str, torch.Tensor] = {}
    saved: dict[str, torch.Tensor] = {}
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        adapted, kept = _ADAPTED.match(name), _SAVED.match(name)
        if adapted is not None:
            owner, kind, of, leaf = adapted.groups()
            if of != adapter:
                continue
            if kind not in ("lora_A", "lora_B") or leaf != "weight":
                raise LayoutError("only plain LoRA of linear layers can be merged", tensor=name)
            halves.setdefault(_canonical(f"{owner}.weight"), {})[kind] = tensor
        elif kept is not None:
            if kept[2] == adapter:
                saved[_canonical(f"{kept[1]}.{kept[3]}")] = tensor
        else:
            base[_canonical(name)] = tensor
    adapters: dict[str, Adapter] = {}
    for name, pair in halves.items():
        if len(pair) != 2:
            raise LayoutError(f"its adapter {adapter} is only {', '.join(pair)}", tensor=name)
        by_name = scale if isinstance(scale, float | int) else scale[name]
        adapters[name] = Adapter(down=pair["lora_A"], up=pair["lora_B"], scale=by_name)
    return base | saved, adapters


def _canonical(name: str) -> str:
    name = name.removeprefix(_PREFIX)
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def _down(name: str) -> str:
    return f"{name} A"


def _up(name: str) -> str:
    return f"{name} B"


def _bind(adapters: Mapping[str, Adapter]) -> Binding:
    return assemble(
        held
        for name, adapter in adapters.items()
        for held in (hold(_down(name), adapter.down), hold(_up(name), adapter.up))
    )


def _part(bound: Binding, name: str) -> _Part:
    layout = bound.layout
    own = layout.ties.get(name, name)
    entries = tuple(e for e in layout.entries if layout.tensors[e.tensor].name == own)
    dtype = next(spec.dtype for spec in layout.tensors if spec.name == own)
    return _Part(bound, entries, torch_dtype(dtype))


def _check_shapes(spec: TensorSpec, adapter: Adapter) -> None:
    down, up = list(adapter.down.shape), list(adapter.up.shape)
    if (
        len(spec.shape) != 2
        or len(down) != 2
        or up + down[1:] != [spec.shape[0], *down[:1], spec.shape[1]]
    ):
        raise LayoutError(
            f"A {down} and B {up} do not fit a weight of shape {list(spec.shape)}: A must be "
            "[rank, in] and B [out, rank]",
            tensor=spec.name,
        )
    dtypes = torch_dtype(spec.dtype), adapter.down.dtype, adapter.up.dtype
    if not all(t.is_floating_point and 2 <= t.itemsize <= 4 for t in dtypes):
        raise LayoutError(
            f"A {dtypes[1]} and B {dtypes[2]} can't be merged into {spec.dtype}: all three must be "
            "float32, bfloat16 or float16",
            tensor=spec.name,
        )


def _check_held(name: str, box: Box, merge: _Merge) -> None:
    of_down, of_up = merge.parts(box)
    for what, part, needed in (("A", merge.down, of_down), ("B", merge.up, of_up)):
        if not part.holds(needed):
            held = ", ".join(str(entry.box) for entry in part.entries) or "nothing"
            raise LayoutError(
                f"this rank holds {box} of the weight, and for it needs {needed} of {what}, of "
                f"which it holds {held}: replicate the adapter, or shard B by rows and A by "
                "columns as the weight",
                tensor=name,
            )
