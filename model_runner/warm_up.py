"""The first passes, before anyone waits for them: kernels are chosen, scratch memory is allocated, code is imported."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..messages.base import pack_i32
from ..messages.worker import ForwardStep, InputLogprobSpec, RowInit
from ..model_files.errors import InvalidWeights
from .step_runner import StepRunner

PROMPT_TOKENS = 64


def warm_up(steps: StepRunner, max_reqs: int, context_length: int, page_size: int) -> None:
    """Run a prefill and two decode steps of up to two rows, one of each kind of sampling.

    KV goes to page 0, which no request ever reads, and the rows are forgotten when their first requests take them.
    Raises ``InvalidWeights`` where the logits are not finite: such a model can answer nothing.
    """
    rows = np.arange(min(2, max_reqs))
    prompt_len = min(PROMPT_TOKENS, context_length - 2)
    common: dict[str, Any] = {"prompt_len": prompt_len, "top_k": -1, "min_p": 0.0, "min_new_tokens": 0, "stop_ids": ()}
    common |= {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
    greedy = RowInit(row=0, seed=0, temperature=0.0, top_p=1.0, **common)
    random = RowInit(row=1, seed=0, temperature=1.0, top_p=0.9, logprobs=1, **common)
    for step_id, (start, q_len) in enumerate([(0, prompt_len), (prompt_len, 1), (prompt_len + 1, 1)]):
        first = step_id == 0
        positions = np.tile(np.arange(start, start + q_len), len(rows))
        result = steps.run(
            ForwardStep(
                step_id=step_id,
                rows=pack_i32(rows),
                starts=pack_i32(np.full_like(rows, start)),
                q_lens=pack_i32(np.full_like(rows, q_len)),
                use_last=pack_i32(np.full_like(rows, not first)),
                sample=pack_i32(np.ones_like(rows)),
                input_ids=pack_i32(np.zeros_like(positions)),
                out_cache_loc=pack_i32(positions % page_size),
                new_rows=[greedy, random][: len(rows)] if first else [],
                input_logprobs=[InputLogprobSpec(0, 0, pack_i32([0]), 1)] if first else [],
            )
        )
        if result.bad_entries:
            raise InvalidWeights("the model's first pass gave logits that are not finite; its weights are damaged")
