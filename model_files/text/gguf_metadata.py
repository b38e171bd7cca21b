"""The metadata of a GGUF file, read directly.

``gguf.GGUFReader`` keeps each element of each array as a numpy view of its own: about two seconds for a vocabulary of
49,000 tokens. Walking the same bytes once takes a twentieth of a second, and both text processes wait for it.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from .errors import TokenizerLoadError

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
FIXED_TYPES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Format of ``struct`` by GGUF value type. Strings and arrays have lengths of their own."""
_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from


@dataclass(frozen=True)
class GGUFMetadata:
    """The key-value pairs of one file. Getters raise ``TokenizerLoadError`` for a value of another type."""

    path: Path
    values: dict[str, Value]

    def string(self, key: str) -> str | None:
        """Return a string, or None if it is missing."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong_type(key, "a string")
        return value

    def integer(self, key: str) -> int | None:
        """Return an integer, or None if it is missing."""
        value = self.values.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self._wrong_type(key, "an integer")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        """Return a truth value."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong_type(key, "a truth value")
        return value

    def strings(self, key: str) -> list[str]:
        """Return a list of strings, which must be there."""
        value = self.values.get(key)
        # Looking at one element is enough: a GGUF array has one element type.
        if not isinstance(value, list) or (value and not isinstance(value[0], str)):
            raise self._wrong_type(key, "a list of strings")
        return value  # type: ignore[return-value]  # the element type was checked above

    def integers(self, key: str) -> list[int]:
        """Return a list of integers, which must be there."""
        value = self.values.get(key)
        if not isinstance(value, list) or (value and not isinstance(value[0], int)):
            raise self._wrong_type(key, "a list of integers")
        return value  # type: ignore[return-value]  # the element type was checked above

    def _wrong_type(self, key: str, wanted: str) -> TokenizerLoadError:
        state = "missing" if key not in self.values else "of another type"
        return TokenizerLoadError(f"{self.path}: metadata {key!r} should be {wanted} but is {state}")


def read_gguf_metadata(path: Path) -> GGUFMetadata:
    """Read all metadata of the file; raises ``TokenizerLoadError`` where it is damaged or of an unknown version."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return GGUFMetadata(path, _read_pairs(path, data))
    except (OSError, struct.error, ValueError, IndexError) as e:
        raise TokenizerLoadError(f"{path} can't be read as GGUF: {e}") from e


def _read_pairs(path: Path, data: mmap.mmap) -> dict[str, Value]:
    if data[:4] != MAGIC:
        raise TokenizerLoadError(f"{path} is no GGUF file")
    (version,) = _u32(data, 4)
    if version not in VERSIONS:
        raise TokenizerLoadError(f"{path} has GGUF version {version}; versions 2 and 3 (little-endian) are supported")
    (pairs,) = _u64(data, 16)
    position = 24
    values: dict[str, Value] = {}
    for _ in range(pairs):
        key, position = _read_string(data, position)
        if key in values:
            raise ValueError(f"it has the key {key!r} twice")
        (kind,) = _u32(data, position)
        values[key], position = _read_value(data, position + 4, kind)
    return values


def _read_string(data: mmap.mmap, position: int) -> tuple[str, int]:
    start = position + 8
    end = start + _u64(data, position)[0]
    if end > len(data):
        raise ValueError("a string reaches beyond the end of the file")
    return data[start:end].decode(), end


def _read_value(data: mmap.mmap, position: int, kind: int) -> tuple[Value, int]:
    if kind == STRING:
        return _read_string(data, position)
    if kind == ARRAY:
        (element,) = _u32(data, position)
        (count,) = _u64(data, position + 4)
        return _read_array(data, position + 12, element, count)
    values, end = _read_array(data, position, kind, 1)
    return values[0], end


def _read_array(data: mmap.mmap, position: int, element: int, count: int) -> tuple[list[Scalar], int]:
    if element == STRING:
        strings: list[Scalar] = []
        for _ in range(count):
            text, position = _read_string(data, position)
            strings.append(text)
        return strings, position
    if element not in FIXED_TYPES:
        raise ValueError(f"value type {element} is unknown")
    values = struct.Struct(f"<{count}{FIXED_TYPES[element]}")
    return list(values.unpack_from(data, position)), position + values.size
