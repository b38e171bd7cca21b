"""Questions about text and tokens, which the tokenizer process answers itself: HTTP → tokenizer → HTTP."""

from __future__ import annotations

from .base import Message
from .conversation import Conversation


class EncodeReq(Message):
    """HTTP → tokenizer: tokenize these texts or this conversation. Exactly one of ``texts`` and ``chat`` is set."""

    id: int
    texts: list[str] | None = None
    chat: Conversation | None = None
    add_special_tokens: bool | None = None
    """Whether special tokens are added, as in ``TokenizeReq``."""
    pieces: bool = False
    """Whether the answer contains the text of each token."""


class Encoded(Message):
    """Tokenizer → HTTP: the token ids of each text, or an error."""

    id: int
    token_ids: list[list[int]] = []
    pieces: list[list[str]] | None = None
    error: str | None = None
    field: str | None = None
    """Name of the field that caused the error."""


class DecodeReq(Message):
    """HTTP → tokenizer: return the texts of these tokens."""

    id: int
    token_ids: list[list[int]]
    skip_special_tokens: bool = True


class Decoded(Message):
    """Tokenizer → HTTP: the texts, or an error."""

    id: int
    texts: list[str] = []
    error: str | None = None


class LimitsReq(Message):
    """HTTP → tokenizer: return the limits of the model."""

    id: int


class Limits(Message):
    """Tokenizer → HTTP: the limits of the model."""

    id: int
    context_length: int
    """Maximum number of tokens of prompt and output together."""
    vocab_size: int
    """Exclusive upper limit of token ids."""


TextQuestion = EncodeReq | DecodeReq | LimitsReq
TextAnswer = Encoded | Decoded | Limits
