"""The options of ``pdserve chat``, declared once; the command line and YAML files read them here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ..access import AccessError, check_server_url

MAX_TEMPERATURE = 100
"""What the server takes."""


class ChatOptionsError(ValueError):
    """An option that can't work; the message says what to write instead."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options of ``pdserve chat``.

    Parameters
    ----------
    url
        Where the server or router listens.
    model
        Name of the model to ask for; default: the first that the server lists.
    system
        What the model is told before the conversation.
    max_tokens
        Most tokens of an answer; default: until the context is full.
    temperature
        0 takes the likeliest token, more is livelier; default: the server's own.
    api_key_file
        File with the server's API key. Of several keys, the first.
    """

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    api_key_file: Path | None = None

    def check(self) -> None:
        """Raise ``ChatOptionsError`` for a value that is out of range, or a URL that is none."""
        try:
            check_server_url(self.url)
        except AccessError as e:
            raise ChatOptionsError(str(e)) from None
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ChatOptionsError(f"--max-tokens is {self.max_tokens}: it must be 1 or more")
        temperature = self.temperature
        if temperature is not None and not (math.isfinite(temperature) and 0 <= temperature <= MAX_TEMPERATURE):
            raise ChatOptionsError(f"--temperature is {temperature:g}: it must be 0 to {MAX_TEMPERATURE}")
