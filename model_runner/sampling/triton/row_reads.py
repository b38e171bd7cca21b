"""How the sampler's kernels read a row: its parameters, and its logits after biases, penalties and bans.

Every kernel edits what it reads: a row's edited logits are stored nowhere. The model's logits stay unchanged, because
log-probabilities are computed from them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..logit_edits.triton_rules import add_bias, ban_stops, penalise
from .row_table import (
    EDITS,
    FREQUENCY,
    GREEDY,
    MIN_NEW_TOKENS,
    MIN_P,
    ONE_OUTPUT,
    PRESENCE,
    PROMPT_LEN,
    REPETITION,
    STOPS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WORDS,
)


@triton.jit
def float_word(words_ptr: tl.tensor, row: tl.tensor, word: tl.constexpr) -> tl.tensor:
    """Return a row's sampling parameter as a float64.

    ``words_ptr``: the table of sampling parameters, a row of int64 words for each request. ``word``: the parameter's
    column, such as ``TOP_P``.
    """
    return tl.load(words_ptr + row * WORDS + word).to(tl.float64, bitcast=True)


@triton.jit
def is_drawn(words_ptr: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Return whether the row's token is chosen at random.

    A ``row`` below 0 only fills up the batch, and gives False.
    """
    is_greedy = tl.load(words_ptr + row * WORDS + GREEDY, mask=row >= 0, other=1)
    return (row >= 0) & (is_greedy == 0)


@triton.jit
def draws_from_all(words_ptr: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Return whether the row draws from all tokens: it has neither top-k nor top-p."""
    top_k = tl.load(words_ptr + row * WORDS + TOP_K)
    return (top_k == 0) & (float_word(words_ptr, row, TOP_P) == float("inf"))


@triton.jit
def temperature_of(words_ptr: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Return the temperature of the row as a float32."""
    return float_word(words_ptr, row, TEMPERATURE).to(tl.float32)


@triton.jit
def least_weight(words_ptr: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Return the float32 weight below which min-p drops a token. The best token weighs 1 and stays."""
    return tl.minimum(float_word(words_ptr, row, MIN_P).to(tl.float32), 1.0)


@triton.jit
def edited_logits(
    logits_ptr: tl.tensor,
    words_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    biases_ptr: tl.tensor,
    row: tl.tensor,
    position: tl.tensor,
    ids: tl.tensor,
    vocab: tl.tensor,
) -> tl.tensor:
    """Return the float32 logits of the tokens ``ids`` after the row's logit edits; -inf for ids beyond the vocabulary.

    ``logits_ptr``: the row's first logit. ``words_ptr``: sampling parameters of all rows. ``counts_ptr``,
    ``biases_ptr``: penalty counts and biases, at the row's place. ``position``: that of the token to be chosen.
    """
    is_there = ids < vocab
    logits = tl.load(logits_ptr + ids, mask=is_there, other=-float("inf")).to(tl.float32)
    place = tl.load(words_ptr + row * WORDS + EDITS)
    if place >= 0:
        counts = tl.load(counts_ptr + place * vocab + ids, mask=is_there, other=0)
        logits = add_bias(logits, tl.load(biases_ptr + place * vocab + ids, mask=is_there, other=0.0))
        repetition = float_word(words_ptr, row, REPETITION)
        frequency = float_word(words_ptr, row, FREQUENCY)
        presence = float_word(words_ptr, row, PRESENCE)
        is_seen = (counts & ~STOPS) != 0
        logits = penalise(logits, is_seen, counts // ONE_OUTPUT, repetition, frequency, presence)
        new_tokens = position - tl.load(words_ptr + row * WORDS + PROMPT_LEN)
        is_short = new_tokens < tl.load(words_ptr + row * WORDS + MIN_NEW_TOKENS)
        logits = ban_stops(logits, (counts & STOPS) != 0, is_short)
    return logits
