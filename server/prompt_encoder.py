"""From a client's text or conversation to token ids, as long as that can fit the model's context.

A text that can't is refused before all of it is encoded: that would hold up everyone else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..messages.conversation import Conversation
from ..messages.packed_text import Text, unpack
from ..model_files.model_limits import ModelLimits
from ..model_files.text.errors import PromptError
from ..model_files.text.text_tokenizer import TextTokenizer

# Hardly any text has this many characters in each of its tokens.
PROBE_CHARACTERS_PER_TOKEN = 16
PIECE_CHARACTERS = 1 << 16
"""Characters that are encoded at a time while the tokens of a long text are counted."""
TOO_LONG = "context_length_exceeded"
THE_LIMIT = "this model's maximum context length is"
"""OpenAI's words: clients that know no code, litellm and what stands on it, look for them."""


class RendersChats(Protocol):
    """A model's chat template."""

    def render(self, chat: Conversation) -> str:
        """Return the conversation as text for the model to continue.

        Raises ``PromptError`` if the template refuses it.
        """


class MissingTemplate:
    """Stands for the chat template of a model that has none."""

    def render(self, chat: Conversation) -> str:
        """Raise ``PromptError``: without a chat template, conversations can't be rendered."""
        raise PromptError(
            "messages",
            "this model has no chat template; start the server with --chat-template FILE, "
            "or send the finished prompt as text",
        )


class PromptEncoder:
    """Renders, checks and encodes prompts; raises ``PromptError`` where one can't be served."""

    def __init__(self, tokenizer: TextTokenizer, template: RendersChats, limits: ModelLimits) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._context_length = limits.context_length
        self._max_text_bytes = limits.context_length * tokenizer.max_token_bytes

    def encode(
        self,
        texts: Sequence[str] | None,
        rendered: str | None,
        add_special_tokens: bool | None,
        max_tokens: int,
    ) -> list[list[int]]:
        """Return the token ids of each of ``texts``, or of one ``rendered`` conversation, which ``chat_text`` returned.

        ``add_special_tokens``: None adds them to texts only. Raises ``PromptError`` for a text that can't fit the
        context, and for more than ``max_tokens`` tokens in all.
        """
        field = "text" if rendered is None else "messages"
        checked = [rendered] if rendered is not None else [self.checked(field, text) for text in texts or ()]
        if add_special_tokens is None:
            add_special_tokens = rendered is None
        code = None if rendered is None else TOO_LONG
        too_many = PromptError(field, f"{field} has more than {max_tokens} tokens in all; ask in parts", code)
        encoded: list[list[int]] = []
        left = max_tokens
        for text in checked:
            if self._is_hopeless(text, left):
                raise too_many
            [token_ids] = self.encode_batch([text], add_special_tokens)
            left -= len(token_ids)
            if left < 0:
                raise too_many
            encoded.append(token_ids)
        return encoded

    def _is_hopeless(self, text: str, most: int) -> bool:
        """Return whether a long text has more than twice ``most`` tokens. Stops to encode as soon as that is known.

        The factor of two allows for words that are cut: they may encode differently than in the whole text. False for a
        short text, without encoding it.
        """
        if len(text) <= PIECE_CHARACTERS:
            return False
        tokens = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            [token_ids] = self._tokenizer.encode_batch(
                [text[start : start + PIECE_CHARACTERS]], add_special_tokens=False
            )
            tokens += len(token_ids)
            if tokens > 2 * most:
                return True
        return False

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of each text, encoded as one batch.

        ``texts`` have passed ``checked`` or ``chat_text``.
        """
        return self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens) if texts else []

    def chat_text(self, chat: Conversation) -> str:
        """Return the conversation as the model's chat template renders it.

        Raises ``PromptError`` if the template refuses it, or if it can't fit the context.
        """
        field = "messages"
        self._check_size(field, sum(message.content_size for message in chat.messages))
        return self.checked(field, self._template.render(chat))

    def checked(self, field: str, sent: Text) -> str:
        """Return the text that the client ``sent``, unpacked. Raises ``PromptError`` if it can't fit the context.

        ``field``: name of the request's field, for the error. Not all of the text is encoded, so it may still be too
        long. Half a surrogate pair is an error, too.
        """
        self._check_size(field, len(sent))
        text = unpack(sent)
        self._check_size(field, _byte_size(field, text))
        self._check_beginning(field, text)
        return text

    def beginning(self, field: str, sent: Text) -> str:
        """Return the text that the client ``sent``, unpacked, or a beginning of it with tokens for the whole context.

        ``field``: name of the request's field, for the error. Raises ``PromptError`` for half a surrogate pair.
        """
        text = unpack(sent)[: self._max_text_bytes]
        _byte_size(field, text)
        try:
            self._check_beginning(field, text)
        except PromptError:
            return text[: PROBE_CHARACTERS_PER_TOKEN * self._context_length]
        return text

    def _check_size(self, field: str, size: int) -> None:
        """Raise ``PromptError`` if ``size`` is more bytes than the context's tokens can have.

        ``size`` may also count characters, which are at most as many as bytes.
        """
        if size > self._max_text_bytes:
            raise PromptError(
                field,
                f"{field} has at least {size} bytes, but {THE_LIMIT} {self._context_length} tokens; shorten it",
                TOO_LONG,
            )

    def _check_beginning(self, field: str, text: str) -> None:
        """Raise ``PromptError`` if a long text's beginning alone has more than twice the context's tokens.

        A word that is cut may encode differently than in the whole text, hence the factor of two.
        """
        beginning = PROBE_CHARACTERS_PER_TOKEN * self._context_length
        if len(text) <= beginning:
            return
        [token_ids] = self._tokenizer.encode_batch([text[:beginning]], add_special_tokens=False)
        if len(token_ids) > 2 * self._context_length:
            raise PromptError(
                field,
                f"the first {beginning} characters of {field} have {len(token_ids)} tokens, but {THE_LIMIT} "
                f"{self._context_length} tokens; shorten it",
                TOO_LONG,
            )


def _byte_size(field: str, text: str) -> int:
    """Return the length of a text in UTF-8, in bytes. Raises ``PromptError`` that names ``field`` if it has none."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as e:
        raise PromptError(
            field,
            f"{field} has half of a surrogate pair at character {e.start}; "
            "write characters beyond U+FFFF as UTF-8, or escape both halves",
        ) from e
