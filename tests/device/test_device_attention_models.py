"""Models on Triton's attention, in its interpreter, beside the same models on torch's: logits, and greedy tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.families import make_reference
from support.model_harness import PAGE, Harness, draw
from support.triton_device import INTERPRETED

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="rows of the harness lie on the CPU"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.mark.parametrize(
    ("family", "kv_cache_dtype"),
    [
        ("gemma2", "auto"),  # windows and caps
        pytest.param("deepseek-v2", "auto", marks=pytest.mark.slow),
        pytest.param("llama", "int8", marks=pytest.mark.slow),
        pytest.param("llama", "auto", marks=pytest.mark.slow),
        pytest.param("llama-odd", "auto", marks=pytest.mark.slow),
        pytest.param("gemma3", "fp8_e4m3", marks=pytest.mark.slow),
        pytest.param("gpt-oss", "auto", marks=pytest.mark.slow),
        pytest.param("mistral-window", "fp8_e5m2", marks=pytest.mark.slow),
    ],
)
def test_logits_and_greedy_tokens_are_those_of_torch(family: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    make_reference(family, num_hidden_layers=2).save_pretrained(tmp_path)
    # A difference in the last bit of a key may become a whole step of what it is rounded to.
    tolerance = 1e-5 if kv_cache_dtype == "auto" else 2e-3
    torch_model, triton_model = (
        Harness(tmp_path, attention_backend=name, kv_cache_dtype=kv_cache_dtype) for name in ("torch", "triton")
    )
    prompts = [draw(n, n) for n in (29, 9)]
    passes = [[(0, prompts[0][:12])], [(0, prompts[0][12:]), (1, prompts[1])]]
    for step in range(5):
        if step == 3:
            # A third row goes on from pages of the first.
            for harness in (torch_model, triton_model):
                harness.share(0, 2, 5 * PAGE)
            passes[step].append((2, draw(7, 2)))
        expected, logits = (harness.forward(*passes[step]) for harness in (torch_model, triton_model))
        scale = expected.abs().max()
        torch.testing.assert_close(logits / scale, expected / scale, atol=tolerance, rtol=tolerance)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
        if step > 0:
            ends = torch.tensor([len(tokens) for _, tokens in passes[step]]).cumsum(0) - 1
            chosen = expected.argmax(-1)[ends].tolist()
            passes.append([(row, [token]) for (row, _), token in zip(passes[step], chosen, strict=True)])
