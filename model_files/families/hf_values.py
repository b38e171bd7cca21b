"""The values of a Hugging Face config.json by key, and which of them have been asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedModel, positive, real, unusable, whole
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

    def flag(self, key: str, *, nullable: bool = False) -> bool:
        """Return the truth value of ``key``, False if it is missing, and mark the key as read.

        ``nullable``: a null is False, as in the family's class in transformers. Raises ``UnsupportedModel`` for other
        values, and for a null otherwise.
        """
        self.get(key)
        value = self.raw.get(key, False)
        if isinstance(value, bool) or (value is None and nullable):
            return bool(value)
        raise unusable(key, value, "it must be true or false")

    def integer(self, key: str, *, least: int | None = None) -> int:
        """Return the integer of ``key`` from the config, else from the family's defaults, and mark the key as read.

        Raises ``KeyError`` if both lack it. Raises ``TypeError`` or ``ValueError`` if the value is no whole number.
        Raises ``UnsupportedModel`` if it is below ``least``.
        """
        self.read.add(key)
        self.last_key = key
        value = whole(self.raw[key])
        if least is not None and value < least:
            raise UnsupportedModel(f"{key} {value} is not supported: it must be {least} at least")
        return value

    def number(self, key: str, default: float) -> float:
        """Return the value of ``key``, ``default`` if it is missing, and mark the key as read.

        Raises ``UnsupportedModel`` for a null, as transformers' classes do, and for what is no number.
        """
        self.get(key)
        return real(key, self.raw.get(key, default))

    def positive(self, key: str, default: float) -> float:
        """Return the finite value above 0 of ``key``, ``default`` if it is missing, and mark the key as read.

        Raises ``UnsupportedModel`` for a value out of bounds.
        """
        return positive(key, self.number(key, default))

    def sequence(self, key: str) -> list[Any]:
        """Return the list of ``key``, an empty one if it is missing or null, and mark the key as read.

        Raises ``UnsupportedModel`` for what is no list.
        """
        value = self.get(key)
        if not isinstance(value, list | tuple | None):
            raise unusable(key, value, "it must be a list")
        return list(value or ())

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
