"""Conversations of requests, rendered at once, in the place of the tokenizer process's thread."""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.messages.base import Message
from pdserve.messages.requests import TokenizeReq
from pdserve.model_files.text.errors import PromptError
from pdserve.server.request_tokenizer import RequestTokenizer


def rendered(tokenizer: RequestTokenizer, messages: Iterable[Message]) -> dict[str, str | PromptError]:
    """Return what ``tokenizer`` renders of the requests with conversations, by rid."""
    chats = [m for m in messages if isinstance(m, TokenizeReq) and m.chat is not None]
    return {req.rid: tokenizer.render(req) for req in chats}
