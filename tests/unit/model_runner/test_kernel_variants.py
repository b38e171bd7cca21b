"""No step asks for a variant of a kernel that was not compiled before the first request came."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.families import FAMILIES, make_reference
from support.packed_checkpoints import packed_checkpoint
from support.poisoned_memory import PoisonedMemory
from support.recording_device import RecordingDevice

from pdserve.messages.base import pack_i32
from pdserve.messages.worker import ForwardStep, InputLogprobSpec, StepResult
from pdserve.model_runner.batch import scored_logits
from pdserve.model_runner.engines import load, load_torch
from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.engines.loaded import LoadedModel
from pdserve.model_runner.loader import open_packed, weight_loader
from pdserve.model_runner.steps import device_executor
from pdserve.model_runner.steps.measure_steps import measure_steps
from pdserve.model_runner.steps.step_runner import PendingStep, StepRunner
from pdserve.model_runner.steps.warm_up import warm_up
from pdserve.server.options import ServerOptions
from tests.unit.model_runner.test_kernels_engine import CONTEXT, VOCAB, save_model
from tests.unit.model_runner.test_native_steps import make_row

pytest.importorskip("triton")
from support.kernel_variants import variants_asked_for

from pdserve.model_runner.ops.triton_ops import TritonOps
from pdserve.model_runner.sampling.device.triton_sampler import TritonSampler

ROWS, PAGE = 21, 16
SIZES = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 1, "num_attention_heads": 3}
SIZES |= {"num_key_value_heads": 1, "head_dim": 32}


@pytest.fixture
def asked() -> Iterator[set[tuple[str, str]]]:
    with variants_asked_for() as asked:
        yield asked


def make_steps(
    folder: Path, monkeypatch: pytest.MonkeyPatch, device: RecordingDevice | None = None, **options: object
) -> tuple[StepRunner, LoadedModel]:
    """Make steps by Triton's attention, operations and sampler, on a device that aligns memory as CUDA does."""
    device = device or RecordingDevice(PoisonedMemory(behind=0))
    monkeypatch.setattr(load, "open_device", lambda *args, **more: device)
    monkeypatch.setattr(load, "choose_attention_backend", lambda *args: "triton")
    for module in (weight_loader, device_executor):
        monkeypatch.setattr(module, "choose_ops", lambda device: TritonOps())
    monkeypatch.setattr(device_executor, "choose_sampler", TritonSampler)
    if "max_total_tokens" not in options:
        # Launches do nothing: steps that are measured would take poison for tokens.
        monkeypatch.setattr(load_torch, "measure_step_bytes", lambda *_args: 0)
    plain = {"dtype": "bfloat16", "device": "cpu", "page_size": PAGE, "max_total_tokens": ROWS * CONTEXT}
    plain |= {"max_running_requests": ROWS, "cuda_graph_bs": "1,4"}
    model = load_model(ServerOptions(model_path=str(folder), **(plain | options)))
    return Unread(model, ROWS), model


class Unread(StepRunner):
    """Results mean nothing: nothing was launched."""

    def collect(self, launched: PendingStep) -> StepResult:
        """See the base class."""
        self.settle()
        return StepResult(launched.step.step_id, b"", 1.0)


def start(steps: StepRunner, model: LoadedModel) -> None:
    """Warm up as the worker does before it is ready."""
    warm_up(steps, ROWS, model.context_length, PAGE, every_variant=True)
    steps.capture_graphs()


