"""Converts the prompts of one HTTP request to the messages that ask the engine for their answers.

A batch may ask for thousands of answers. They are made in slices, between which the event loop serves other requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ....messages.channel import encode
from ....messages.packed_text import pack
from ....messages.requests import TokenizeReq
from ..errors import ApiError
from .plan import PromptPlan
from .submission import Choice, Kind

SLICE_CHOICES = 256
"""Number of answers that are prepared in one iteration of the event loop: some 2 ms."""
MAX_REQUEST_BYTES = 1 << 26
"""Maximum length of one HTTP request's messages to the tokenizer.

A body of 33 MiB exceeds it only if options of many kilobytes are repeated for each of its prompts.
"""


@dataclass(slots=True)
class RequestBatch:
    """The messages and choices of one HTTP request.

    ``requests``: one message for each prompt. ``choices``: one for each wanted answer, in the order of the prompts.
    ``named``: the choices by each name that their caller has for them. ``nbytes``: total length of the messages.
    """

    requests: list[TokenizeReq] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    named: dict[str, list[Choice]] = field(default_factory=dict)
    nbytes: int = 0

    def rename(self) -> None:
        """Write the choices' wire ids, which have changed, into the messages."""
        rids = (choice.wire_rid for choice in self.choices)
        for request in self.requests:
            request.rid, *request.forks = [next(rids) for _ in request.rids]


@dataclass(frozen=True, slots=True)
class Asker:
    """What all prompts of an HTTP request have in common. ``group``: a name for all their answers, beside their own.

    ``keeps_sent``: see ``Choice``. ``limit``: maximum length of the messages, in bytes.
    """

    key_name: str
    streaming: bool
    group: str | None
    is_prefill: bool
    keeps_sent: bool
    limit: int


async def make_batch(plans: Sequence[PromptPlan], asker: Asker) -> RequestBatch:
    """Make the messages and choices for ``plans``, without sending them.

    The event loop runs after every few hundred choices. Raises ``ApiError`` 413 if the messages are longer than the
    limit of ``asker``.
    """
    batch, arrival = RequestBatch(), time.monotonic()
    slice_end = SLICE_CHOICES
    for prompt_index, plan in enumerate(plans):
        if len(batch.choices) >= slice_end:
            slice_end = len(batch.choices) + SLICE_CHOICES
            await asyncio.sleep(0)
        choices = [_choice(batch, prompt_index, i, plan, asker, arrival) for i in range(plan.n)]
        for choice in choices:
            for name in {choice.rid, plan.rid, asker.group or choice.rid}:
                batch.named.setdefault(name, []).append(choice)
        batch.choices += choices
        request = _request(plan, choices, asker)
        batch.nbytes += len(encode([request]))
        if batch.nbytes > asker.limit:
            raise ApiError(
                413,
                f"{prompt_index + 1} of {len(plans)} prompts come to {batch.nbytes} bytes with their options, "
                f"the limit is {asker.limit}; send fewer or shorter prompts at a time",
            )
        batch.requests.append(request)
    return batch


def _choice(batch: RequestBatch, prompt_index: int, i: int, plan: PromptPlan, asker: Asker, arrival: float) -> Choice:
    rid = plan.rid if plan.n == 1 else f"{plan.rid}-{i}"
    kind = Kind.STREAM if asker.streaming else Kind.WHOLE
    return Choice(
        index=len(batch.choices) + i,
        prompt_index=prompt_index,
        rid=rid,
        wire_rid=rid,
        arrival=arrival,
        keep_output=plan.keep_output,
        keeps_sent=asker.keeps_sent,
        kind=Kind.LEG if plan.bootstrap is not None and asker.is_prefill else kind,
    )


def _request(plan: PromptPlan, choices: Sequence[Choice], asker: Asker) -> TokenizeReq:
    first, *others = choices
    return TokenizeReq(
        rid=first.wire_rid,
        sampling=plan.sampling,
        arrival=first.arrival,
        text=None if plan.prompt.text is None else pack(plan.prompt.text),
        input_ids=plan.prompt.input_ids,
        chat=plan.prompt.chat,
        logprobs=plan.logprobs,
        bootstrap=plan.bootstrap,
        extra_key=plan.extra_key,
        stream=asker.streaming,
        add_special_tokens=plan.add_special_tokens,
        return_prompt=plan.return_prompt,
        place=first.index,
        forks=[choice.wire_rid for choice in others],
        priority=plan.terms.priority,
        timeout_s=plan.terms.timeout_s,
        key_name=asker.key_name,
        user=plan.terms.user,
        readout=plan.readout,
    )
