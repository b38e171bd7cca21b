"""Reads the JSON files that come with a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from .errors import brief

BROKEN_JSON = (OSError, RecursionError, UnicodeDecodeError, msgspec.MsgspecError)
"""What reading a damaged JSON file may raise."""


def read_json_object(file: Path, error: type[Exception]) -> dict[str, Any]:
    """Read the JSON object in ``file``; raises ``error``, with the file's name."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except BROKEN_JSON as e:
        raise error(f"{file} can't be read: {brief(e)}; correct it, or download it again") from e


def read_optional_object(file: Path, error: type[Exception]) -> dict[str, Any]:
    """Read the JSON object in ``file``, {} if there is no such file; raises ``error``, with the file's name."""
    return read_json_object(file, error) if file.is_file() else {}
