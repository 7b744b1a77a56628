"""Which tensors the safetensors files of a checkpoint list, read from their headers alone.

Format: https://github.com/huggingface/safetensors: 8 bytes with the header's length, little-endian,
then a JSON object of names to dtype, shape and place.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from streamsync.errors import LayoutError

if TYPE_CHECKING:
    from pathlib import Path

Listing = dict[str, tuple[tuple[int, ...], str] | None]
"""Shape and dtype by name; None where only the index lies here, which knows names."""

_MAX_HEADER_BYTES: Final = 100_000_000
_DTYPES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


def read_listing(config: Path) -> Listing | None:
    """What the checkpoint in the folder of `config` (a config.json, or the folder) lists; None
    where there is none. Raises `LayoutError` for a file that is no safetensors."""
    folder = config if config.is_dir() else config.parent
    listing: Listing = {}
    for path in sorted(folder.glob("*.safetensors")):
        listing |= _header(path)
    if listing:
        return listing
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return None
    try:
        return dict.fromkeys(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise LayoutError(f"{index} is no index of safetensors: {error!r}") from None


def _header(path: Path) -> Listing:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= _MAX_HEADER_BYTES:
                raise LayoutError(f"{path} is no safetensors: its header would be {length} bytes")
            header = json.loads(file.read(length))
        return {
            name: (tuple(item["shape"]), _DTYPES.get(item["dtype"], item["dtype"]))
            for name, item in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LayoutError(f"{path} is no safetensors: {error!r}") from None
