"""The steps of a tokenizer's decoder, for tokens that arrive one by one.

The ``tokenizers`` library decodes all tokens of a text at once. Here each step takes a token, returns what has become
certain, and keeps what a later token may change. Joined, the results are the library's text.

Steps before a fusing one take and return tokens. Steps after it see one long text, in pieces of any size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .byte_table import byte_level_bytes, byte_of_token
from .utf8_stream import PER_BYTE, PER_SEQUENCE, REPLACEMENT, decode_utf8


class DecodingStep(ABC):
    """The state of one step for one text."""

    @abstractmethod
    def feed(self, token: str) -> list[str]:
        """Take the next token, or piece of text; returns what became certain."""

    def end(self) -> list[str]:
        """Return what was kept back, once nothing follows."""
        return []


class EachToken(DecodingStep):
    """A change of each token that depends on nothing else."""

    def __init__(self, change: Callable[[str], str]) -> None:
        self._change = change

    def feed(self, token: str) -> list[str]:
        """Return the token as the constructor's function changes it; nothing is kept back."""
        return [self._change(token)]


class FirstToken(DecodingStep):
    """A change of each token, and another one of the text's first token."""

    def __init__(self, first: Callable[[str], str], other: Callable[[str], str]) -> None:
        self._change = first
        self._other = other

    def feed(self, token: str) -> list[str]:
        """Return the token, changed by ``first`` if it is the first one of the text, else by ``other``."""
        changed = self._change(token)
        self._change = self._other
        return [changed]


class DistinctTokens(DecodingStep):
    """A change of each token that differs from the one before it. Tokens that become empty are dropped."""

    def __init__(self, change: Callable[[str], str]) -> None:
        self._change = change
        self._last: str | None = None

    def feed(self, token: str) -> list[str]:
        """Return the token as ``change`` makes it, or nothing if it repeats the one before or becomes empty.

        Tokens are compared before they are changed. ``change`` is the constructor's argument.
        """
        if token == self._last:
            return []
        self._last = token
        changed = self._change(token)
        return [changed] if changed else []


class WordSuffixes(DecodingStep):
    """A suffix that ends a word: a space, and nothing in the text's last token. Returns pieces of tokens."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._kept = ""

    def feed(self, token: str) -> list[str]:
        """Return the kept text with spaces for suffixes, then the token up to its first suffix.

        The rest of the token is kept.
        """
        before = self._kept.replace(self._suffix, " ")
        head, found, rest = token.partition(self._suffix)
        self._kept = found + rest
        return [before + head]

    def end(self) -> list[str]:
        """Return the kept text without suffixes: nothing follows the last word."""
        return [self._kept.replace(self._suffix, "")]


class ByteRuns(DecodingStep):
    """Runs of tokens that stand for bytes. Returns characters.

    The library shows a run with one bad byte as U+FFFD alone, its characters included. They are shown here, as
    SentencePiece does, because they may have been sent before the bad byte came. Bytes that are incomplete at the end
    of the text are not shown.
    """

    def __init__(self) -> None:
        self._bytes = b""

    def feed(self, token: str) -> list[str]:
        """Return the characters that a byte token completes, or nothing. Any other token is returned itself.

        Incomplete bytes before another token become one U+FFFD each.
        """
        byte = byte_of_token(token)
        if byte is None:
            bad, self._bytes = len(self._bytes), b""
            return [REPLACEMENT * bad, token] if bad else [token]
        text, self._bytes = decode_utf8(self._bytes + byte, PER_BYTE)
        return [text] if text else []


class ByteLevelText(DecodingStep):
    """Tokens of characters that stand for bytes. Bytes that are incomplete at the end of the text are not shown."""

    def __init__(self) -> None:
        self._bytes = b""

    def feed(self, token: str) -> list[str]:
        """Return the characters that the token's bytes complete. Bytes of an incomplete character are kept."""
        text, self._bytes = decode_utf8(self._bytes + byte_level_bytes(token), PER_SEQUENCE)
        return [text]


