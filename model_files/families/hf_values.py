"""The values of a Hugging Face config.json by key, and which of them have been asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class HFValues:
    """What is asked for is remembered, so that what nobody asked for can be refused.

    A key that is not there has the value in ``defaults``: the family's, as transformers has them. One that is there
    with a null keeps it. Methods raise ``KeyError``, ``TypeError`` or ``ValueError``.
    """

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.raw = {**(defaults or {}), **raw}
        self.read: set[str] = set()

    def get(self, key: str) -> Any:
        """What ``key`` says; None where it isn't there."""
        self.read.add(key)
        return self.raw.get(key)

    def integer(self, key: str) -> int:
        """A key that must be there."""
        self.read.add(key)
        return int(self.raw[key])

    def number(self, key: str, default: float) -> float:
        """A key that may be missing or null."""
        value = self.get(key)
        return default if value is None else float(value)

    def cap(self, key: str) -> float | None:
        """A soft cap; null and 0 are none."""
        return self.number(key, 0.0) or None

    @property
    def family(self) -> str:
        """``model_type``."""
        return str(self.get("model_type"))

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return self.integer("num_hidden_layers")

    @property
    def heads(self) -> int:
        """Query heads of a layer."""
        return self.integer("num_attention_heads")

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return int(self.get("head_dim") or self.integer("hidden_size") // self.heads)
