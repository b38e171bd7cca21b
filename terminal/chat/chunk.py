"""What a streamed answer is made of. Fields that nobody here reads are left out."""

from __future__ import annotations

from typing import Any

import msgspec


class Delta(msgspec.Struct, frozen=True):
    """What is new of an answer's text."""

    content: str | None = None


class Choice(msgspec.Struct, frozen=True):
    """``finish_reason`` is there once the answer has ended."""

    delta: Delta = Delta()
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    """``cached_tokens``: of the prompt, those that were not computed again."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """The server's own counts, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct, frozen=True):
    """One event of the stream. ``timing``: milliseconds and bytes by the name of the phase (docs/http-api.md)."""

    choices: list[Choice] = []
    usage: Usage | None = None
    timing: dict[str, Any] | None = None
    error: Any = None

    @property
    def text(self) -> str:
        """What is new."""
        return "".join(choice.delta.content or "" for choice in self.choices)

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended; None where it has not."""
        return next((choice.finish_reason for choice in self.choices if choice.finish_reason), None)
