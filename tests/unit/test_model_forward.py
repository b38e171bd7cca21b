"""The native model, the KV pool and the torch attention backend together, against transformers in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pdserve.model_runner.forward_batch import ForwardBatch
from pdserve.model_runner.model_runner import ModelRunner
from pdserve.runtime.options import ServerOptions

PAGE = 4
VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on busy cores would make these tests many times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_reference(name: str) -> torch.nn.Module:
    """A tiny random model of transformers; every parameter is drawn, biases and norms included."""
    torch.manual_seed(7)
    model = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
        "llama-biased": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
        "llama3": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3)),
        "linear": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LINEAR)),
        "yarn": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=YARN)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None, head_dim=16)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
    }[name]()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model.eval()


class Harness:
    """A runner over a tiny model, and rows whose pages are scattered over the pool."""

    def __init__(self, folder: Path, **options: object) -> None:
        defaults = {"dtype": "float32", "device": "cpu", "page_size": PAGE, "max_total_tokens": 96 * PAGE}
        self.runner = ModelRunner(ServerOptions(model_path=str(folder), **(defaults | options)))
        self.table = torch.full((8, 256), 10**9, dtype=torch.int32)  # what no row has mapped yet must not matter
        order = torch.randperm(96, generator=torch.Generator().manual_seed(1)) + 1
        self._free_pages = order.tolist()
        self._lens = [0] * 8

    def share(self, source: int, row: int, length: int) -> None:
        """Map the first ``length`` positions (whole pages) of ``row`` to the slots of row ``source``."""
        self.table[row, :length] = self.table[source, :length]
        self._lens[row] = length

    def forward(self, *entries: tuple[int, list[int]], logits_at: list[int] | None = None) -> torch.Tensor:
        """Compute ``(row, tokens)`` entries, each behind what its row holds; logits of all tokens, or of some."""
        starts = [self._lens[row] for row, _ in entries]
        for row, tokens in entries:
            for _ in tokens:
                self._append(row)
        spans = [torch.arange(s, s + len(t)) for s, (_, t) in zip(starts, entries, strict=True)]
        slots = [self.table[row, span] for span, (row, _) in zip(spans, entries, strict=True)]
        input_ids = torch.tensor([token for _, tokens in entries for token in tokens])
        wanted = range(len(input_ids)) if logits_at is None else logits_at
        return self.runner.forward(
            ForwardBatch(
                input_ids=input_ids,
                positions=torch.cat(spans),
                out_cache_loc=torch.cat(slots).long(),
                rows=torch.tensor([row for row, _ in entries]),
                starts=starts,
                q_lens=[len(tokens) for _, tokens in entries],
                req_to_token=self.table,
                logit_indices=torch.tensor(list(wanted), dtype=torch.int64),
            )
        )

    def _append(self, row: int) -> None:
        position = self._lens[row]
        first = position % PAGE == 0
        slot = self._free_pages.pop() * PAGE if first else int(self.table[row, position - 1]) + 1
        self.table[row, position] = slot
        self._lens[row] += 1


def reference_logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def draw(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture
def llama(tmp_path: Path) -> tuple[torch.nn.Module, Path]:
    model = make_reference("llama")
    model.save_pretrained(tmp_path)
    return model, tmp_path


@pytest.mark.parametrize("name", ["llama", "llama-biased", "llama3", "linear", "yarn", "mistral", "qwen2", "qwen3"])
def test_every_family_equals_transformers(name: str, tmp_path: Path) -> None:
    model = make_reference(name)
    model.save_pretrained(tmp_path)
    harness, tokens = Harness(tmp_path), draw(150, 3)
    expected = reference_logits(model, tokens)
    assert expected.std() > 0.3
    close(harness.forward((0, tokens[:141])), expected[:141])
    for position in range(141, 150):
        close(harness.forward((0, tokens[position : position + 1])), expected[position : position + 1])


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
    harness.runner.pool.data[1:].fill_(float("nan"))
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
    assert harness.runner.layout.dtype == {"auto": dtype}.get(kv_cache_dtype, kv_cache_dtype)


def test_pages_are_contiguous_spans_of_the_region(llama: tuple[torch.nn.Module, Path]) -> None:
    """What the transfer engine sends as bytes of page p is what attention reads as page p."""
    _, folder = llama
    harness = Harness(folder, disaggregation_transfer_backend="shm")
    runner, tokens = harness.runner, draw(PAGE, 9)
    expected = harness.forward((0, [*tokens, 1]))[-1:]
    page, target = int(harness.table[0, 0]) // PAGE, 90
    size = runner.layout.page_bytes
    assert runner.kv_region is not None
    assert runner.kv_region.fd is not None
    assert runner.kv_region.nbytes == (runner.max_total_tokens // PAGE + 1) * size
    runner.kv_region.buffer[target * size : (target + 1) * size] = runner.kv_region.buffer[
        page * size : (page + 1) * size
    ]
    harness.table[1, :PAGE] = torch.arange(PAGE) + target * PAGE
    harness._lens[1] = PAGE
    close(harness.forward((1, [1])), expected)
