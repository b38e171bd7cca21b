"""Checks requests and turns their prompts into token ids.

What is checked here is what needs the tokenizer or the model's limits; the HTTP process checks the rest. A request that
fails is answered with 400 and changes nothing for those that arrived with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..messages.base import pack_i32
from ..messages.outputs import ReqError
from ..messages.requests import GenerateReq, TokenizeReq
from ..messages.sampling import SamplingParams
from ..model_files.model_limits import ModelLimits
from ..model_files.text.chat_template import ChatTemplate
from ..model_files.text.errors import PromptError
from ..model_files.text.text_tokenizer import TextTokenizer

BAD_REQUEST = 400
# Hardly any text has so many characters in each of its tokens.
PROBE_CHARACTERS_PER_TOKEN = 16
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096


class RequestTokenizer:
    """Turns ``TokenizeReq`` into ``GenerateReq``."""

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate | None, limits: ModelLimits) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._limits = limits
        # A tokenizer may know ids that the model has no weights for; ending on one would never happen.
        self._eos_ids = tuple(i for i in tokenizer.eos_ids if i < limits.vocab_size)
        self._max_text_bytes = limits.context_length * tokenizer.max_token_bytes

    def tokenize(self, reqs: Sequence[TokenizeReq]) -> list[GenerateReq | ReqError]:
        """One answer for each request, in order. Texts of the same kind are encoded as one batch."""
        results: list[GenerateReq | ReqError | None] = [None] * len(reqs)
        prompts: dict[int, list[int]] = {}
        texts: dict[bool, list[tuple[int, str]]] = {False: [], True: []}  # by: add special tokens?
        for i, req in enumerate(reqs):
            try:
                self._check_sampling(req.sampling)
                self._check_one_prompt(req)
                if req.input_ids is not None:
                    prompts[i] = req.input_ids
                else:
                    # A chat template prints the special tokens itself.
                    texts[req.chat is None].append((i, self._prompt_text(req)))
            except PromptError as e:
                results[i] = _refuse(req, e)
        for add_special_tokens, entries in texts.items():
            if entries:
                batch = [text for _, text in entries]
                encoded = self._tokenizer.encode_batch(batch, add_special_tokens=add_special_tokens)
                prompts |= dict(zip((i for i, _ in entries), encoded, strict=True))
        for i, token_ids in prompts.items():
            try:
                results[i] = self._generate_req(reqs[i], token_ids)
            except PromptError as e:
                results[i] = _refuse(reqs[i], e)
        return [result for result in results if result is not None]

    def _check_sampling(self, sampling: SamplingParams) -> None:
        for token_id in sampling.stop_token_ids:
            self._check_id("stop_token_ids", token_id)
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
        prompts = {"text": req.text, "input_ids": req.input_ids, "messages": req.chat}
        given = {name: prompt for name, prompt in prompts.items() if prompt is not None}
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise PromptError(next(iter(given), "text"), f"give exactly one of {', '.join(prompts)}; found: {found}")
        for name, prompt in given.items():
            if not prompt:
                raise PromptError(name, f"{name} is empty; give the model at least one token to continue")

    def _prompt_text(self, req: TokenizeReq) -> str:
        """The text to encode: the prompt itself, or the conversation as the template renders it."""
        field, text = "text", req.text or ""
        if req.chat is not None:
            field = "messages"
            if self._template is None:
                raise PromptError(
                    field,
                    "this model has no chat template; start the server with --chat-template FILE, "
                    "or send the finished prompt as text",
                )
            self._check_size(field, sum(len(message.content) for message in req.chat))
            text = self._template.render(req.chat)
        self._check_size(field, len(text))
        try:
            self._check_size(field, len(text.encode()))
        except UnicodeEncodeError as e:
            raise PromptError(
                field,
                f"{field} has half of a surrogate pair at character {e.start}; "
                "write characters beyond U+FFFF as UTF-8, or escape both halves",
            ) from e
        self._check_beginning(field, text)
        return text

    def _check_size(self, field: str, size: int) -> None:
        """``size``: UTF-8 bytes, or characters, which are at most as many."""
        if size > self._max_text_bytes:
            raise PromptError(
                field,
                f"{field} of at least {size} bytes can't fit the context of {self._limits.context_length} tokens; "
                "shorten it",
            )

    def _check_beginning(self, field: str, text: str) -> None:
        """Refuse a text whose beginning alone is far too long: encoding all of it would hold up everyone else.

        Where the beginning is cut, a word may encode otherwise than in the whole text, hence the factor of two.
        """
        beginning = PROBE_CHARACTERS_PER_TOKEN * self._limits.context_length
        if len(text) <= beginning:
            return
        [token_ids] = self._tokenizer.encode_batch([text[:beginning]], add_special_tokens=False)
        if len(token_ids) > 2 * self._limits.context_length:
            raise PromptError(
                field,
                f"the first {beginning} characters of {field} have {len(token_ids)} tokens, but the context has "
                f"{self._limits.context_length}; shorten it",
            )

    def _generate_req(self, req: TokenizeReq, token_ids: list[int]) -> GenerateReq:
        field = "text" if req.text is not None else "messages" if req.chat is not None else "input_ids"
        if not token_ids:
            raise PromptError(field, f"{field} gives no tokens; give the model at least one token to continue")
        room = self._limits.context_length - len(token_ids)
        if room < 1:
            raise PromptError(
                field,
                f"the prompt has {len(token_ids)} tokens, but prompt and output share a context of "
                f"{self._limits.context_length} and the output needs one; shorten the prompt",
            )
        self._check_id(field, min(token_ids))
        self._check_id(field, max(token_ids))
        eos_ids = () if req.sampling.ignore_eos else self._eos_ids
        return GenerateReq(
            rid=req.rid,
            input_ids=pack_i32(token_ids),
            sampling=_clamp_output(req.sampling, room),
            stop_ids=tuple(dict.fromkeys(eos_ids + req.sampling.stop_token_ids)),
            arrival=req.arrival,
            logprobs=req.logprobs,
            bootstrap=req.bootstrap,
            extra_key=req.extra_key,
            stream=req.stream,
        )


def _clamp_output(sampling: SamplingParams, room: int) -> SamplingParams:
    """Output that the context has no room for can't be made: the request ends with finish reason "length" there."""
    if sampling.max_new_tokens <= room and sampling.min_new_tokens <= room:
        return sampling
    return msgspec.structs.replace(
        sampling,
        max_new_tokens=min(sampling.max_new_tokens, room),
        min_new_tokens=min(sampling.min_new_tokens, room),
    )


def _refuse(req: TokenizeReq, error: PromptError) -> ReqError:
    return ReqError(rid=req.rid, status=BAD_REQUEST, message=str(error), field=error.field)
