"""The tokenizer process's answers to questions about text and tokens, which need no scheduler."""

from __future__ import annotations

from ..messages.question import TextAnswer
from ..messages.text import Decoded, DecodeReq, Encoded, EncodeReq, Limits, LimitsReq
from ..model_files.model_limits import ModelLimits
from ..model_files.text.errors import PromptError
from ..model_files.text.text_tokenizer import TextTokenizer
from .prompt_encoder import PromptEncoder

MAX_TOKENS = 1 << 16
"""Maximum number of tokens in one answer, or the model's context length where that is more and no strings are wanted.
"""


class _TokenTexts(dict[int, str]):
    """What each token reads, found when it is first asked for: a long text has few different tokens."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        table = tokenizer.byte_table
        self._pieces = table.pieces if table is not None else []

    def __missing__(self, token_id: int) -> str:
        if token_id < len(self._pieces):
            text = self._pieces[token_id].decode(errors="replace")
        else:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        self[token_id] = text
        return text


class TextQuestions:
    """Answers them; a question that can't be answered gets the reason."""

    def __init__(self, encoder: PromptEncoder, tokenizer: TextTokenizer, limits: ModelLimits) -> None:
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._limits = limits
        self._read = _TokenTexts(tokenizer)

    def answer(
        self, question: EncodeReq | DecodeReq | LimitsReq, rendered: str | PromptError | None = None
    ) -> TextAnswer:
        """Return the answer to one question. If it can't be answered, its field ``error`` says why.

        ``rendered``: the question's conversation as the chat template renders it, or why it is refused. None for texts.
        """
        if isinstance(question, LimitsReq):
            return Limits(self._limits.context_length, self._limits.vocab_size, id=question.id)
        if isinstance(question, DecodeReq):
            return self._decode(question)
        return self._encode(question, rendered)

    def _encode(self, question: EncodeReq, rendered: str | PromptError | None) -> Encoded:
        most = MAX_TOKENS if question.pieces else max(MAX_TOKENS, self._limits.context_length)
        try:
            if isinstance(rendered, PromptError):
                raise rendered
            token_ids = self._encoder.encode(question.texts, rendered, question.add_special_tokens, most)
        except PromptError as e:
            return Encoded(error=str(e), field=e.field, code=e.code, id=question.id)
        pieces = None
        if question.pieces:
            pieces = [[self._read[i] for i in ids] for ids in token_ids]
        text = rendered if question.returns_rendered else None
        return Encoded(token_ids, pieces, rendered=text, id=question.id)

    def _decode(self, question: DecodeReq) -> Decoded:
        vocab_size = self._limits.vocab_size
        highest = max((max(ids) for ids in question.token_ids if ids), default=0)
        if highest >= vocab_size:
            problem = f"token id {highest} is not in the model's vocabulary; ids go from 0 to {vocab_size - 1}"
            return Decoded(error=problem, id=question.id)
        skip = question.skip_special_tokens
        texts = [self._tokenizer.decode(ids, skip_special_tokens=skip) for ids in question.token_ids]
        return Decoded(texts, id=question.id)
