"""What the events of a streamed answer say: new tokens, the server's counts, errors. One reader for each request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import orjson

from .errors import RequestError

DONE = b"[DONE]"
MAX_SHOWN = 200


class AnswerReader(ABC):
    """Counts are the server's own where it gives them; ``completion_tokens`` is None where it never did."""

    ends_with_done = True
    """Whether a stream without ``[DONE]`` at its end has broken off."""

    def __init__(self) -> None:
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None

    @abstractmethod
    def read(self, event: bytes) -> int:
        """Return the number of new tokens that this event carries, and note the counts in it.

        Raises ``RequestError``.
        """

    def finish(self) -> None:
        """Check the answer at the end of the stream. Raises ``RequestError`` if it is incomplete or failed.

        Only after this are all counts set.
        """
        return


def load_event(event: bytes) -> dict[str, Any]:
    """Parse the JSON object of an event.

    Raises ``RequestError`` for anything else, and for an event that reports an error.
    """
    try:
        content = orjson.loads(event)
    except orjson.JSONDecodeError:
        content = None
    if not isinstance(content, dict):
        raise RequestError(f"an event that is no JSON object: {event[:MAX_SHOWN].decode(errors='replace')}")
    if error := content.get("error"):
        raise RequestError(f"error in the stream: {error.get('message', error) if isinstance(error, dict) else error}")
    return content


class GenerateReader(AnswerReader):
    """``/generate``: each event holds everything so far and its ``completion_tokens``."""

    _COUNT = b'"completion_tokens":'

    def __init__(self) -> None:
        super().__init__()
        self._tokens = 0
        self._last = b""

    def read(self, event: bytes) -> int:
        # Parsing every event in full would cost the square of the answer's length. Quotes within the text are escaped,
        # so what is found here is the key and nothing else.
        self._last = event
        at = event.rfind(self._COUNT)
        if at < 0:
            load_event(event)
            return 0
        begin = at + len(self._COUNT)
        digits = event[begin : begin + 12].lstrip()
        tokens = int(digits[: len(digits) - len(digits.lstrip(b"0123456789"))])
        new, self._tokens = tokens - self._tokens, tokens
        return new

    def finish(self) -> None:
        if not self._last:
            return
        meta = load_event(self._last).get("meta_info") or {}
        self.prompt_tokens, self.completion_tokens = meta.get("prompt_tokens"), meta.get("completion_tokens")
        self.cached_tokens = meta.get("cached_tokens")
        ended = meta.get("finish_reason") or {}
        if ended.get("type") not in ("stop", "length"):
            raise RequestError(f"the answer ended by {ended.get('type')}: {ended.get('message', 'no reason given')}")


class CompletionReader(AnswerReader):
    """``/v1/completions``: each event with choices counts as one token, unless the server reports usage in it.

    ``counts_empty`` says whether a last event without text carries a token. In vLLM it does: its text is empty if the
    token ends no character. Others only send the finish reason.
    """

    def __init__(self, counts_empty: bool) -> None:
        super().__init__()
        self._counts_empty = counts_empty
        self._tokens = 0
        self._is_finished = False

    def read(self, event: bytes) -> int:
        content = load_event(event)
        usage, choices = content.get("usage"), content.get("choices")
        if usage:
            self._take_usage(usage)
        if not choices:
            return 0
        choice = choices[0]
        ended = choice.get("finish_reason")
        self._is_finished |= ended is not None
        if ended is not None and not choice.get("text") and not self._counts_empty:
            return 0
        before = self._tokens
        self._tokens = max(before + 1, (usage or {}).get("completion_tokens", 0))
        return self._tokens - before

    def finish(self) -> None:
        if not self._is_finished:
            raise RequestError("the stream ended without a finish reason")

    def _take_usage(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens, self.completion_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details") or {}
        self.cached_tokens = details.get("cached_tokens")


class LlamaCppReader(AnswerReader):
    """llama-server's ``/completion``: events with the number of tokens so far, and a last one without a token."""

    ends_with_done = False

    def __init__(self) -> None:
        super().__init__()
        self._tokens = 0
        self._is_finished = False

    def read(self, event: bytes) -> int:
        content = load_event(event)
        before = self._tokens
        if content.get("stop"):
            self._is_finished = True
            self.prompt_tokens, self.completion_tokens = (
                content.get("tokens_evaluated"),
                content.get("tokens_predicted"),
            )
            self.cached_tokens = (content.get("timings") or {}).get("cache_n")
            # Only a held-back piece of text can come with the end; without one, the token was in the event before.
            self._tokens = max(before, self.completion_tokens or 0) if content.get("content") else before
        else:
            self._tokens = content.get("tokens_predicted") or before + 1
        return self._tokens - before

    def finish(self) -> None:
        if not self._is_finished:
            raise RequestError("the stream ended without its last event")
