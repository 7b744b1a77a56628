"""Plain mappings of tensors as sources."""

from __future__ import annotations

import sys

import numpy
import pytest
import torch

from streamsync.errors import LayoutError
from streamsync.layout.binding import Binding, torch_dtype
from streamsync.layout.region import Box, View
from streamsync.layout.state_dict import bind_tensors


def read(binding: Binding) -> dict[str, torch.Tensor]:
    """Every tensor of a binding that holds whole tensors, read through its views."""
    layout, found = binding.layout, {}
    for entry in layout.entries:
        spec = layout.tensors[entry.tensor]
        assert entry.box == Box.whole(spec.shape)
        found[spec.name] = binding.view(entry.view, entry.box.shape, torch_dtype(spec.dtype))
    return found


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().reshape(-1).view(torch.uint8).tolist())


def test_any_strides_and_dtypes_read_back() -> None:
    """Cases 20, 23: transposed, strided, expanded and offset views; integers, bool, fp32 bias."""
    base = torch.arange(5 * 7 * 3, dtype=torch.float32).reshape(5, 7, 3)
    tensors = {
        "transposed": base.permute(2, 0, 1),
        "strided": base[::2, 1::3],
        "expanded": base[0, 0].expand(4, 3),
        "offset": base[3],
        "scalar": torch.tensor(7.5, dtype=torch.float64),
        "scalar_view": base[4, 6, 2],
        "ids": torch.randint(0, 9, (11,)),
        "mask": torch.tensor([[True], [False]]),
        "half": torch.randn(3, dtype=torch.bfloat16),
        "fp8": torch.randn(4).to(torch.float8_e4m3fn),
        "bytes": torch.arange(6, dtype=torch.uint8),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
    }
    binding = bind_tensors(tensors)
    assert [t.name for t in binding.layout.tensors] == list(tensors)
    assert len(binding.storages) == 8  # views of `base` share one storage
    found = read(binding)
    for name, tensor in tensors.items():
        got = found[name]
        assert got.dtype == tensor.dtype
        assert got.shape == tensor.shape
        assert raw(got) == raw(tensor)
    assert binding.layout.nbytes == sum(t.numel() * t.element_size() for t in tensors.values())


def test_views_are_the_live_memory() -> None:
    weight = torch.zeros(3, 4)
    binding = bind_tensors({"w": weight.T})
    weight[1, 2] = 5
    assert read(binding)["w"][2, 1] == 5


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0, 2)])
def test_empty_tensors_are_listed_without_entries(shape: tuple[int, ...]) -> None:
    """Case 24: shapes with a zero."""
    binding = bind_tensors({"none": torch.empty(shape), "one": torch.ones(())})
    assert binding.layout.tensors[0].shape == shape
    assert [e.tensor for e in binding.layout.entries] == [1]
    assert binding.layout.entries[0].box == Box((), ())


def test_two_empty_tensors_are_not_tied() -> None:
    binding = bind_tensors({"a": torch.empty(0), "b": torch.empty(0)})
    assert binding.layout.ties == {}


def test_ties() -> None:
    """Case 12: one memory under several names is listed once; other views of it are no ties."""
    weight = torch.randn(6, 6)
    names = {"a": weight, "b": weight, "rows": weight[:3], "t": weight.T, "c": weight.view(6, 6)}
    binding = bind_tensors(names)
    assert binding.layout.ties == {"b": "a", "c": "a"}
    assert {t.name for t in binding.layout.tensors} == set(names)
    assert set(read(binding)) == {"a", "rows", "t"}


def test_same_memory_wrapped_twice_is_a_tie() -> None:
    """Case 29: the same buffer registered twice, as two storages of torch."""
    memory = numpy.arange(4, dtype=numpy.float32)
    one, two = torch.from_numpy(memory), torch.from_numpy(memory)
    assert one.untyped_storage()._cdata != two.untyped_storage()._cdata
    binding = bind_tensors({"one": one, "two": two, "tail": two[1:]})
    assert binding.layout.ties == {"two": "one"}
    assert len(binding.storages) == 1


def test_binding_keeps_freed_memory_alive() -> None:
    """Case 29: an address is never reused by another tensor while a binding speaks of it."""
    held = {"w": torch.full((1024,), 3.0)}
    binding = bind_tensors(held)
    address = held["w"].data_ptr()
    del held["w"]
    others = [torch.full((1024,), -1.0) for _ in range(64)]
    assert address not in {t.data_ptr() for t in others}
    assert read(binding)["w"].eq(3).all()


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.eye(3).to_sparse(), "to_dense"),
        (torch.empty(3, device="meta"), "materialise"),
        (torch.ones(2, dtype=torch.complex64), "complex64"),
        (torch.ones(2, dtype=torch.complex64).conj().imag, "resolve_neg"),
    ],
)
def test_what_cannot_travel_is_refused(tensor: torch.Tensor, says: str) -> None:
    with pytest.raises(LayoutError, match=says) as caught:
        bind_tensors({"fine": torch.ones(1), "bad": tensor})
    assert caught.value.where["tensor"] == "bad"


def test_quantised_is_refused() -> None:
    with pytest.warns(UserWarning, match="deprecated"):
        quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(LayoutError, match="int_repr"):
        bind_tensors({"bad": quantised})


def test_freed_storage_is_refused() -> None:
    weight = torch.ones(8)
    weight.untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match="freed"):
        bind_tensors({"w": weight})


def test_refresh_takes_moved_memory_and_nothing_else() -> None:
    now = {"a": torch.zeros(2, 3), "b": torch.ones(4)}
    binding = bind_tensors(lambda: now)
    assert not binding.rebind()
    now["a"] = torch.full((2, 3), 9.0)
    assert binding.rebind()
    assert read(binding)["a"].eq(9).all()

    for name, changed in {
        "a": torch.zeros(3, 2),
        "b": torch.ones(4, dtype=torch.float64),
    }.items():
        was = now[name]
        now[name] = changed
        with pytest.raises(LayoutError, match="when it was bound") as caught:
            binding.rebind()
        assert caught.value.where["tensor"] == name
        now[name] = was
    now["a"] = torch.zeros(3, 2).T
    with pytest.raises(LayoutError, match="strides changed"):
        binding.rebind()
    now["a"] = torch.zeros(2, 3)
    now["c"] = torch.zeros(1)
    with pytest.raises(LayoutError, match="absent") as caught:
        binding.rebind()
    assert caught.value.where["tensor"] == "c"


def test_plain_mapping_has_nothing_to_refresh() -> None:
    assert not bind_tensors({"a": torch.zeros(1)}).rebind()


def test_many_tensors_stay_linear() -> None:
    """Case 25: four times the tensors take four times the work, not sixteen."""

    def num_calls(num: int) -> int:
        tensors = {f"layers.{i}.w": torch.zeros(2) for i in range(num)}
        calls = 0

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            bind_tensors(tensors)
        finally:
            sys.setprofile(None)
        return calls

    assert num_calls(2000) < 4.2 * num_calls(500)


def test_view_within_addresses_the_slice() -> None:
    base = torch.arange(24).reshape(4, 6)
    binding = bind_tensors({"w": base.T})
    (entry,) = binding.layout.entries
    inner = Box((1, 2), (3, 2))
    view = entry.view.within(entry.box, inner)
    assert view == View(0, 1 + 2 * 6, (1, 6))
    assert torch.equal(binding.view(view, inner.shape, torch.int64), base.T[1:4, 2:4])
