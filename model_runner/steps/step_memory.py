"""How much of a device's memory is taken by everything that is allocated after the KV pool.

That is attention's arrays, the request table, the sampler's arrays, activations, logits and graphs. Nothing is computed
by formulas, which would miss a new buffer. Before the pool is sized, the largest steps that a server can be asked for
run once, over pools that hold page 0 alone. The device reports how much they took (vLLM's profile run). What was
allocated for them is dropped again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ...messages.base import pack_i32
from ...messages.readout import ReadoutSpec
from ...messages.requests import MAX_TOP_LOGPROBS
from ...messages.sampling import SamplingParams
from ...messages.worker import ForwardStep, InputLogprobSpec, RowInit
from ..device.base import Device
from ..errors import NotEnoughMemory
from ..kv.size import piece_of
from ..options import WorkerOptions
from ..page_mover import NoPageMover
from .step_queue import StepQueue
from .step_runner import StepRunner

GRAPH_BYTES = 2 << 20
"""Driver memory for one captured graph. An estimate: hundreds of kernels with a few KiB each."""


class StepSizes(NamedTuple):
    """Sizes of the largest steps.

    ``rows``: requests. ``prompt_tokens``: tokens of prompts in one step. ``scored``: the prompt tokens with
    log-probabilities. ``context_length``: tokens of a request. ``gathered``: see ``AttentionBackend.gathered_tokens``.
    """

    rows: int
    prompt_tokens: int
    scored: int
    context_length: int
    gathered: int = 0

    @classmethod
    def of(cls, options: WorkerOptions, device_type: str, context_length: int, gathered: int = 0) -> StepSizes:
        """Return the sizes of the largest steps under ``options``.

        ``gathered``: see ``AttentionBackend.gathered_tokens``.
        """
        rows, tokens = options.max_running_requests, piece_of(options, device_type)
        each = options.max_logprobs_per_request
        scored = min(tokens, rows * each)
        if options.chunked_prefill_size == -1:
            # Either many prompts, or one that is longer than all of them may be.
            tokens = max(options.max_prefill_tokens, context_length)
            scored = max(min(options.max_prefill_tokens, rows * each), min(context_length, each))
        tokens = min(tokens, rows * (context_length - 2))
        return cls(rows, tokens, min(scored, tokens), context_length, gathered)


class _Entry(NamedTuple):
    """Tokens of one row in a step: ``q_len`` of them, from position ``start`` on. ``scored``: how many have
    log-probabilities.
    """

    row: int
    start: int
    q_len: int
    scored: int = 0


def bytes_of_steps(device: Device, make: Callable[[], tuple[StepRunner, StepSizes]]) -> int:
    """Call ``make``, run the largest steps of its runner, and return by how many bytes the device's use grew at most.

    The runner's arrays and graphs count. Raises ``NotEnoughMemory``.
    """

    def run() -> None:
        steps, sizes = make()
        run_largest(steps, sizes)
        steps.drop_graphs()

    try:
        return device.peak(run)
    except torch.OutOfMemoryError as e:
        raise NotEnoughMemory(
            "the largest steps do not fit beside the weights: lower --chunked-prefill-size (or leave it out, if it is "
            f"-1), --max-running-requests, --max-logprobs-per-request or --context-length ({e})"
        ) from None


def run_largest(steps: StepRunner, sizes: StepSizes) -> None:
    """Run the steps that take most memory: prompts, ends of prompts in long contexts, and decodes of all rows.

    KV goes to page 0. Every row samples with penalties. All but the first one list alternatives, so their logits are
    copied. Decodes of which one does not sample would copy a graph's logits, but steps of prompts take more. Graphs are
    captured in between, and the steps run again beside them.
    """
    queue = StepQueue(steps, NoPageMover(), ahead=1)
    prompts = _pieces(sizes)
    whole = prompts + [_Entry(row, 0, 1) for row in range(len(prompts), sizes.rows)]
    ends, decodes = _gathered(sizes) if sizes.gathered else _read_in_place(sizes)
    _run(queue, whole, ends, decodes)
    steps.capture_graphs()
    # Again beside graphs and all that has grown by now, with a step of its kind open.
    _run(queue, decodes, decodes, ends, whole, whole)


def _read_in_place(sizes: StepSizes) -> tuple[list[_Entry], list[_Entry]]:
    """Return a step of prompts' ends, and one of decodes, for attention that reads contexts in the pool.

    Only as many prompts end as can in one step, since more would take seconds.
    """
    rows, end = range(sizes.rows), sizes.context_length - 1
    each = max(2, min(sizes.prompt_tokens // sizes.rows, end - 1))
    ends = [_Entry(row, end - 1 - each, each) for row in rows[: max(1, sizes.prompt_tokens // each)]]
    return ends, [_Entry(row, 1, 1) for row in rows]


def _gathered(sizes: StepSizes) -> tuple[list[_Entry], list[_Entry]]:
    """Return a step of a prompt's end beside decodes, and one of decodes, for attention that copies contexts.

    It copies the contexts of a prompt, or of a batch of decodes, and forgets them. So one long prompt and one batch of
    long decodes take most, beside short ones. Plans of further batches would take some bytes for each token of them.
    """
    rows, end = range(sizes.rows), sizes.context_length - 1
    long = max(1, sizes.gathered // sizes.context_length)
    decodes = [_Entry(row, end - 1 if row < long else 1, 1) for row in rows]
    each = min(sizes.prompt_tokens, end - 1)
    return [_Entry(0, end - 1 - each, each), *decodes[1:]], decodes


def _pieces(sizes: StepSizes) -> list[_Entry]:
    """Return entries of whole prompts, with ``sizes.prompt_tokens`` tokens in all, each as long as a context allows."""
    entries: list[_Entry] = []
    tokens, scored = sizes.prompt_tokens, sizes.scored
    while tokens:
        q_len = min(tokens, sizes.context_length - 2)
        entries.append(_Entry(len(entries), 0, q_len, min(q_len, scored)))
        tokens, scored = tokens - q_len, scored - min(q_len, scored)
    return entries


def _run(queue: StepQueue, *steps: list[_Entry]) -> None:
    """Launch the steps in order, each while the one before it may still run, and wait until all have ended."""
    for entries in steps:
        queue.launch(_step(entries))
        if queue.is_full:
            queue.collect()
    while len(queue):
        queue.collect()


def _step(entries: list[_Entry]) -> ForwardStep:
    tokens = sum(entry.q_len for entry in entries)
    return ForwardStep(
        step_id=0,
        rows=pack_i32([entry.row for entry in entries]),
        starts=pack_i32([entry.start for entry in entries]),
        q_lens=pack_i32([entry.q_len for entry in entries]),
        use_last=pack_i32([entry.start > 0 and entry.q_len == 1 for entry in entries]),
        sample=pack_i32(np.ones(len(entries), dtype=np.int64)),
        input_ids=pack_i32(np.zeros(tokens, dtype=np.int64)),
        out_cache_loc=pack_i32(np.zeros(tokens, dtype=np.int64)),
        new_rows=[_row(entry.row, lists=entry.row > 0 or len(entries) == 1) for entry in entries if entry.start == 0],
        input_logprobs=[
            InputLogprobSpec(i, 0, pack_i32(np.zeros(entry.scored, dtype=np.int64)), MAX_TOP_LOGPROBS)
            for i, entry in enumerate(entries)
            if entry.scored
        ],
        readouts=[ReadoutSpec(i, "mean", True) for i, entry in enumerate(entries) if not entry.start],
    )


def _row(row: int, *, lists: bool) -> RowInit:
    return RowInit(
        row=row,
        prompt_len=1,
        sampling=SamplingParams(seed=0, temperature=1.0, top_p=0.9, frequency_penalty=0.5, logit_bias={0: 1.0}),
        logprobs=MAX_TOP_LOGPROBS if lists else None,
        history=pack_i32([0]),
    )
