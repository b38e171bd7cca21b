"""Questions about text and tokens, which the tokenizer process answers by itself: HTTP → tokenizer → HTTP."""

from __future__ import annotations

from .base import Message
from .conversation import Conversation


class EncodeReq(Message):
    """Which tokens are these? Exactly one of ``texts`` and ``chat`` is set.

    ``add_special_tokens``: as ``TokenizeReq`` has it. ``pieces``: tell what each token reads, too.
    """

    id: int
    texts: list[str] | None = None
    chat: Conversation | None = None
    add_special_tokens: bool | None = None
    pieces: bool = False


class Encoded(Message):
    """The token ids of each text, or why there are none: ``error``, and the ``field`` at fault."""

    id: int
    token_ids: list[list[int]] = []
    pieces: list[list[str]] | None = None
    error: str | None = None
    field: str | None = None


class DecodeReq(Message):
    """What do these tokens read?"""

    id: int
    token_ids: list[list[int]]
    skip_special_tokens: bool = True


class Decoded(Message):
    """The texts, or why there are none."""

    id: int
    texts: list[str] = []
    error: str | None = None


class LimitsReq(Message):
    """What does the model take?"""

    id: int


class Limits(Message):
    """``context_length``: prompt plus output, in tokens. Token ids are in [0, ``vocab_size``)."""

    id: int
    context_length: int
    vocab_size: int


TextQuestion = EncodeReq | DecodeReq | LimitsReq
TextAnswer = Encoded | Decoded | Limits
