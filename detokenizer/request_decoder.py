"""Turns one request's output tokens into text, piece by piece.

A decoder gives text only once it is certain. A character spread over several tokens comes out with the last of them.
Bytes that are no UTF-8 come out as U+FFFD, as soon as no later byte could complete them. Bytes that are still
incomplete when the request ends are never shown.

Joined, the pieces are the tokenizer's text of all output tokens after the prompt's tail. There are three kinds of
decoders. ``ByteDecoder`` looks bytes up, which is fastest. ``ChainDecoder`` takes each token through the steps of the
tokenizer's decoder. ``WindowDecoder`` is for tokenizers in Python, and is right for short contexts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from ..messages.base import I32
from ..model_files.text.byte_table import ByteTable
from ..model_files.text.decoding_chain import DecodingChain
from ..model_files.text.decoding_steps import CLEANUP, TextCleanup
from ..model_files.text.text_tokenizer import TextTokenizer
from ..model_files.text.utf8_stream import REPLACEMENT, decode_utf8

# UTF-8 needs at most four bytes for a character, so at most three can be incomplete.
MAX_INCOMPLETE = 3
# Windows are decoded again for each token: short is fast. Tokens further apart than this don't affect each other.
CONTEXT_TOKENS = 4
WINDOW_TOKENS = 8
# Tokens that read as U+FFFD themselves would otherwise hold a window open for ever.
MAX_WINDOW_TOKENS = 32
MAX_SHOWN_TABLES = 16
"""Tables of bytes that are kept, one for each set of special tokens to show."""


class RequestDecoder(ABC):
    """The decoding state of one request."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """Take more tokens, and return the text that became certain: often that of the tokens, sometimes ""."""

    def flush(self) -> str:
        """Return the text that waited for a later token, once none follows.

        By default no text waits, and this returns "".
        """
        return ""


class DecoderFactory(ABC):
    """Makes decoders for one tokenizer."""

    @abstractmethod
    def start(self, prompt_tail: I32, *, skip_special_tokens: bool, shown: tuple[str, ...] = ()) -> RequestDecoder:
        """Make a decoder for output that follows ``prompt_tail``, the prompt's last few token ids.

        ``shown``: special tokens that are not skipped, as text.
        """

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may be a part of a character. Special tokens have a text as well."""


def make_decoder_factory(tokenizer: TextTokenizer) -> DecoderFactory:
    """Return the fastest factory that is right for the tokenizer."""
    factory = _factory(tokenizer)
    return CleaningDecoders(factory) if tokenizer.cleans_up else factory


def _factory(tokenizer: TextTokenizer) -> DecoderFactory:
    if tokenizer.byte_table is not None:
        return ByteDecoders(tokenizer.byte_table)
    chain = tokenizer.decoding_chain
    return WindowDecoders(tokenizer) if chain is None else ChainDecoders(tokenizer, chain)


class ByteDecoders(DecoderFactory):
    """Decoders for tokenizers with a byte table."""

    def __init__(self, table: ByteTable) -> None:
        self._all = table.pieces
        self._without_special = [b"" if i in table.special_ids else piece for i, piece in enumerate(table.pieces)]
        self._table = table
        self._special_ids = table.special_ids
        self._with_shown: dict[tuple[str, ...], list[bytes]] = {(): self._without_special}

    def start(self, prompt_tail: I32, *, skip_special_tokens: bool, shown: tuple[str, ...] = ()) -> RequestDecoder:
        """Make a ``ByteDecoder`` and feed it the prompt's tail, where the output's first character may begin.

        Skipped special tokens have no bytes in it, apart from those in ``shown``.
        """
        pieces = self._pieces_with(shown) if skip_special_tokens else self._all
        decoder = ByteDecoder(pieces, self._table.strip_first_space, self._table.errors)
        decoder.decode(prompt_tail.tolist())
        return decoder

    def _pieces_with(self, shown: tuple[str, ...]) -> list[bytes]:
        """Return the table of each token's bytes, by its id.

        Special tokens have b"" there unless their text is in ``shown``. The table is kept for later calls with the same
        ``shown``, and must not be changed.
        """
        found = self._with_shown.get(shown)
        if found is None:
            # Another instance may send any texts: a table for each would have no end.
            if len(self._with_shown) >= MAX_SHOWN_TABLES:
                self._with_shown = {(): self._without_special}
            texts = {text.encode() for text in shown}
            found = self._with_shown[shown] = list(self._without_special)
            for i in self._special_ids:
                if i < len(found) and self._all[i] in texts:
                    found[i] = self._all[i]
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's entry of the byte table, special tokens included; b"" for ids beyond the table."""
        return self._all[token_id] if token_id < len(self._all) else b""