def draw_step(rng: random.Random, vocab: int = VOCAB) -> ForwardStep:
    """Draw a step of any number of prompts, pieces of prompts and decodes together, with all kinds of sampling."""
    rows = rng.sample(range(ROWS), rng.choice([1, 1, 2, 3, rng.randint(1, ROWS)]))
    rng.shuffle(rows)
    lens = [rng.choice([1, rng.choice([2, 3, 16, rng.randint(2, 60)])]) for _ in rows]
    if rng.random() < 0.3:
        lens = [1] * len(rows)
    starts = [rng.choice([0, rng.randint(0, CONTEXT - 61)]) for _ in rows]
    kinds = [
        {},
        {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1.0, "top_k": 5, "logprobs": rng.randint(0, 20)},
        {"temperature": 1.2, "frequency_penalty": 0.7, "history": pack_i32([1] * rng.randint(1, 30))},
        {"logit_bias": {3: 40.0, 5: 1.0}, "min_new_tokens": 4, "stop_ids": (3,)},
    ]
    sampled = [int(rng.random() < 0.8) for _ in rows]
    specs = [
        InputLogprobSpec(i, 0, pack_i32([1] * (length - 1)), rng.randint(0, 5))
        for i, length in enumerate(lens)
        if length > 1 and rng.random() < 0.15
    ]
    spans = [np.arange(begin, begin + length) for begin, length in zip(starts, lens, strict=True)]
    return ForwardStep(
        step_id=1,
        rows=pack_i32(rows),
        starts=pack_i32(starts),
        q_lens=pack_i32(lens),
        use_last=pack_i32([int(length == 1) for length in lens]),
        sample=pack_i32(sampled),
        input_ids=pack_i32([rng.randrange(vocab) for length in lens for _ in range(length)]),
        out_cache_loc=pack_i32(np.concatenate([PAGE + row * CONTEXT + s for row, s in zip(rows, spans, strict=True)])),
        new_rows=[make_row(row, begin + 1, **rng.choice(kinds)) for row, begin in zip(rows, starts, strict=True)],
        input_logprobs=specs,
    )


def check(steps: StepRunner, asked: set[tuple[str, str]], seed: int, count: int, vocab: int = VOCAB) -> None:
    warm = set(asked)
    rng = random.Random(seed)
    for _ in range(count):
        steps.run(draw_step(rng, vocab))
    new = {(name, key) for name, key in asked - warm}
    assert not new, "\n".join(f"{name}: {key}" for name, key in sorted(new))


@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3-moe", "gpt-oss", "deepseek-v3"))]
)
def test_steps_ask_for_no_variant_that_is_not_warm(asked, tmp_path: Path, monkeypatch, name: str) -> None:
    if name in FAMILIES:
        make_reference(name).save_pretrained(tmp_path)
    else:
        save_model(tmp_path, name)
    steps, model = make_steps(tmp_path, monkeypatch)
    start(steps, model)
    check(steps, asked, seed=1, count=40, vocab=model.vocab_size)


def test_prompts_that_are_scored_in_pieces_ask_for_no_variant_that_is_not_warm(
    asked, tmp_path: Path, monkeypatch
) -> None:
    make_reference("qwen3").save_pretrained(tmp_path)
    monkeypatch.setattr(scored_logits, "ROWS", 5)
    steps, model = make_steps(tmp_path, monkeypatch)
    start(steps, model)
    check(steps, asked, seed=2, count=40, vocab=model.vocab_size)


@pytest.mark.parametrize("form", ["fp8 blocks of 128", pytest.param("awq", marks=pytest.mark.slow)])
def test_products_with_packed_weights_have_tiles_for_few_and_many_tokens(
    asked, tmp_path: Path, monkeypatch, form: str
) -> None:
    (tmp_path / "plain").mkdir()
    make_reference("llama", **SIZES).save_pretrained(tmp_path / "plain")
    folder = packed_checkpoint(tmp_path / "plain", tmp_path, form).source.path
    monkeypatch.setattr(open_packed, "triton_refusal", lambda device: None)
    steps, model = make_steps(folder, monkeypatch, quantization="packed")
    start(steps, model)
    assert {name for name, _ in asked} >= {"_int4_product" if form == "awq" else "_fp8_product"}
    check(steps, asked, seed=2, count=40, vocab=model.vocab_size)


def test_steps_are_measured_when_nothing_is_left_to_compile(asked, tmp_path: Path, monkeypatch) -> None:
    steps, model = make_steps(save_model(tmp_path, "qwen3"), monkeypatch)
    start(steps, model)
    warm = set(asked)
    measure_steps(steps, ROWS, model.context_length, PAGE)
    assert asked == warm
