"""Checks requests and turns their prompts into token ids, and answers questions about text.

What is checked here is what needs the tokenizer or the model's limits; the HTTP process checks the rest. A request that
fails is answered with 400 and changes nothing for those that arrived with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import msgspec

from ..messages.base import pack_i32
from ..messages.grammar import Grammar
from ..messages.outputs import ReqError
from ..messages.requests import GenerateReq, TokenizeReq
from ..messages.sampling import SamplingParams, begins_open
from ..messages.text import EncodeReq
from ..model_files.grammar.errors import GrammarError
from ..model_files.model_limits import ModelLimits
from ..model_files.text.errors import PromptError
from ..model_files.text.text_tokenizer import TextTokenizer
from ..scheduler.options import DEFAULT_MAX_LOGPROBS
from .logprob_budget import UNLIMITED, fit_logprobs
from .prompt_encoder import THE_LIMIT, TOO_LONG, PromptEncoder, RendersChats
from .text_questions import TextQuestions

BAD_REQUEST = 400
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096
NOTHING_RENDERED: Mapping[str, str | PromptError] = MappingProxyType({})


class ChecksGrammars(Protocol):
    """Checks grammars; ``LimitedCheck`` is one."""

    def check(self, grammar: Grammar) -> None:
        """Raise ``GrammarError`` if ``grammar`` cannot be used to restrict an output."""


class NoGrammars:
    """Refuses all grammars. ``reason``: why."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def check(self, grammar: Grammar) -> None:
        """Raise ``GrammarError`` with the reason, whatever the grammar."""
        raise GrammarError(self._reason)


NO_GRAMMARS = NoGrammars("structured output is off on this server (--grammar-backend none)")