class ByteDecoder(RequestDecoder):
    """Looks bytes up and decodes them as UTF-8."""

    __slots__ = ("_errors", "_pending", "_pieces", "_strip_space")

    def __init__(self, pieces: list[bytes], strip_first_space: bool, errors: str) -> None:
        self._pieces = pieces
        self._errors = errors
        self._pending = b""
        self._strip_space = strip_first_space

    def decode(self, token_ids: Sequence[int]) -> str:
        """Join the tokens' bytes and return the text that is complete; an incomplete character waits for the next call.

        Ids beyond the table give no text. The text's first space is dropped if the byte table says so.
        """
        pieces = self._pieces
        # A model's output layer may be padded: ids beyond the vocabulary have no text.
        data = self._pending + b"".join([pieces[i] for i in token_ids if i < len(pieces)])
        text, self._pending = decode_utf8(data, self._errors)
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text


class ChainDecoders(DecoderFactory):
    """Decoders for tokenizers with known steps: each token passes through them."""

    def __init__(self, tokenizer: TextTokenizer, chain: DecodingChain) -> None:
        self._tokenizer = tokenizer
        self._chain = chain

    def start(self, prompt_tail: I32, *, skip_special_tokens: bool, shown: tuple[str, ...] = ()) -> RequestDecoder:
        """Make a ``ChainDecoder``, and feed it the prompt's tail if the steps give text token by token.

        If a step needs all tokens, the decoder begins without the prompt's tail.
        ``skip_special_tokens``: leave special tokens out of the text.
        ``shown``: texts of special tokens that are shown all the same.
        """
        decoder = ChainDecoder(self._chain, LeftOut(self._tokenizer, skip_special_tokens, shown))
        if self._chain.is_divided:
            decoder.decode(prompt_tail.tolist())
        return decoder

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's text in UTF-8, decoded by itself. Special tokens are included.

        A token that is a part of a character gives U+FFFD.
        """
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


class LeftOut:
    """The tokens that have no part in a request's text."""

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool, shown: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._shown = shown

    def __contains__(self, token_id: int) -> bool:
        if not self._tokenizer.is_left_out(token_id, skip_special_tokens=self._skip_special_tokens):
            return False
        return not self._shown or self._tokenizer.decode([token_id], skip_special_tokens=False) not in self._shown


class ChainDecoder(RequestDecoder):
    """Takes each token through the steps of a tokenizer's decoder."""

    __slots__ = ("_left_out", "_stream", "_token")

    def __init__(self, chain: DecodingChain, left_out: LeftOut) -> None:
        self._token = chain.token
        self._stream = chain.start()
        self._left_out = left_out

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text that the decoding steps release for these tokens, less the tokens that are left out."""
        tokens = [self._token(token_id) for token_id in token_ids if token_id not in self._left_out]
        return "".join([self._stream.feed(token or "") for token in tokens])

    def flush(self) -> str:
        """End the decoding steps and return the text that they held back, which may be all of it."""
        return self._stream.end()


class CleaningDecoders(DecoderFactory):
    """Decoders that clean up their text, as ``clean_up_tokenization_spaces`` asks for."""

    def __init__(self, factory: DecoderFactory) -> None:
        self._factory = factory

    def start(self, prompt_tail: I32, *, skip_special_tokens: bool, shown: tuple[str, ...] = ()) -> RequestDecoder:
        """Wrap a decoder of the inner factory, and clean up only the text of its output.

        The prompt's tail is context alone: the client already has the prompt as it is.
        """
        decoder = self._factory.start(prompt_tail, skip_special_tokens=skip_special_tokens, shown=shown)
        return CleaningDecoder(decoder)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's bytes as the inner factory does, without clean-up."""
        return self._factory.token_bytes(token_id)


