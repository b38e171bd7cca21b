"""The sampler's table of rows on the device: parameters, and what changes a row's logits.

A row's words (int64, floats as the bits of a float64) are written when its request begins. What its penalties count,
its biases and the tokens it must not stop with have a place of their own in the *edits*. A word of the row says which,
or NO_EDITS. Edits are dense, so every program finds those of its tokens without a search. The kernel that chooses a
token also counts it, without the host. This takes 8 bytes for each token of the vocabulary and place. The caller
assigns places to rows.

Shapes: R rows, N of them that begin, V vocabulary, M places of edits, H entries of lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..logit_edits.bias import TokenBias
from ..row_params import F32, I64, PARAM_NAMES, RowParams
from .draw_math import MAX_VOCAB

NO_EDITS = -1
_HOST_ONLY = ("logprobs", "penalised")
_WORDS = {name: word for word, name in enumerate(name for name in PARAM_NAMES if name not in _HOST_ONLY)}
"""The word of each parameter, in the order of the host's table. Behind them comes the place of edits."""

SEED = tl.constexpr(_WORDS["seed"])
PROMPT_LEN = tl.constexpr(_WORDS["prompt_len"])
GREEDY = tl.constexpr(_WORDS["greedy"])
TEMPERATURE = tl.constexpr(_WORDS["temperature"])
TOP_P = tl.constexpr(_WORDS["top_p"])
TOP_K = tl.constexpr(_WORDS["top_k"])
MIN_P = tl.constexpr(_WORDS["min_p"])
FREQUENCY = tl.constexpr(_WORDS["frequency_penalty"])
PRESENCE = tl.constexpr(_WORDS["presence_penalty"])
REPETITION = tl.constexpr(_WORDS["repetition_penalty"])
MIN_NEW_TOKENS = tl.constexpr(_WORDS["min_new_tokens"])
EDITS = tl.constexpr(len(_WORDS))
WORDS = tl.constexpr(len(_WORDS) + 1)

# What edits count of a token: its outputs in units of ONE_OUTPUT, and these two bits.
SEEN = tl.constexpr(1)
STOPS = tl.constexpr(2)
ONE_OUTPUT = tl.constexpr(4)


@dataclass(frozen=True, slots=True)
class RowTable:
    """On the device, at addresses that stay."""

    words: Tensor
    """[R, WORDS] int64."""
    last_tokens: Tensor
    """[R] int64: each row's last sampled token, which the sampler writes."""
    counts: Tensor
    """[M, V] int32: of each token, ONE_OUTPUT for each time that it was output, SEEN and STOPS."""
    biases: Tensor
    """[M, V] float32."""


def make_table(
    rows: int, vocab_size: int, places: int, device: torch.device, last_tokens: Tensor | None = None
) -> RowTable:
    """Make the device's table of sampling parameters for ``rows`` rows without requests.

    ``places``: how many of the rows can have logit edits at once. ``last_tokens``: [R] int64 to use; None: make it.
    Raises ``ValueError`` if the vocabulary is so large that a sum of its weights could overflow.
    """
    if vocab_size > MAX_VOCAB:
        raise ValueError(f"a vocabulary of {vocab_size} tokens is larger than {MAX_VOCAB}, which these kernels sum")
    if last_tokens is None:
        last_tokens = torch.full((rows,), -1, dtype=torch.int64, device=device)
    return RowTable(
        words=torch.zeros((rows, WORDS.value), dtype=torch.int64, device=device),
        last_tokens=last_tokens,
        counts=torch.zeros((places, vocab_size), dtype=torch.int32, device=device),
        biases=torch.zeros((places, vocab_size), dtype=torch.float32, device=device),
    )


def pack_words(params: RowParams, places: I64) -> I64:
    """Return the rows of the device's table ([N, WORDS] int64) for these parameters ([N]).

    ``places``: index of each row's logit edits on the device ([N]; ``NO_EDITS``: none).
    """
    words = np.empty((len(params), WORDS.value), dtype=np.int64)
    for name, word in _WORDS.items():
        values = params[name]
        words[:, word] = values.astype(np.float64 if values.dtype.kind == "f" else np.uint64).view(np.int64)
    words[:, EDITS.value] = places
    return words


class EditLists(NamedTuple):
    """What is to stand in the places of some rows, sparse; entry ``i`` is of token ``tokens[i]`` in ``places[i]``."""

    places: I64
    """[H]"""
    tokens: I64
    """[H]: each once in a place."""
    counts: npt.NDArray[np.int32]
    """[H]"""
    biases: F32
    """[H]"""


