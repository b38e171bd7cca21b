"""What can go wrong with text on its way to token ids. The message says what to do; a retry of the same never helps."""

from __future__ import annotations


class TextError(Exception):
    """Base of this folder's errors."""


class TokenizerLoadError(TextError):
    """The tokenizer, its chat template or the model's limits can't be read: the server can't start."""


class PromptError(TextError):
    """A client's prompt can't be served; ``field`` names the part of the request that is at fault.

    ``code`` is for programs, in OpenAI's words.
    """

    def __init__(self, field: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code
