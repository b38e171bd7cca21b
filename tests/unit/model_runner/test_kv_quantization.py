"""KV of one byte an element: how heads are rounded, and models over such pools by both engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.families import make_reference
from support.model_harness import CONTEXT, PAGE, VOCAB, Harness, draw, reference_logits
from support.passes import pool_bytes
from transformers import LlamaConfig, LlamaForCausalLM

from pdserve.model_files.errors import UnsupportedModel
from pdserve.model_runner.cpu_engine.build import levels_here
from pdserve.model_runner.device.choice import choose_kv_dtype
from pdserve.model_runner.kv.layout import KVShape, make_layout
from pdserve.model_runner.kv.quantization import LARGEST, dequantize, pack_heads, quantize, unpack_heads

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
# Half a step of the largest number, as a share of it; of a float, half a step of any.
NAMES = {"int8": 0.5 / 127, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3}
ENGINES = ["torch", pytest.param("cpu", marks=pytest.mark.skipif(not levels_here(), reason="no kernels here"))]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).eval()
    # Smaller weights than other tests draw: those make the rounding of a key a hundred times as large.
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
    model.save_pretrained(folder)
    return model, folder


def harness(folder: Path, engine: str, name: str) -> Harness:
    return Harness(folder, attention_backend=engine, kv_cache_dtype=name)


@pytest.mark.parametrize("name", NAMES)
def test_an_element_is_off_by_half_a_step(name: str) -> None:
    torch.manual_seed(1)
    dtype = getattr(torch, choose_kv_dtype(name, "float32"))
    x = torch.randn(500, 3, 64, dtype=torch.float64) * 10 ** torch.empty(500, 3, 1).uniform_(-20, 20)
    x = x.float()
    rounded = quantize(x, dtype)
    error = (rounded.elements.double() * rounded.scales.double()[..., None] - x.double()).abs()
    largest = x.double().abs().amax(-1, keepdim=True)
    # Near nothing, floats are as far apart as whole numbers are.
    bound = largest * NAMES[name] if dtype == torch.int8 else x.double().abs() * NAMES[name] + largest * 2**-16
    assert (error <= bound * 1.0001).all()
    assert (error > bound * 0.85).any()
    whole = dequantize(*rounded).abs().amax(-1, keepdim=True)
    torch.testing.assert_close(whole.double(), largest, rtol=1e-6, atol=0)
    assert torch.equal(unpack_heads(pack_heads(x, dtype), dtype), dequantize(*rounded))


@pytest.mark.parametrize("dtype", LARGEST)
def test_what_has_no_scale(dtype: torch.dtype) -> None:
    x = torch.ones(5, 16)
    x[0], x[1] = 0.0, 1e-42
    x[2, 3], x[3, 15], x[4, 0] = torch.nan, torch.inf, -torch.inf
    elements, scales = quantize(x, dtype)
    assert scales[:2].tolist() == [0.0, 0.0]
    assert scales[2:].isnan().all()
    assert not elements.view(torch.uint8).any()


def test_a_token_takes_what_the_layout_says() -> None:
    shape = KVShape(30, 3, 64)
    taken = {name: make_layout(shape, 16, choose_kv_dtype(name, "bfloat16")).page_bytes // 16 for name in NAMES}
    assert set(taken.values()) == {30 * 2 * 3 * (64 + 4)}
    assert make_layout(shape, 16, choose_kv_dtype("bf16", "float32")).page_bytes // 16 == 30 * 2 * 3 * 64 * 2
    assert make_layout(shape, 16, choose_kv_dtype("auto", "float32")).groups[0].scale_dtype is None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "limit"), [("int8", 0.012), ("fp8_e4m3", 0.06), ("fp8_e5m2", 0.12)])
def test_models_stay_near_float32(llama: tuple[torch.nn.Module, Path], engine: str, name: str, limit: float) -> None:
    model, folder = llama
    runner, tokens = harness(folder, engine, name), draw(60, 8)
    expected = reference_logits(model, tokens)
    logits = torch.cat([runner.forward((0, tokens[:50])), *(runner.forward((0, [token])) for token in tokens[50:])])
    error = (logits - expected).square().mean().sqrt() / expected.std()
    assert 0 < error < limit


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("first", "second"), [("torch", "cpu"), ("cpu", "torch")])
@pytest.mark.skipif(not levels_here(), reason="no kernels here")
def test_one_engine_goes_on_where_the_other_began(
    llama: tuple[torch.nn.Module, Path], first: str, second: str, name: str
) -> None:
    """Engines differ in the last bits of float32, which makes an element of 8 bits another one now and then.

    That is one prompt in eight with these, and other ones on other processors. So one of six has to agree.
    """
    began, goes_on, alone = (harness(llama[1], engine, name) for engine in (first, second, second))
    errors = []
    for row in range(6):
        tokens = draw(100, 3 + row)
        began.forward((row, tokens[:70]))
        goes_on.take_over(row, began.hand_over(row))
        alone.forward((row, tokens[:70]))
        steps = [(one.forward((row, [token])) for one in (goes_on, alone)) for token in tokens[70:]]
        errors.append(max((ours - expected).abs().max().item() for ours, expected in steps))
        if errors[-1] < 1e-4:
            return
    pytest.fail(f"logits differ by {errors}")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.skipif(not levels_here(), reason="no kernels here")
def test_chunks_prefixes_and_company_change_no_bit(llama: tuple[torch.nn.Module, Path], dtype: str, name: str) -> None:
    folder, tokens = llama[1], draw(90, 4)
    options = {"attention_backend": "cpu", "kv_cache_dtype": name, "dtype": dtype}
    whole = Harness(folder, **options).forward((0, tokens))
    other = Harness(folder, **options)
    chunks = [other.forward((0, tokens[:7]), (1, draw(30, 5)))[:7]]
    chunks += [other.forward((1, draw(3, 6)), (0, tokens[7:50]))[3:], other.forward((0, tokens[50:]))]
    assert torch.equal(torch.cat(chunks), whole)
    shared = 5 * PAGE
    other.share(0, 2, shared)
    assert torch.equal(other.forward((2, tokens[shared:])), whole[shared:])
    again = Harness(folder, **options)
    again.forward((3, tokens[:60]))
    assert torch.equal(torch.cat([again.forward((3, [token])) for token in tokens[60:]]), whole[60:])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_former_owners_nan_does_not_leak(llama: tuple[torch.nn.Module, Path], engine: str, name: str) -> None:
    """Neither within an instance nor to the one that the pages are handed to."""
    folder, tokens = llama[1], draw(23, 5)
    clean, dirty = harness(folder, engine, name), harness(folder, engine, name)
    pool_bytes(dirty.runner.pools.pool)[1:].fill_(0xFF)
    for ids in (tokens[:6], *([token] for token in tokens[6:])):
        assert torch.equal(dirty.forward((0, ids)), clean.forward((0, ids)))


@pytest.mark.skipif(not levels_here(), reason="no kernels here")
def test_pages_that_are_begun_leave_without_a_former_owners_nan(llama: tuple[torch.nn.Module, Path]) -> None:
    folder, tokens = llama[1], draw(PAGE + 1, 5)
    sender = Harness(folder, attention_backend="cpu", kv_cache_dtype="fp8_e4m3", disaggregation_mode="prefill")
    pool_bytes(sender.runner.pools.pool)[1:].fill_(0xFF)
    sender.forward((0, tokens))
    receiver = harness(folder, "torch", "fp8_e4m3")
    receiver.take_over(0, sender.hand_over(0))
    assert receiver.forward((0, [1])).isfinite().all()


def test_latent_rows_are_not_quantised(tmp_path: Path) -> None:
    make_reference("deepseek-v3").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="int8 is not supported for latent attention"):
        Harness(tmp_path, kv_cache_dtype="int8")
