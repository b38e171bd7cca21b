"""The metadata of a GGUF file, by key and type."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..gguf_layout import BrokenGGUF, Value, mapped, read_metadata
from .errors import TokenizerLoadError


@dataclass(frozen=True)
class GGUFMetadata:
    """The key-value pairs of one file. Getters raise ``TokenizerLoadError`` for a value of another type."""

    path: Path
    values: dict[str, Value]

    def string(self, key: str) -> str | None:
        """Return the string of ``key``; None if it is missing."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong_type(key, "a string")
        return value

    def integer(self, key: str) -> int | None:
        """Return the integer of ``key``; None if it is missing."""
        value = self.values.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self._wrong_type(key, "an integer")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        """Return the truth value of ``key``, ``default`` if it is missing."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong_type(key, "a truth value")
        return value

    def strings(self, key: str) -> list[str]:
        """Return the list of strings of ``key``, which must be there."""
        value = self.values.get(key)
        # Looking at one element is enough: a GGUF array has one element type.
        if not isinstance(value, list) or (value and not isinstance(value[0], str)):
            raise self._wrong_type(key, "a list of strings")
        return value  # type: ignore[return-value]  # the element type was checked above

    def integers(self, key: str) -> list[int]:
        """Return the list of integers of ``key``, which must be there."""
        value = self.values.get(key)
        if not isinstance(value, list) or (value and not isinstance(value[0], int)):
            raise self._wrong_type(key, "a list of integers")
        return value  # type: ignore[return-value]  # the element type was checked above

    def floats(self, key: str) -> list[float]:
        """Return the list of floating-point numbers of ``key``, which must be there."""
        value = self.values.get(key)
        if not isinstance(value, list) or (value and not isinstance(value[0], float)):
            raise self._wrong_type(key, "a list of floats")
        return value  # type: ignore[return-value]  # the element type was checked above

    def _wrong_type(self, key: str, wanted: str) -> TokenizerLoadError:
        state = "missing" if key not in self.values else "of another type"
        return TokenizerLoadError(f"{self.path}: metadata {key!r} should be {wanted} but is {state}")


def read_gguf_metadata(path: Path, longest: int | None = None) -> GGUFMetadata:
    """Read the metadata of the file; raises ``TokenizerLoadError`` where it is damaged or of an unknown version.

    Arrays of more than ``longest`` elements, such as the vocabulary, are left empty. None: all are read.
    """
    try:
        with mapped(path) as data:
            return GGUFMetadata(path, read_metadata(data, longest).values)
    except BrokenGGUF as e:
        raise TokenizerLoadError(str(e)) from e
