"""The native model, the KV pool and the torch attention backend together: batches, prefixes, types and pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.families import make_reference
from support.model_harness import CONTEXT, PAGE, VOCAB, Harness, close, draw, draw_weights, reference_logits
from support.passes import pool_bytes
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def llama(tmp_path: Path) -> tuple[torch.nn.Module, Path]:
    model = draw_weights(LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)))
    model.save_pretrained(tmp_path)
    return model, tmp_path


def test_mixed_batches_of_chunks_and_decodes(llama: tuple[torch.nn.Module, Path]) -> None:
    model, folder = llama
    harness = Harness(folder)
    prompts = [draw(n, seed) for seed, n in enumerate((61, 7, 30, 12))]
    expected = [reference_logits(model, prompt) for prompt in prompts]
    steps = [  # (row, tokens of it) an entry: chunks that begin in a page, one-token chunks, decodes, all together
        [(0, 5)],
        [(1, 6), (0, 20)],
        [(0, 1), (2, 11), (1, 1), (3, 4)],
        [(2, 1), (3, 1)],
        [(3, 7), (0, 34), (2, 16)],
        [(0, 1), (2, 2)],
    ]
    done = [0] * 4
    for step in steps:
        entries = [(row, prompts[row][done[row] : done[row] + n]) for row, n in step]
        wanted = torch.cat([expected[row][done[row] : done[row] + n] for row, n in step])
        close(harness.forward(*entries), wanted)
        for row, n in step:
            done[row] += n
    assert done == [len(prompt) for prompt in prompts[:1]] + [7, 30, 12]


def test_a_shared_prefix_serves_two_rows(llama: tuple[torch.nn.Module, Path]) -> None:
    model, folder = llama
    harness = Harness(folder)
    prefix = draw(5 * PAGE, 1)
    first, second = prefix + draw(9, 2), prefix + draw(140, 3)
    harness.forward((4, first))
    harness.share(4, 6, len(prefix))
    close(harness.forward((6, second[len(prefix) :])), reference_logits(model, second)[len(prefix) :])
    close(harness.forward((4, [5])), reference_logits(model, [*first, 5])[-1:])


def test_a_former_owners_nan_does_not_leak(llama: tuple[torch.nn.Module, Path]) -> None:
    model, folder = llama
    harness, tokens = Harness(folder), draw(23, 5)
    pool_bytes(harness.runner.pools.pool)[1:].fill_(0xFF)
    expected = reference_logits(model, tokens)
    close(harness.forward((0, tokens[:6]), (1, tokens[:1])), torch.cat((expected[:6], expected[:1])))
    for position in range(6, 23):
        entries = (0, tokens[position : position + 1]), (1, tokens[position - 5 : position - 4])
        close(harness.forward(*entries), torch.stack((expected[position], expected[position - 5])))


def test_only_the_wanted_logits_in_their_order(llama: tuple[torch.nn.Module, Path]) -> None:
    model, folder = llama
    tokens = draw(20, 6)
    expected = reference_logits(model, tokens)
    logits = Harness(folder).forward((0, tokens), logits_at=[19, 3])
    assert logits.dtype == torch.float32
    close(logits, expected[[19, 3]])
    assert Harness(folder).forward((0, tokens), logits_at=[]).shape == (0, VOCAB)


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"), [("bfloat16", "auto"), ("float16", "auto"), ("float32", "bfloat16")]
)
def test_short_types_stay_near_float32(llama: tuple[torch.nn.Module, Path], dtype: str, kv_cache_dtype: str) -> None:
    model, folder = llama
    harness, tokens = Harness(folder, dtype=dtype, kv_cache_dtype=kv_cache_dtype), draw(40, 8)
    expected = reference_logits(model, tokens)
    logits = torch.cat((harness.forward((0, tokens[:39])), harness.forward((0, tokens[39:]))))
    error = (logits - expected).square().mean().sqrt() / expected.std()
    assert 0 < error < 0.03
    assert harness.runner.pools.pool.group.dtype == {"auto": dtype}.get(kv_cache_dtype, kv_cache_dtype)


def test_longrope_of_a_short_context(tmp_path: Path) -> None:
    model = make_reference("phi3-long")
    model.save_pretrained(tmp_path)
    short, long, tokens = Harness(tmp_path, context_length=64), Harness(tmp_path), draw(64, 3)
    expected = reference_logits(model, tokens)
    close(torch.cat((short.forward((0, tokens[:40])), short.forward((0, tokens[40:])))), expected)
    assert (long.forward((0, tokens)) - expected).abs().max() > 0.1
    assert short.runner.fingerprint != long.runner.fingerprint


def test_pages_are_contiguous_spans_of_the_region(llama: tuple[torch.nn.Module, Path]) -> None:
    """What the transfer engine sends as bytes of page p is what attention reads as page p."""
    _, folder = llama
    harness = Harness(folder, disaggregation_transfer_backend="shm")
    runner, tokens = harness.runner, draw(PAGE, 9)
    expected = harness.forward((0, [*tokens, 1]))[-1:]
    page, target = int(harness.table[0, 0]) // PAGE, 90
    size = runner.pools.layout.page_bytes
    assert runner.pools.region is not None
    assert runner.pools.region.fd is not None
    assert runner.pools.region.nbytes == (runner.pools.max_total_tokens // PAGE + 1) * size
    runner.pools.region.buffer[target * size : (target + 1) * size] = runner.pools.region.buffer[
        page * size : (page + 1) * size
    ]
    harness.table[1, :PAGE] = torch.arange(PAGE) + target * PAGE
    harness._lens[1] = PAGE
    close(harness.forward((1, [1])), expected)