class TextEnds(DecodingStep):
    """A text without some of a character at its start and its end."""

    def __init__(self, character: str, start: int, stop: int) -> None:
        self._character = character
        self._start = start
        self._stop = stop
        self._kept = ""

    def feed(self, token: str) -> list[str]:
        """Return the text without the first ``start`` of the character, or as many as it begins with.

        Up to ``stop`` of them at its end are kept back, and never shown if nothing follows.
        """
        while token and self._start:
            if token[0] != self._character:
                self._start = 0
                break
            token = token[1:]
            self._start -= 1
        text = self._kept + token
        keep = min(self._stop, len(text) - len(text.rstrip(self._character)))
        self._kept = text[len(text) - keep :]
        return [text[: len(text) - keep]]


class TextReplacement(DecodingStep):
    """A text with one string in place of another."""

    def __init__(self, old: str, new: str) -> None:
        self._old = old
        self._new = new
        self._kept = ""

    def feed(self, token: str) -> list[str]:
        """Return the text with its replacements. An end that may be part of ``old`` is kept back."""
        *parts, last = (self._kept + token).split(self._old)
        sizes = range(min(len(self._old) - 1, len(last)), 0, -1)
        keep = next((size for size in sizes if last.endswith(self._old[:size])), 0)
        self._kept = last[len(last) - keep :]
        return [self._new.join([*parts, last[: len(last) - keep]])]

    def end(self) -> list[str]:
        """Return the kept text unchanged, because it is only a part of ``old``."""
        return [self._kept]


class Contractions(NamedTuple):
    """Strings that are replaced one after another in a whole text.

    Each begins with a space. None of the replacements changes the last character, unless that is a space.
    """

    pairs: Sequence[tuple[str, str]]

    def apply(self, text: str) -> str:
        """Return ``text`` with all replacements."""
        for old, new in self.pairs:
            text = text.replace(old, new)
        return text

    @property
    def inner(self) -> str:
        """Return all characters after which one of the strings may go on."""
        return "".join(sorted({character for old, _ in self.pairs for character in old[:-1]}))


_BEFORE_ENGLISH = [(" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m")]
_ENGLISH_ENDINGS = [(" 's", "'s"), (" 've", "'ve"), (" 're", "'re")]
NO_CONTRACTIONS = Contractions([])
CLEANUP = Contractions([*_BEFORE_ENGLISH, *_ENGLISH_ENDINGS])
"""``clean_up_tokenization_spaces`` of a tokenizer_config.json, as transformers does it."""
WORD_PIECE_CLEANUP = Contractions([*_BEFORE_ENGLISH, (" do not", " don't"), *_ENGLISH_ENDINGS])
"""``cleanup`` of the decoders ``WordPiece`` and ``CTC``."""


class TextCleanup(DecodingStep):
    """A text with contractions.

    Keeps the text from the first space on that only such characters follow as may be within one of the strings.
    """

    def __init__(self, contractions: Contractions) -> None:
        self._contractions = contractions
        self._inner = contractions.inner
        self._kept = ""

    def feed(self, token: str) -> list[str]:
        """Return the text with contractions, up to a space that may begin another one."""
        text = self._kept + token
        open_from = text.find(" ", len(text.rstrip(self._inner)))
        certain = len(text) if open_from < 0 else open_from
        self._kept = text[certain:]
        return [self._contractions.apply(text[:certain])]

    def end(self) -> list[str]:
        """Return the kept text with contractions."""
        return [self._contractions.apply(self._kept)]


class WholeText(DecodingStep):
    """A step that needs all tokens: its text comes at the end."""

    def __init__(self, decode: Callable[[list[str]], str], *, is_fused: bool) -> None:
        self._decode = decode
        self._is_fused = is_fused
        self._tokens: list[str] = []

    def feed(self, token: str) -> list[str]:
        """Keep the token and return nothing: the text comes at the end."""
        self._tokens.append(token)
        return []

    def end(self) -> list[str]:
        """Return the text of all tokens, joined to one token first if the step is fused."""
        return [self._decode(["".join(self._tokens)] if self._is_fused else self._tokens)]
