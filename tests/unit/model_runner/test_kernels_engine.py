"""The CPU engine against the torch model: families, mixes of prefill and decode, threads, quantised weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.passes import forward
from transformers import (
    GlmConfig,
    GlmForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pdserve.model_files.errors import UnsupportedModel
from pdserve.model_runner.batch.forward_batch import ForwardBatch
from pdserve.model_runner.cpu_engine.build import BuildError
from pdserve.model_runner.cpu_engine.library import load_library
from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.engines.loaded import LoadedModel
from pdserve.server.options import ServerOptions

try:
    load_library()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

PAGE, VOCAB, CONTEXT, ROWS = 4, 101, 256, 6
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
}
# (row, start, q_len): a pass by columns, one by rows, a mix.
PASSES = (
    [(0, 0, 5), (1, 0, 1)],
    [(0, 5, 1), (1, 1, 1), (2, 0, 9)],
    [(3, 0, 150), (4, 0, 60)],
    [(3, 150, 1), (0, 6, 1), (4, 60, 50)],
    [(row, start, 1) for row, start in ((0, 7), (1, 2), (2, 9), (3, 151), (4, 110))],
)


def save_model(folder: Path, name: str) -> Path:
    """Save a tiny random model.

    Heads of 64 rotate as they are projected, heads of 16 and normalised ones afterwards.
    """
    torch.manual_seed(7)
    model = {
        "heads-64": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, head_dim=64)),
        "heads-16": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE | {"intermediate_size": 90}, head_dim=16)),
        "biased": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, head_dim=32, attention_bias=True, mlp_bias=True)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE | {"tie_word_embeddings": False})),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32)),
        # Neighbours in a half of each head, and fused projections.
        "glm": lambda: GlmForCausalLM(GlmConfig(**SHAPE, head_dim=32, pad_token_id=0)),
    }[name]()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
    model.save_pretrained(folder)
    return folder


def make_runner(folder: Path, backend: str, **options: object) -> LoadedModel:
    defaults = {"dtype": "float32", "device": "cpu", "page_size": PAGE, "max_total_tokens": ROWS * CONTEXT}
    return load_model(ServerOptions(model_path=str(folder), attention_backend=backend, **(defaults | options)))


def request_table() -> torch.Tensor:
    """Make a request table of whole pages that are scattered over the pool."""
    pages = torch.randperm(ROWS * CONTEXT // PAGE, generator=torch.Generator().manual_seed(1)) + 1
    slots = pages[:, None] * PAGE + torch.arange(PAGE)
    return slots.view(ROWS, CONTEXT).to(torch.int32)


def make_batch(table: torch.Tensor, entries: list[tuple[int, int, int]], all_logits: bool = True) -> ForwardBatch:
    rows, starts, q_lens = (list(column) for column in zip(*entries, strict=True))
    positions = torch.cat([torch.arange(start, start + q_len) for _, start, q_len in entries])
    row_of_token = torch.repeat_interleave(torch.tensor(rows), torch.tensor(q_lens))
    ids = (positions * 31 + row_of_token * 7) % VOCAB
    ends = torch.tensor(q_lens).cumsum(0)
    return ForwardBatch(
        input_ids=ids,
        positions=positions,
        out_cache_loc=table[row_of_token, positions].long(),
        rows=torch.tensor(rows),
        starts=starts,
        q_lens=q_lens,
        req_to_token=table,
        logit_indices=torch.arange(len(ids)) if all_logits else ends - 1,
    )


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield int(request.param)
    torch.set_num_threads(before)


def run_all(runner: LoadedModel) -> list[torch.Tensor]:
    table = request_table()
    return [forward(runner.engine, make_batch(table, entries)).clone() for entries in PASSES]


@pytest.mark.sample(3)
@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("name", ["heads-64", "heads-16", "biased", "qwen2", "qwen3", "glm"])
def test_float32_is_the_torch_model(tmp_path: Path, name: str, threads: int) -> None:
    folder = save_model(tmp_path, name)
    runner = make_runner(folder, "cpu")
    assert runner.engine.attention_backend == "cpu"
    for ours, expected in zip(run_all(runner), run_all(make_runner(folder, "torch")), strict=True):
        # Sums in another order, through three layers.
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "float32"])
def test_bfloat16_is_as_close_to_float32_as_torch_is(tmp_path: Path, kv_cache_dtype: str, threads: int) -> None:
    folder = save_model(tmp_path, "heads-64")
    exact = run_all(make_runner(folder, "torch"))
    ours = run_all(make_runner(folder, "cpu", dtype="bfloat16", kv_cache_dtype=kv_cache_dtype))
    theirs = run_all(make_runner(folder, "torch", dtype="bfloat16"))
    for logits, reference, truth in zip(ours, theirs, exact, strict=True):
        assert (logits - truth).square().mean() <= 1.2 * (reference - truth).square().mean()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_a_token_does_not_depend_on_the_batch(tmp_path: Path, dtype: str, threads: int) -> None:
    folder = save_model(tmp_path, "heads-64")
    together, alone = make_runner(folder, "cpu", dtype=dtype), make_runner(folder, "cpu", dtype=dtype)
    table = request_table()
    for entries in PASSES:
        batched = forward(together.engine, make_batch(table, entries, all_logits=False)).clone()
        single = [forward(alone.engine, make_batch(table, [entry], all_logits=False)).clone() for entry in entries]
        assert torch.equal(batched, torch.cat(single))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_quantised_weights_are_near(tmp_path: Path, quantization: str, threads: int) -> None:
    folder = save_model(tmp_path, "heads-64")
    exact = run_all(make_runner(folder, "torch"))
    ours = run_all(make_runner(folder, "cpu", dtype="bfloat16", quantization=quantization))
    for logits, truth in zip(ours, exact, strict=True):
        noise = (logits - truth).square().mean() / truth.square().mean()
        assert noise < {"int8": 0.002, "int4": 0.1}[quantization]


def test_a_pass_without_logits(tmp_path: Path) -> None:
    runner = make_runner(save_model(tmp_path, "heads-64"), "cpu")
    batch = make_batch(request_table(), [(0, 0, 3)])
    batch.logit_indices = torch.empty(0, dtype=torch.int64)
    assert forward(runner.engine, batch).shape == (0, VOCAB)


def test_unknown_token_is_refused(tmp_path: Path) -> None:
    runner = make_runner(save_model(tmp_path, "heads-64"), "cpu")
    batch = make_batch(request_table(), [(0, 0, 3)])
    batch.input_ids[1] = VOCAB
    with pytest.raises(IndexError, match=str(VOCAB)):
        forward(runner.engine, batch)


def test_blocks_of_a_file_need_a_gguf_file(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "heads-64")
    with pytest.raises(UnsupportedModel, match="gguf"):
        make_runner(folder, "cpu", quantization="gguf")
    with pytest.raises(UnsupportedModel, match="kernels"):
        make_runner(folder, "torch", quantization="int8")