class RequestTokenizer:
    """Turns ``TokenizeReq`` into ``GenerateReq``. ``questions`` answers those that concern no request."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: RendersChats,
        limits: ModelLimits,
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
        grammars: ChecksGrammars = NO_GRAMMARS,
    ) -> None:
        self._encoder = PromptEncoder(tokenizer, template, limits)
        self.questions = TextQuestions(self._encoder, tokenizer, limits)
        self._limits = limits
        self._max_logprobs = max_logprobs
        self._grammars = grammars
        # A tokenizer may know ids that the model has no weights for; ending on one would never happen.
        self._eos_ids = tuple(i for i in tokenizer.eos_ids if i < limits.vocab_size)

    def render(self, req: TokenizeReq | EncodeReq) -> str | PromptError:
        """Return a request's conversation as the chat template renders it; "" for a request without one.

        Return the error, and do not raise it, if the request is refused. The sampling parameters of a ``TokenizeReq``
        are checked, too. May run on another thread than ``tokenize``.
        """
        try:
            if isinstance(req, TokenizeReq):
                self._check_sampling(req.sampling)
                self._check_one_prompt(req)
            return "" if req.chat is None else self._encoder.chat_text(req.chat)
        except PromptError as e:
            return e

    def check_grammar(self, req: TokenizeReq) -> PromptError | None:
        """Return why the grammar of a request is refused; None if it can be used. The request must have one.

        May run on another thread than ``tokenize`` and ``render``.
        """
        grammar = req.sampling.grammar
        assert grammar is not None, "only a grammar is checked"
        try:
            self._grammars.check(grammar)
        except GrammarError as e:
            return PromptError(grammar.field, f"{grammar.field} can't be used: {e}")
        return None

    def tokenize(
        self, reqs: Sequence[TokenizeReq], rendered: Mapping[str, str | PromptError] = NOTHING_RENDERED
    ) -> list[GenerateReq | ReqError]:
        """Check requests and encode their prompts.

        Return for each, in order, a ``GenerateReq``, or an error if it is refused. ``rendered``: what ``render``
        returned for each request with a conversation, by rid. Texts are encoded as one batch for those with special
        tokens, and one for those without.
        """
        results: list[GenerateReq | ReqError | None] = [None] * len(reqs)
        prompts: dict[int, list[int]] = {}
        texts: dict[bool, list[tuple[int, str]]] = {False: [], True: []}  # by: add special tokens?
        for i, req in enumerate(reqs):
            try:
                self._check_sampling(req.sampling)
                self._check_one_prompt(req)
                if isinstance(refusal := rendered.get(req.rid), PromptError):
                    raise refusal
                if req.input_ids is not None:
                    prompts[i] = req.input_ids
                else:
                    add_special_tokens = req.add_special_tokens
                    if add_special_tokens is None:
                        # A chat template prints the special tokens itself.
                        add_special_tokens = req.chat is None
                    texts[add_special_tokens].append((i, self._text(req, rendered)))
            except PromptError as e:
                results[i] = _refuse(req, e)
        for add_special_tokens, entries in texts.items():
            encoded = self._encoder.encode_batch([text for _, text in entries], add_special_tokens)
            prompts |= dict(zip((i for i, _ in entries), encoded, strict=True))
        for i, token_ids in prompts.items():
            try:
                text = rendered.get(reqs[i].rid)
                results[i] = self._generate_req(reqs[i], token_ids, text if isinstance(text, str) else "")
            except PromptError as e:
                results[i] = _refuse(reqs[i], e)
        return [result for result in results if result is not None]

    def _check_sampling(self, sampling: SamplingParams) -> None:
        for token_id in sampling.stop_token_ids:
            self._check_id("stop_token_ids", token_id)
        for token_id in sampling.logit_bias:
            self._check_id("logit_bias", token_id)
        if len(sampling.stop) > MAX_STOP_STRINGS:
            raise PromptError(
                "stop", f"{len(sampling.stop)} stop strings are too many; give at most {MAX_STOP_STRINGS}"
            )
        for stop in sampling.stop:
            if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
                raise PromptError(
                    "stop", f"a stop string must have 1 to {MAX_STOP_CHARACTERS} characters, not {len(stop)}"
                )

    def _check_id(self, field: str, token_id: int) -> None:
        if not 0 <= token_id < self._limits.vocab_size:
            last = self._limits.vocab_size - 1
            raise PromptError(field, f"token id {token_id} is not in the model's vocabulary; ids go from 0 to {last}")

    @staticmethod
    def _check_one_prompt(req: TokenizeReq) -> None:
        messages = None if req.chat is None else req.chat.messages
        prompts = {"text": req.text, "input_ids": req.input_ids, "messages": messages}
        given = {name: prompt for name, prompt in prompts.items() if prompt is not None}
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise PromptError(next(iter(given), "text"), f"give exactly one of {', '.join(prompts)}; found: {found}")
        for name, prompt in given.items():
            if not prompt:
                raise PromptError(name, f"{name} is empty; give the model at least one token to continue")

    def _text(self, req: TokenizeReq, rendered: Mapping[str, str | PromptError]) -> str:
        """Return the text to encode: the prompt itself after a check of its size, or the rendered conversation."""
        if req.chat is not None:
            text = rendered[req.rid]
            assert isinstance(text, str), "refusals are raised before"
            return text
        read = self._encoder.beginning if req.readout.truncate else self._encoder.checked
        return read("text", req.text or "")

    def _generate_req(self, req: TokenizeReq, token_ids: list[int], rendered_text: str) -> GenerateReq:
        field = "text" if req.text is not None else "messages" if req.chat is not None else "input_ids"
        if not token_ids:
            raise PromptError(field, f"{field} gives no tokens; give the model at least one token to continue")
        if req.readout.truncate:
            token_ids = self._cut(token_ids)
        room = self._limits.context_length - len(token_ids)
        if room < 1:
            raise PromptError(
                field,
                f"the prompt has {len(token_ids)} tokens, but {THE_LIMIT} {self._limits.context_length} tokens, which "
                f"prompt and output share; shorten the prompt",
                TOO_LONG,
            )
        for label in req.readout.labels:
            self._check_id("label_token_ids", label)
        self._check_id(field, min(token_ids))
        self._check_id(field, max(token_ids))
        eos_ids = () if req.sampling.ignore_eos else self._eos_ids
        # An unset limit still says so here. What is explicit counts as far as the context has room for it.
        sampling = req.sampling if req.sampling.max_new_tokens == UNLIMITED else _clamp_output(req.sampling, room)
        sampling = fit_logprobs(sampling, req.logprobs, len(token_ids), len(req.rids), self._max_logprobs)
        sampling = _with_reasoning(_clamp_output(sampling, room), rendered_text)
        return GenerateReq(
            **req.terms | {"sampling": sampling},
            input_ids=pack_i32(token_ids),
            stop_ids=tuple(dict.fromkeys(eos_ids + req.sampling.stop_token_ids)),
        )

    def _cut(self, token_ids: list[int]) -> list[int]:
        """Return the first tokens that the context has room for, beside one of output.

        A token that ends the text stays the last one: models that pool the last token are trained with it.
        """
        most = self._limits.context_length - 1
        if len(token_ids) <= most:
            return token_ids
        end = [token_id for token_id in token_ids[-1:] if token_id in self._eos_ids]
        return token_ids[: most - len(end)] + end


def _with_reasoning(sampling: SamplingParams, prompt: str) -> SamplingParams:
    """Return ``sampling`` with a grammar that applies only after the reasoning, in formats that have reasoning.

    ``prompt``: the rendered conversation. It may end within reasoning.
    """
    grammar, marks = sampling.grammar, sampling.marks
    if grammar is None or marks is None or not marks.reasoning[1]:
        return sampling
    is_open = begins_open(marks.reasoning[0], prompt)
    grammar = msgspec.structs.replace(grammar, reasoning=marks.reasoning, is_reasoning_open=is_open)
    return msgspec.structs.replace(sampling, grammar=grammar)


def _clamp_output(sampling: SamplingParams, room: int) -> SamplingParams:
    """Limit the numbers of output tokens to ``room``, the tokens that the context has left. Return the new parameters.

    The request then ends there with finish reason "length".
    """
    if sampling.max_new_tokens <= room and sampling.min_new_tokens <= room:
        return sampling
    return msgspec.structs.replace(
        sampling,
        max_new_tokens=min(sampling.max_new_tokens, room),
        min_new_tokens=min(sampling.min_new_tokens, room),
    )


def _refuse(req: TokenizeReq, error: PromptError) -> ReqError:
    return ReqError(rid=req.rid, status=BAD_REQUEST, message=str(error), field=error.field, code=error.code)