class CleaningDecoder(RequestDecoder):
    """Cleans up the text of another decoder."""

    __slots__ = ("_cleanup", "_decoder")

    def __init__(self, decoder: RequestDecoder) -> None:
        self._decoder = decoder
        self._cleanup = TextCleanup(CLEANUP)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Clean up the new text of the inner decoder. A space at which a clean-up may begin is held back."""
        return "".join(self._cleanup.feed(self._decoder.decode(token_ids)))

    def flush(self) -> str:
        """Return the inner decoder's last text and the text held back here, both cleaned up."""
        return "".join([*self._cleanup.feed(self._decoder.flush()), *self._cleanup.end()])


class WindowDecoders(DecoderFactory):
    """Decoders for tokenizers in Python: the last few tokens are decoded again with each new one."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def start(self, prompt_tail: I32, *, skip_special_tokens: bool, shown: tuple[str, ...] = ()) -> RequestDecoder:
        """Make a ``WindowDecoder`` with the prompt's tail as its first context.

        Special tokens that are skipped and not ``shown`` are left out of its window.
        """
        left_out = LeftOut(self._tokenizer, skip_special_tokens, shown)
        # Special tokens that are left out are not decoded at all.
        read = partial(self._tokenizer.decode, skip_special_tokens=skip_special_tokens and not shown)
        return WindowDecoder(read, left_out, prompt_tail.tolist())

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's text in UTF-8, decoded by itself. Special tokens are included."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


class WindowDecoder(RequestDecoder):
    """Decodes a sliding window of tokens and gives what is new in its text.

    Tokens that the tokenizer leaves out never enter the window. A run of them would push out the text before it, and
    the next word would lose its space as if it began a text.

    Invariant: the first ``_shown`` characters of the window's text were given before, or belong to the prompt.
    """

    __slots__ = ("_left_out", "_read", "_shown", "_window")

    def __init__(self, read: Callable[[Sequence[int]], str], left_out: LeftOut, prompt_tail: list[int]) -> None:
        self._read = read
        self._left_out = left_out
        self._window = [token_id for token_id in prompt_tail if token_id not in left_out]
        self._shown = self._certain_length(self._text())

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode the window again with each token and return the new text. Holds back up to three U+FFFD at its end."""
        return "".join([self._decode_token(token_id) for token_id in token_ids])

    def _decode_token(self, token_id: int) -> str:
        if token_id in self._left_out:
            return ""
        self._window.append(token_id)
        text = self._text()
        end = self._certain_length(text)
        if len(self._window) > MAX_WINDOW_TOKENS:
            end = len(text)
        new = text[self._shown : end]
        self._shown = max(self._shown, end)
        if len(self._window) > WINDOW_TOKENS and self._shown == len(text):
            self._shorten(text)
        return new

    def _shorten(self, text: str) -> None:
        """Cut the window down to its last tokens, the context in which the next one is decoded.

        ``text``: the window's text. The window stays if the context reads as nothing, unless it has become too long.
        """
        context = self._window[-CONTEXT_TOKENS:]
        shown = len(self._read(context))
        # Behind a context that reads as nothing, the next token would be decoded as the first one of a text.
        if shown or not text or len(self._window) > MAX_WINDOW_TOKENS:
            self._window, self._shown = context, shown

    def _text(self) -> str:
        return self._read(self._window)

    @staticmethod
    def _certain_length(text: str) -> int:
        """Return the length of the text that is certain: a few U+FFFD at the end may be a character's first bytes."""
        incomplete = len(text) - len(text.rstrip(REPLACEMENT))
        return len(text) - min(incomplete, MAX_INCOMPLETE)
