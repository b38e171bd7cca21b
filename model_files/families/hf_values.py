"""The values of a Hugging Face config.json by key, and which of them have been asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import whole
from ..spec import checked_layers


class HFValues:
    """Values of a config.json. Keys that were read are remembered, so that others can be refused.

    A missing key has the value in ``defaults``: those of the family in transformers. A null is not replaced. Methods
    raise ``KeyError``, ``TypeError`` or ``ValueError``.
    """

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.raw = {**(defaults or {}), **raw}
        self.read: set[str] = set()
        self.last_key = ""
        """Key that was asked for last, which an error is most likely about."""

    def get(self, key: str) -> Any:
        """Return the value of ``key``, None if it is missing, and mark the key as read."""
        self.read.add(key)
        self.last_key = key
        return self.raw.get(key)

    def integer(self, key: str) -> int:
        """Return the integer of ``key`` from the config, else from the family's defaults, and mark the key as read.

        Raises ``KeyError`` if both lack it. Raises ``TypeError`` or ``ValueError`` if the value is no whole number.
        """
        self.read.add(key)
        self.last_key = key
        return whole(self.raw[key])

    def number(self, key: str, default: float) -> float:
        """Return the value of ``key``, ``default`` if it is missing or null, and mark the key as read."""
        value = self.get(key)
        return default if value is None else float(value)

    def cap(self, key: str) -> float | None:
        """Return the soft cap of ``key``; None if it is missing, null or 0. Mark the key as read."""
        return self.number(key, 0.0) or None

    @property
    def family(self) -> str:
        """The config's ``model_type``."""
        return str(self.get("model_type"))

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return checked_layers("num_hidden_layers", self.integer("num_hidden_layers"))

    @property
    def heads(self) -> int:
        """Query heads of a layer."""
        return self.integer("num_attention_heads")

    @property
    def head_dim(self) -> int:
        """Return the number of elements of a head; by default ``hidden_size`` divided by the number of heads."""
        return whole(self.get("head_dim") or self.integer("hidden_size") // self.heads)
