"""Sampling values of a model's makers, for what a request leaves out: its ``generation_config.json``.

Without that file, they are read from ``config.json``, as transformers does.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from .errors import ModelError
from .json_file import read_optional_object
from .model_path import ModelSource

ADVICE = "put it right, or start with --sampling-defaults none"
FILE, OLDER_FILE = "generation_config.json", "config.json"


class SamplingDefaults(NamedTuple):
    """None: the API's own default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def given(self) -> dict[str, float | int]:
        """Return the defaults that the model's files give, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


NO_DEFAULTS = SamplingDefaults()


def read_sampling_defaults(source: ModelSource) -> SamplingDefaults:
    """Read the defaults in the model's files; none for a GGUF, which has no such file.

    A top_k of -1, and a 0 where values must be above 0, count as not given. Raises ``ModelError`` for any other value
    that a request could not have.
    """
    if source.kind == "gguf":
        return NO_DEFAULTS
    file = source.path / (FILE if (source.path / FILE).is_file() else OLDER_FILE)
    config = _read(file)

    def number(name: str, least: float, most: float) -> float | None:
        value = config.get(name)
        if value is None or (isinstance(value, int | float) and value == 0 and least > 0):
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise ModelError(f"{file}: {name} is {_shown(value)}; {ADVICE}")
        return value

    top_k = None if config.get("top_k") == -1 else number("top_k", 1, 2**31 - 1)
    if top_k is not None and top_k % 1:
        raise ModelError(f"{file}: top_k is {top_k}, which is no whole number; {ADVICE}")
    return SamplingDefaults(
        temperature=number("temperature", 0, 100),
        top_p=number("top_p", math.ulp(0.0), 1),
        top_k=None if top_k is None else int(top_k),
        min_p=number("min_p", 0, 1),
        repetition_penalty=number("repetition_penalty", 0.01, 2),
    )


def _read(file: Path) -> dict[str, Any]:
    config = read_optional_object(file, ModelError)
    # Of models for more than texts, config.json may have the values in the part for texts.
    inner = config.get("text_config")
    stated = {name: value for name, value in config.items() if value is not None}
    return (inner if isinstance(inner, dict) else {}) | stated


def _shown(value: Any) -> str:
    return str(value)[:40]
