"""Reads the prompts of ``POST /completion``. Texts among token ids are tokenized before the request is submitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from starlette.requests import Request

from ....messages.text import EncodeReq
from ....runtime.web.keys import Caller
from ..engine.plan import Prompt
from ..errors import bad_request
from ..state import HttpState

TIMEOUT_SECONDS = 30.0
"""Timeout of the tokenizer's answer, from when it is asked."""


Mixed = tuple[int | str, ...]


async def read_prompts(request: Request, given: Sequence[str | list[int] | Mixed]) -> list[Prompt]:
    """Return the prompts of a checked body, each as text or as token ids. Raises ``ApiError``.

    A mixed prompt begins with special tokens, such as a BOS, only if it begins with a text.
    """
    mixed = [prompt for prompt in given if isinstance(prompt, tuple)]
    begins = [prompt[0] for prompt in mixed if isinstance(prompt[0], str)]
    later = [part for prompt in mixed for part in prompt[1:] if isinstance(part, str)]
    encoded_begins = iter(await _encoded(request, begins, None))
    encoded_later = iter(await _encoded(request, later, False))
    prompts = []
    for i, prompt in enumerate(given):
        if isinstance(prompt, str):
            read = Prompt(text=prompt)
        elif isinstance(prompt, tuple):
            read = Prompt(input_ids=_joined(prompt, encoded_begins, encoded_later))
        else:
            read = Prompt(input_ids=prompt)
        if not (read.text or read.input_ids):
            where = "prompt" if len(given) == 1 else f"prompt[{i}]"
            raise bad_request(where, "is empty; a prompt needs at least one token")
        prompts.append(read)
    if not prompts:
        raise bad_request("prompt", "is empty; give at least one prompt")
    return prompts


def _joined(prompt: Mixed, begins: Iterator[list[int]], later: Iterator[list[int]]) -> list[int]:
    """Return the token ids of a mixed prompt. The iterators have those of its texts, in order."""
    ids: list[int] = []
    for i, part in enumerate(prompt):
        if isinstance(part, str):
            ids += next(later if i else begins)
        else:
            ids.append(part)
    return ids


async def _encoded(request: Request, texts: list[str], special: bool | None) -> list[list[int]]:
    """Return the tokenizer's ids of each text. ``special``: whether special tokens are added, None: as for prompts."""
    if not texts:
        return []
    state = HttpState.of(request)
    question = EncodeReq(texts, add_special_tokens=special, key_name=Caller.of(request.scope).name)
    ask = lambda: state.engine.questions.ask(question, TIMEOUT_SECONDS)  # noqa: E731
    result = await state.questions.ask(request, sum(map(len, texts)), ask)
    if result.error is not None:
        raise bad_request("prompt", result.error)
    return result.token_ids
