"""The chunks of a streamed answer, without the fields that are not read here."""

from __future__ import annotations

from typing import Any

import msgspec


class ChoiceDelta(msgspec.Struct, frozen=True):
    """What is new of an answer's text, and of the reasoning before it."""

    content: str | None = None
    reasoning_content: str | None = None


class OtherFinish(msgspec.Struct, frozen=True):
    """How an answer ended where OpenAI's ``finish_reason`` has no word for it."""

    type: str


class ChunkChoice(msgspec.Struct, frozen=True):
    """``finish_reason`` is there once the answer has ended."""

    delta: ChoiceDelta = ChoiceDelta()
    finish_reason: str | None = None
    pdserve_finish: OtherFinish | None = None

    @property
    def ended_by(self) -> str | None:
        """Why the answer ended, in the server's own words where it has some; None where it has not."""
        return self.pdserve_finish.type if self.pdserve_finish is not None else self.finish_reason


class PromptDetails(msgspec.Struct, frozen=True):
    """``cached_tokens``: of the prompt, those that were not computed again."""

    cached_tokens: int | None = None


class TokenUsage(msgspec.Struct, frozen=True):
    """The server's own counts, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptDetails | None = None


class PhaseReport(msgspec.Struct, frozen=True):
    """Milliseconds that a request spent in a phase, and the instance that spent them."""

    phase: str
    at: str
    ms: float


class TimingReport(msgspec.Struct, frozen=True):
    """Where the time of an answer went (docs/http-api.md#timing)."""

    total_ms: float
    phases: list[PhaseReport]


class Chunk(msgspec.Struct, frozen=True):
    """One event of the stream. ``timing``: pdserve's; another server may mean something else by the name."""

    choices: list[ChunkChoice] = []
    usage: TokenUsage | None = None
    timing: Any = None
    error: Any = None

    @property
    def own_timing(self) -> TimingReport | None:
        """The ``timing`` of a pdserve server; None if there is none, or another server's."""
        try:
            return msgspec.convert(self.timing, TimingReport | None)
        except msgspec.ValidationError:
            return None

    @property
    def text(self) -> str:
        """Text that this chunk adds."""
        return "".join(choice.delta.content or "" for choice in self.choices)

    @property
    def reasoning(self) -> str:
        """New text of the reasoning before the answer."""
        return "".join(choice.delta.reasoning_content or "" for choice in self.choices)

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended; None where it has not."""
        return next((choice.ended_by for choice in self.choices if choice.ended_by), None)
