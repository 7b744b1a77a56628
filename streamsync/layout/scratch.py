"""Memory for the intermediate results of one thread, allocated once and used again and again."""

from __future__ import annotations

import threading

import torch


class Scratch(threading.local):
    """One buffer per thread, device and `slot`; each grows to the largest size asked for and stays.

    What `get` returns is valid until the same thread asks for the same slot again.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.device], torch.Tensor] = {}

    def get(
        self, slot: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A contiguous tensor of `shape`, with whatever it held before."""
        numel = 1
        for n in shape:
            numel *= n
        nbytes = numel * dtype.itemsize
        buffer = self._buffers.get((slot, device))
        if buffer is None or buffer.numel() < nbytes:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._buffers[slot, device] = buffer
        return buffer[:nbytes].view(dtype).view(shape)
