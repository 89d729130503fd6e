"""Reads a GGUF file: its header in well under a second whatever the vocabulary, its tensors as memory-mapped bytes.

The layout is the one of ggml's docs/gguf.md, versions 2 and 3, little endian. Dequantization is the `gguf` package's.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from longctx.errors import ModelError

try:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize
except ImportError:  # a checkout run without being installed, as `make gpu-check` does: only .gguf files need it
    HAS_GGUF = False
else:
    HAS_GGUF = True

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_COUNT = 1 << 31


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor's place in the file; `shape` is in torch's order (the file stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A parsed header: metadata values by key, tensors by name. Reading a tensor maps the file again."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """A value under the architecture's prefix, such as `attention.head_count`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def read_tensor(self, name: str) -> np.ndarray:
        """The tensor dequantized to float32, in torch's dimension order."""
        tensor = self.tensors[name]
        raw = np.memmap(self.path, np.uint8, "r", tensor.start, (tensor.num_bytes,))
        block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        rows = raw.reshape(*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)
        values = np.require(
            dequantize(rows, tensor.kind), np.float32, ["C", "W"]
        )  # float32 ones come as a read-only map
        return values.reshape(tensor.shape)


class _Cursor:
    """Reads little-endian values from a buffer; running off its end is a `struct.error`."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer, self.at = buffer, 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.buffer, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def count(self) -> int:
        count = self.scalar("Q")
        if count > _MAX_COUNT:
            raise struct.error(f"a count of {count}")
        return count

    def string(self) -> str:
        size = self.count()
        raw = self.buffer[self.at : self.at + size]
        if len(raw) != size:
            raise struct.error("a string runs past the end")
        self.at += size
        return raw.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, size = self.scalar("I"), self.count()
            if inner in _SCALARS:
                code = f"<{size}{_SCALARS[inner]}"
                values = list(struct.unpack_from(code, self.buffer, self.at))
                self.at += struct.calcsize(code)
                return values
            return [self.value(inner) for _ in range(size)]
        if kind not in _SCALARS:
            raise struct.error(f"a value of unknown kind {kind}")
        return self.scalar(_SCALARS[kind])


def read_gguf(path: Path) -> GGUFFile:
    """Parse the header of `path` and check that every tensor lies inside the file. Raises ModelError otherwise."""
    path = Path(path)
    if not HAS_GGUF:
        raise ModelError(f"{path} cannot be read without the package gguf: pip install gguf")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            if buffer[:4] != b"GGUF":
                raise ModelError(f"{path} is not a GGUF file; its first bytes are {buffer[:4]!r}")
            return _parse(path, buffer)
    except (struct.error, ValueError, OSError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path} is truncated or corrupt ({error}); download it again") from error


def _parse(path: Path, buffer: mmap.mmap) -> GGUFFile:
    cursor = _Cursor(buffer)
    cursor.at = 4
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ModelError(f"{path} has GGUF version {version}; versions 2 and 3 (little endian) can be read")
    num_tensors, num_values = cursor.count(), cursor.count()
    metadata = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    infos = []
    for _ in range(num_tensors):
        name = cursor.string()
        shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))[::-1]
        infos.append((name, shape, GGMLQuantizationType(cursor.scalar("I")), cursor.scalar("Q")))
    alignment = int(metadata.get("general.alignment", 32))
    data_start = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in infos:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        num_bytes = int(np.prod(shape, dtype=np.int64)) // block * block_bytes
        tensors[name] = GGUFTensor(name, shape, kind, data_start + offset, num_bytes)
        if data_start + offset + num_bytes > len(buffer):
            raise ModelError(f"{path} is truncated: tensor {name!r} ends past the end of the file; download it again")
    return GGUFFile(path, metadata, tensors)
