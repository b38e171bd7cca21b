"""Adds the texts of tokens to logprobs and prompts that a client asked for: only this process has the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from ..messages.base import pack_i32, unpack_i32
from ..messages.outputs import NamedLogprob, PromptReport, PromptText, TokenLogprob
from .request_decoder import DecoderFactory


class LogprobNames:
    """Adds the texts of tokens by one tokenizer."""

    def __init__(self, factory: DecoderFactory) -> None:
        self._factory = factory

    def named(self, logprobs: Sequence[TokenLogprob], chars: Sequence[int]) -> list[NamedLogprob]:
        """Return ``logprobs`` with the bytes of each token and of its alternatives.

        ``chars[i]``: number of characters that the token of entry ``i`` completed.
        """
        read = self._factory.token_bytes
        return [
            NamedLogprob(e.token_id, e.logprob, read(e.token_id), n, [(i, p, read(i)) for i, p in e.top])
            for e, n in zip(logprobs, chars, strict=False)
        ]

    def prompt(self, report: PromptReport) -> PromptText:
        """Return the prompt's token ids, their text without special tokens, and its logprobs with the bytes of tokens.

        Text and ids are empty, or the logprobs None, unless the client asked for them. Logprobs may begin within the
        prompt.
        """
        ids = unpack_i32(report.token_ids).tolist()
        scored = [entry.token_id for entry in report.logprobs or ()]
        # Starting without context removes the space that a SentencePiece model puts before a text.
        decoder = self._factory.start(unpack_i32(pack_i32([])), skip_special_tokens=True)
        pieces = [decoder.decode([token_id]) for token_id in ids or scored]
        text = "".join([*pieces, decoder.flush()])
        if report.logprobs is None:
            return PromptText(text, ids, None, report.readout)
        chars = [len(piece) for piece in pieces[len(pieces) - len(scored) :]]
        return PromptText(text if ids else "", ids, self.named(report.logprobs, chars), report.readout)