def list_edits(place: int, history: I64, prompt_len: int, stop_ids: I64, bias: TokenBias | None) -> EditLists:
    """Return a new request's penalty counts, stop tokens and biases, for index ``place`` of the device's edits.

    ``history``: its prompt, of ``prompt_len`` tokens, then its output; empty if nothing is penalised.
    """
    biased = np.empty(0, dtype=np.int64) if bias is None else bias.ids
    tokens, where = np.unique(np.concatenate((history, stop_ids, biased)), return_inverse=True)
    counts = np.zeros(len(tokens), dtype=np.int32)
    seen, stops, has_bias = np.split(where, [len(history), len(history) + len(stop_ids)])
    np.add.at(counts, seen[prompt_len:], ONE_OUTPUT.value)
    counts[seen] |= SEEN.value
    counts[stops] |= STOPS.value
    biases = np.zeros(len(tokens), dtype=np.float32)
    if bias is not None:
        biases[has_bias] = bias.values
    return EditLists(np.full(len(tokens), place, dtype=np.int64), tokens, counts, biases)


def join_edits(lists: Sequence[EditLists]) -> EditLists:
    """Join the edit lists of several rows into one. Each row must have a place of its own."""
    return EditLists(*(np.concatenate(columns) for columns in zip(*lists, strict=True)))


def start_rows(table: RowTable, rows: Tensor, words: Tensor) -> None:
    """Queue a write of new requests' sampling parameters to ``rows`` ([N] int64) of the table.

    ``words``: the parameters, [N, WORDS] int64. The rows' last tokens become -1.
    """
    if len(rows):
        block = triton.next_power_of_2(WORDS.value)
        _start_rows[(len(rows),)](table.words, table.last_tokens, rows, words, WORDS=WORDS, BLOCK=block, num_warps=1)


def write_edits(
    table: RowTable, cleared: Tensor, places: Tensor, tokens: Tensor, counts: Tensor, biases: Tensor
) -> None:
    """Queue two launches: clear the places ``cleared`` ([N] int64) of logit edits, then write an ``EditLists``.

    ``places``, ``tokens``, ``counts``, ``biases``: its columns. Entry ``i`` is for token ``tokens[i]`` at the place
    ``places[i]``. All arguments lie on the device.
    """
    vocab = table.counts.shape[1]
    block = 1024
    if len(cleared):
        _clear_edits[(len(cleared), triton.cdiv(vocab, block))](table.counts, table.biases, cleared, vocab, BLOCK=block)
    if len(tokens):
        grid = (triton.cdiv(len(tokens), block),)
        lists = (places, tokens, counts, biases)
        _write_edits[grid](table.counts, table.biases, *lists, len(tokens), vocab, BLOCK=block)


@triton.jit
def _start_rows(
    words_ptr: tl.tensor,
    last_tokens_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    new_words_ptr: tl.tensor,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    new = tl.program_id(0)
    row = tl.load(rows_ptr + new)
    at = tl.arange(0, BLOCK)
    words = tl.load(new_words_ptr + new * WORDS + at, mask=at < WORDS)
    tl.store(words_ptr + row * WORDS + at, words, mask=at < WORDS)
    tl.store(last_tokens_ptr + row, -1)


@triton.jit
def _clear_edits(
    counts_ptr: tl.tensor, biases_ptr: tl.tensor, cleared_ptr: tl.tensor, vocab: tl.tensor, BLOCK: tl.constexpr
) -> None:
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    to = tl.load(cleared_ptr + tl.program_id(0)) * vocab + at
    tl.store(counts_ptr + to, tl.zeros([BLOCK], tl.int32), mask=at < vocab)
    tl.store(biases_ptr + to, tl.zeros([BLOCK], tl.float32), mask=at < vocab)


@triton.jit(do_not_specialize=["size"])
def _write_edits(
    counts_ptr: tl.tensor,
    biases_ptr: tl.tensor,
    places_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    new_counts_ptr: tl.tensor,
    new_biases_ptr: tl.tensor,
    size: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_one = at < size
    to = tl.load(places_ptr + at, mask=is_one) * vocab + tl.load(tokens_ptr + at, mask=is_one)
    tl.store(counts_ptr + to, tl.load(new_counts_ptr + at, mask=is_one), mask=is_one)
    tl.store(biases_ptr + to, tl.load(new_biases_ptr + at, mask=is_one), mask=is_one)
