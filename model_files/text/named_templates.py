"""The chat templates of one model, as its files name them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

DEFAULT, TOOL_USE = "default", "tool_use"


class NamedTemplates(msgspec.Struct, frozen=True):
    """Sources of the templates that conversations are rendered with."""

    default: str
    tool_use: str | None = None
    """Template for conversations with tools. None: ``default`` renders them, too."""
    origin: str = "the chat template"
    """File that the templates come from, for messages."""

    @property
    def with_tools(self) -> str:
        """Return the source that renders conversations with tools."""
        return self.default if self.tool_use is None else self.tool_use


def choose_templates(by_name: Mapping[str, str], origin: str) -> NamedTemplates | None:
    """Return the templates named "default" and "tool_use", as transformers chooses them; None without a default.

    ``origin``: the file that they come from, for messages.
    """
    if DEFAULT not in by_name:
        return None
    return NamedTemplates(by_name[DEFAULT], by_name.get(TOOL_USE), origin)
