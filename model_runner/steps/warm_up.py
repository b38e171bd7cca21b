"""The first passes, before anyone waits for them: kernels are chosen, scratch memory is allocated, code is imported."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...messages.base import pack_i32
from ...messages.sampling import SamplingParams
from ...messages.worker import ForwardStep, InputLogprobSpec, RowInit, StepResult
from ...model_files.errors import InvalidWeights
from .step_runner import StepRunner

PROMPT_TOKENS = 64


class _WarmUpEntry(NamedTuple):
    """``q_len`` tokens of ``row``, from position ``start`` on."""

    row: int
    start: int
    q_len: int


VARIANTS = (
    # One prompt, of a number of tokens that products have a tile of their own for: 16, 32, 64, 128, and more.
    *((_WarmUpEntry(0, 0, tokens),) for tokens in (16, 17, 33, 65, 129)),
    # One decode, and one beside one, two or three pieces of prompts.
    (_WarmUpEntry(0, 16, 1),),
    *((_WarmUpEntry(0, 16, 1), *(_WarmUpEntry(row, 0, 5) for row in range(1, 1 + pieces))) for pieces in (1, 2, 3)),
    # An odd number of prompts.
    tuple(_WarmUpEntry(row, 0, 7) for row in range(3)),
)
"""Steps that together ask for every variant of a GPU's kernels.

Triton compiles one for each set of constants, of arguments that are 1 or multiples of 16, and of addresses that are
multiples of 16.
"""


def warm_up(
    steps: StepRunner, max_reqs: int, context_length: int, page_size: int, *, every_variant: bool = False
) -> None:
    """Run a prefill and two decode steps of up to two requests: one is greedy, and one draws tokens.

    ``every_variant``: run the steps of ``VARIANTS`` as well. KV goes to page 0, which no request ever reads. The first
    requests that take the rows reset them. Raises ``InvalidWeights`` if the logits are not finite: such a model can
    answer nothing.
    """
    rows = range(min(2, max_reqs))
    prompt_len = min(PROMPT_TOKENS, context_length - 2)
    for start, q_len in ((0, prompt_len), (prompt_len, 1), (prompt_len + 1, 1)):
        result = _run(steps, [_WarmUpEntry(row, start, q_len) for row in rows], prompt_len, page_size)
        if result.bad_entries:
            raise InvalidWeights("the model's first pass gave logits that are not finite; its weights are damaged")
    for entries in VARIANTS if every_variant else ():
        if len(entries) <= max_reqs and all(entry.start + entry.q_len < context_length for entry in entries):
            _run(steps, entries, prompt_len, page_size)


def _run(
    steps: StepRunner, entries: list[_WarmUpEntry] | tuple[_WarmUpEntry, ...], prompt_len: int, page_size: int
) -> StepResult:
    """Run one step with ``entries`` and return its result. An entry at position 0 begins a request.

    Requests in even rows are greedy, and those in odd rows draw tokens.
    """
    new = [entry.row for entry in entries if entry.start == 0]
    positions = np.concatenate([np.arange(entry.start, entry.start + entry.q_len) for entry in entries])
    return steps.run(
        ForwardStep(
            step_id=0,
            rows=pack_i32([entry.row for entry in entries]),
            starts=pack_i32([entry.start for entry in entries]),
            q_lens=pack_i32([entry.q_len for entry in entries]),
            use_last=pack_i32([entry.start > 0 for entry in entries]),
            sample=pack_i32(np.ones(len(entries), dtype=np.int64)),
            input_ids=pack_i32(np.zeros_like(positions)),
            out_cache_loc=pack_i32(positions % page_size),
            new_rows=[_row(row, prompt_len) for row in new],
            input_logprobs=[InputLogprobSpec(0, 0, pack_i32([0]), 1)] if entries[0].start == 0 else [],
        )
    )


def _row(row: int, prompt_len: int) -> RowInit:
    if row % 2 == 0:
        return RowInit(row, prompt_len, SamplingParams(seed=0, temperature=0.0))
    return RowInit(row, prompt_len, SamplingParams(seed=0, temperature=1.0, top_p=0.9), logprobs=1)
