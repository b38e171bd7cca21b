"""Reads the ``decoder`` section of a tokenizer.json as steps that take one token at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from tokenizers import Tokenizer, decoders

from .byte_table import flatten_decoder
from .decoding_steps import (
    NO_CONTRACTIONS,
    WORD_PIECE_CLEANUP,
    ByteLevelText,
    ByteRuns,
    Contractions,
    DecodingStep,
    DistinctTokens,
    EachToken,
    FirstToken,
    TextCleanup,
    TextEnds,
    TextReplacement,
    WholeText,
    WordSuffixes,
)

Section = Mapping[str, Any]
StepMaker = Callable[[], DecodingStep]
FUSING = ("Fuse", "ByteLevel")
"""Decoders after which the library has one token, the whole text."""


class DecodingChain:
    """The decoder of one tokenizer, divided into steps."""

    def __init__(self, backend: Tokenizer, makers: Sequence[StepMaker], *, is_divided: bool = True) -> None:
        self._makers = makers
        self.token = backend.id_to_token
        """Returns the token with an id, or None."""
        self.is_divided = is_divided
        """Whether text comes before the last token. Otherwise a step needs all of them."""

    def start(self) -> TextStream:
        """Return a stream that decodes one new text, token by token."""
        return TextStream([make() for make in self._makers])

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of ``token_ids``, which are a whole text. Ids without a token count as empty ones."""
        stream = self.start()
        pieces = [stream.feed(self.token(token_id) or "") for token_id in token_ids]
        return "".join([*pieces, stream.end()])


class TextStream:
    """The text of tokens that arrive one by one."""

    def __init__(self, steps: Sequence[DecodingStep]) -> None:
        self._steps = steps

    def feed(self, token: str) -> str:
        """Take the next token; returns the text that became certain."""
        tokens = [token]
        for step in self._steps:
            tokens = [changed for token in tokens for changed in step.feed(token)]
        return "".join(tokens)

    def end(self) -> str:
        """Return the text that was kept back, once no token follows."""
        tokens: list[str] = []
        for step in self._steps:
            tokens = [changed for token in tokens for changed in step.feed(token)] + step.end()
        return "".join(tokens)


def make_decoding_chain(backend: Tokenizer) -> DecodingChain:
    """Divide the decoder of ``backend`` into steps.

    From the first step on that needs all tokens at once, the library decodes the whole text at its end.
    """
    if backend.decoder is None:
        return DecodingChain(backend, [partial(FirstToken, str, " {}".format)])
    sections = flatten_decoder(json.loads(backend.decoder.__getstate__()))
    makers: list[StepMaker] = []
    is_fused = False
    for i, section in enumerate(sections):
        found = _text_step(section) if is_fused else _token_step(section, sections[i + 1 :])
        if found is None:
            whole = partial(WholeText, _library_decoder(sections[i:]).decode, is_fused=is_fused)
            return DecodingChain(backend, [*makers, whole], is_divided=False)
        makers += found
        is_fused = is_fused or section["type"] in FUSING
    return DecodingChain(backend, makers)


def _token_step(section: Section, following: Sequence[Section]) -> list[StepMaker] | None:
    """Return makers of the step that changes single tokens as ``section`` says; None if it needs all of them at once.

    [] if the section changes no token. ``following``: the decoder's sections after this one.
    """
    takes_pieces = not following or following[0]["type"] == "Fuse"
    match section:
        case {"type": "Fuse"}:
            return []
        case {"type": "ByteLevel"}:
            return [ByteLevelText]
        case {"type": "ByteFallback"} if takes_pieces:
            return [ByteRuns]
        case {"type": "BPEDecoder", "suffix": suffix} if suffix and takes_pieces:
            return [partial(WordSuffixes, suffix)]
        case {"type": "Replace", "pattern": {"String": old}, "content": new} if old:
            return [partial(EachToken, partial(_replaced, old=old, new=new))]
        case {"type": "Replace"}:
            library = _library_decoder([section])
            return [partial(EachToken, lambda token: library.decode([token]))]
        case {"type": "Strip", "content": character, "start": start, "stop": stop}:
            return [partial(EachToken, partial(_stripped, character=character, start=start, stop=stop))]
        case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
            other = partial(_replaced, old=mark, new=" ")
            return [partial(FirstToken, other if scheme == "never" else partial(_replaced, old=mark, new=""), other)]
        case {"type": "WordPiece", "prefix": prefix, "cleanup": cleanup}:
            contractions = WORD_PIECE_CLEANUP if cleanup else NO_CONTRACTIONS
            other = partial(_continued, prefix=prefix, contractions=contractions)
            return [partial(FirstToken, contractions.apply, other)]
        case {"type": "CTC", "pad_token": pad, "word_delimiter_token": delimiter, "cleanup": cleanup}:
            return [partial(DistinctTokens, partial(_without_pads, pad=pad, delimiter=delimiter if cleanup else None))]
    return None


def _text_step(section: Section) -> list[StepMaker] | None:
    """Return makers of the step that changes a text as ``section`` says, after tokens were joined to one.

    None if it needs the whole text at once; [] if the section changes nothing.
    """
    match section:
        case {"type": "Fuse"}:
            return []
        case {"type": "Replace", "pattern": {"String": old}, "content": new} if old:
            return [partial(TextReplacement, old, new)]
        case {"type": "Strip", "content": character, "start": start, "stop": stop}:
            return [partial(TextEnds, character, start, stop)]
        case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
            return [partial(TextReplacement, mark, " " if scheme == "never" else "")]
        case {"type": "BPEDecoder", "suffix": suffix} if suffix:
            return [partial(TextReplacement, suffix, "")]
        case {"type": "WordPiece", "cleanup": cleanup}:
            return [partial(TextCleanup, WORD_PIECE_CLEANUP)] if cleanup else []
    return None


def _library_decoder(sections: Sequence[Section]) -> decoders.Decoder:
    """Return the library's own decoder of ``sections``."""
    decoder = decoders.Fuse()
    decoder.__setstate__(json.dumps({"type": "Sequence", "decoders": list(sections)}).encode())
    return decoder


def _replaced(token: str, old: str, new: str) -> str:
    return token.replace(old, new)


def _stripped(token: str, character: str, start: int, stop: int) -> str:
    """Strip up to ``start`` of a character from the front of ``token`` and up to ``stop`` from its end.

    The library panics for tokens that are shorter.
    """
    token = token[min(start, len(token) - len(token.lstrip(character))) :]
    return token[: len(token) - min(stop, len(token) - len(token.rstrip(character)))]


def _continued(token: str, prefix: str, contractions: Contractions) -> str:
    """Return the text of a word piece that is not the first: without ``prefix``, or after a space if it lacks that."""
    return contractions.apply(token.removeprefix(prefix) if token.startswith(prefix) else f" {token}")


def _without_pads(token: str, pad: str, delimiter: str | None) -> str:
    text = token.replace(pad, "")
    return text if delimiter is None else WORD_PIECE_CLEANUP.apply(text).replace(delimiter, " ")
