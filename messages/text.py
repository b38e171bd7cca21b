"""Questions about text and tokens, which the tokenizer process answers itself: HTTP → tokenizer → HTTP."""

from __future__ import annotations

from .conversation import Conversation
from .question import TextAnswer, TextQuestion


class Encoded(TextAnswer):
    """Tokenizer → HTTP: the token ids of each text, or an error."""

    token_ids: list[list[int]] = []
    pieces: list[list[str]] | None = None
    error: str | None = None
    field: str | None = None
    """Name of the field that caused the error."""
    code: str | None = None
    """The error's code for programs, if it has one."""
    rendered: str | None = None
    """The conversation as the chat template renders it, if that was asked for."""


class EncodeReq(TextQuestion[Encoded]):
    """HTTP → tokenizer: tokenize these texts or this conversation. Exactly one of ``texts`` and ``chat`` is set."""

    texts: list[str] | None = None
    chat: Conversation | None = None
    add_special_tokens: bool | None = None
    """Whether special tokens are added, as in ``TokenizeReq``."""
    pieces: bool = False
    """Whether the answer contains the text of each token."""
    key_name: str = ""
    """Name of the API key that came with the question; "" without one."""
    returns_rendered: bool = False
    """Whether the answer contains the conversation as the chat template renders it."""


class Decoded(TextAnswer):
    """Tokenizer → HTTP: the texts, or an error."""

    texts: list[str] = []
    error: str | None = None


class DecodeReq(TextQuestion[Decoded]):
    """HTTP → tokenizer: return the texts of these tokens."""

    token_ids: list[list[int]]
    skip_special_tokens: bool = True


class Limits(TextAnswer):
    """Tokenizer → HTTP: the limits of the model."""

    context_length: int
    """Maximum number of tokens of prompt and output together."""
    vocab_size: int
    """Exclusive upper limit of token ids."""


class LimitsReq(TextQuestion[Limits]):
    """HTTP → tokenizer: return the limits of the model."""
