"""Memory that is allocated after the KV pool is in the budget before it, on a device that counts its memory.

Attention, operations and sampler are Triton's. Their launches do nothing (``support/kernel_variants.py``), so memory is
taken as on a GPU, and results mean nothing.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from support import poisoned_memory
from support.families import make_reference
from support.poisoned_memory import PoisonedMemory
from support.recording_device import RecordingDevice

from pdserve.messages.base import pack_i32, unpack_i32
from pdserve.messages.requests import MAX_TOP_LOGPROBS
from pdserve.messages.worker import ForwardStep, InputLogprobSpec
from pdserve.model_runner.attention import torch_backend
from pdserve.model_runner.attention.torch_backend import TorchAttention
from pdserve.model_runner.batch import scored_logits
from pdserve.model_runner.engines import load
from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.errors import NotEnoughMemory
from pdserve.model_runner.kv import pool as pool_file
from pdserve.model_runner.page_mover import NoPageMover
from pdserve.model_runner.steps.measure_steps import measure_steps
from pdserve.model_runner.steps.step_memory import GRAPH_BYTES, StepSizes
from pdserve.model_runner.steps.step_queue import StepQueue
from pdserve.model_runner.steps.step_runner import StepRunner
from pdserve.model_runner.steps.warm_up import warm_up
from pdserve.runtime.machine.memory import Memory
from pdserve.server.options import ServerOptions
from tests.unit.model_runner.test_native_steps import make_row, make_step

pytest.importorskip("triton")
from support.kernel_variants import variants_asked_for

from tests.unit.model_runner import test_kernel_variants
from tests.unit.model_runner.test_kernel_variants import PAGE, ROWS, draw_step, make_steps

CHUNK, VOCAB = 160, 4096
OPTIONS = {"max_total_tokens": None, "chunked_prefill_size": CHUNK, "cuda_graph_bs": "4"}


@pytest.fixture(autouse=True)
def launches_do_nothing() -> Iterator[None]:
    with variants_asked_for():
        yield


@pytest.fixture
def device(monkeypatch) -> Iterator[RecordingDevice]:
    """What no launch has written is 0, not poison: a token's number."""
    monkeypatch.setattr(poisoned_memory, "POISON", 0)
    with RecordingDevice(PoisonedMemory(behind=0)) as device:
        yield device


class Instance:
    """An instance that has started as the worker does."""

    def __init__(self, folder: Path, device: RecordingDevice, monkeypatch: pytest.MonkeyPatch, **options) -> None:
        self._device = device
        make_pool = pool_file.make_pool

        def marked(*args, **more):
            # The first pools are those that steps are measured with, the last ones serve.
            self.before_pools = device.count_memory()
            self.at_start = self.at_start or self.before_pools
            pool = make_pool(*args, **more)
            self._before = device.count_memory()
            return pool

        self.at_start = self.before_pools = 0
        """Memory in use before the first and before the last pool was made."""
        monkeypatch.setattr(pool_file, "make_pool", marked)
        self.steps, self.model = make_steps(folder, monkeypatch, device, **(OPTIONS | options))
        warm_up(self.steps, ROWS, self.model.context_length, PAGE, every_variant=True)
        self.steps.capture_graphs()
        measure_steps(self.steps, ROWS, self.model.context_length, PAGE, rehearse=True)

    @property
    def taken(self) -> int:
        """Bytes at most since the pools were there."""
        return self._device.most - self._before

    def serve(self, steps: Iterable[ForwardStep] | None = None) -> None:
        """Run ``steps``, one of them ahead; None: steps of all kinds, then the largest that there can be."""
        queue = StepQueue(self.steps, NoPageMover(), ahead=1)
        if steps is None:
            steps = [*random_steps(self.model.vocab_size), *largest_steps(self.model.context_length)]
        for step in steps:
            queue.launch(step)
            while queue.is_full:
                queue.collect()


def random_steps(vocab_size: int) -> Iterator[ForwardStep]:
    """Yield the steps of ``draw_step`` with no more prompt tokens than options allow."""
    rng = random.Random(1)
    for _ in range(40):
        step = draw_step(rng, vocab_size)
        if sum(n for n in unpack_i32(step.q_lens).tolist() if n > 1) <= CHUNK:
            yield step


def largest_steps(context_length: int, chunk: int = CHUNK, scored_tokens: int = CHUNK) -> Iterator[ForwardStep]:
    """Yield steps with ``chunk`` prompt tokens beside decodes, and steps with long contexts.

    ``scored_tokens``: prompt tokens with log-probabilities. One row wants none of its samples, and in some steps of
    decodes another one does not sample.
    """
    kinds = {"temperature": 1.0, "top_p": 0.5, "presence_penalty": 0.4, "logprobs": MAX_TOP_LOGPROBS}
    new = [make_row(row, 1, **kinds, history=pack_i32([3])) for row in range(ROWS)]
    new[2].logprobs = None
    scored = InputLogprobSpec(0, 0, pack_i32(np.zeros(scored_tokens, dtype=np.int64)), MAX_TOP_LOGPROBS)
    prompt = [(0, 0, [5] * chunk, True), *((row, 0, [row], True) for row in range(1, ROWS))]
    for _ in range(2):
        yield make_step(prompt, new_rows=new, input_logprobs=[scored])
    each = max(1, chunk // ROWS)
    yield make_step([(row, context_length - 4 - each, [7] * each, True) for row in range(ROWS)])
    for ahead in (4, 3, 2):
        yield make_step([(row, context_length - ahead, None, row != 3 or ahead == 4) for row in range(ROWS)])


def model_of(name: str, folder: Path, **changes: int) -> Path:
    make_reference(name, **changes).save_pretrained(folder)
    return folder


NAMES = ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt-oss", "deepseek-v3"))]


@pytest.mark.parametrize("name", NAMES)
def test_all_that_comes_after_the_pool_was_measured_before_it(device, tmp_path: Path, monkeypatch, name: str) -> None:
    """A buffer that is made later than the steps which are measured, or grows larger, fails this."""
    instance = Instance(model_of(name, tmp_path), device, monkeypatch)
    assert instance.before_pools == instance.at_start, "what was measured is still held"
    instance.serve()
    measured = instance.model.step_bytes - GRAPH_BYTES
    assert 0 < instance.taken <= measured
    # It is no rough guess either.
    assert instance.taken > 0.95 * measured


def test_more_graphs_than_one_take_no_more_but_for_the_drivers_part(device, tmp_path: Path, monkeypatch) -> None:
    """Graphs that were not captured for the measurement use the memory of the largest one."""
    instance = Instance(model_of("qwen3", tmp_path), device, monkeypatch, cuda_graph_bs="1,2,4")
    assert instance.model.engine.graph_sizes == (1, 2, 4)
    assert instance.taken + 3 * GRAPH_BYTES <= instance.model.step_bytes


def test_logits_that_are_copied_for_some_rows_were_measured(device, tmp_path: Path, monkeypatch) -> None:
    """Rows that do not sample, or want no log-probabilities, are left out of a copy of the others' logits.

    With few rows the copy takes less than the scores of one more row.
    """
    for module in (sys.modules[__name__], test_kernel_variants):
        monkeypatch.setattr(module, "ROWS", 64)
    few = {"max_logprobs_per_request": 1, "chunked_prefill_size": 2, "cuda_graph_bs": str(ROWS)}
    instance = Instance(model_of("qwen3", tmp_path, vocab_size=VOCAB), device, monkeypatch, **few)
    instance.serve(largest_steps(instance.model.context_length, 1, 1))
    assert 0 < instance.taken <= instance.model.step_bytes - GRAPH_BYTES


def test_a_context_that_is_scored_as_a_whole_takes_the_logits_of_a_piece(device, tmp_path: Path, monkeypatch) -> None:
    folder, taken = model_of("qwen3", tmp_path, vocab_size=VOCAB), []
    for rows in (10**6, 16):
        monkeypatch.setattr(scored_logits, "ROWS", rows)
        instance = Instance(folder, device, monkeypatch, chunked_prefill_size=-1, max_prefill_tokens=CHUNK)
        tokens = instance.model.context_length - ROWS - 4
        instance.serve(largest_steps(instance.model.context_length, tokens, tokens))
        assert 0 < instance.taken <= instance.model.step_bytes - GRAPH_BYTES
        taken.append(instance.model.step_bytes)
    # Two bytes for each logit. The states that the later logits are computed from stay in their place.
    spared = (tokens - 16) * instance.model.vocab_size * 2
    assert taken[0] - taken[1] > 0.8 * spared


class WaitingDevice(RecordingDevice):
    """A recording device for the torch backend, which waits where it likes."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with nullcontext() if self._depth else self:
            yield


@pytest.mark.parametrize("gathered", [64, 1024])
def test_contexts_that_attention_copies_were_measured(tmp_path: Path, monkeypatch, gathered: int) -> None:
    monkeypatch.setattr(poisoned_memory, "POISON", 0)
    monkeypatch.setattr(torch_backend, "MOST_LANES", gathered)
    monkeypatch.setattr(TorchAttention, "gathered_tokens", gathered)
    model_of("qwen3", tmp_path)
    with WaitingDevice(PoisonedMemory(behind=0)) as device:
        monkeypatch.setattr(load, "open_device", lambda *args, **more: device)
        options = {"attention_backend": "torch", "dtype": "float32", "device": "cpu", "page_size": PAGE}
        options |= {"max_running_requests": ROWS, "chunked_prefill_size": 16, "max_logprobs_per_request": 1}
        model = load_model(ServerOptions(model_path=str(tmp_path), **options))
        steps = StepRunner(model, ROWS)
        before, context = device.count_memory(), model.context_length
        new = [make_row(row, 1) for row in range(ROWS)]
        steps.run(make_step([(row, 0, [row], True) for row in range(ROWS)], new_rows=new))
        # Each row's context is full: first beside a prompt's end, then of decodes alone.
        decodes = [(row, context - 3, None, True) for row in range(1, ROWS)]
        steps.run(make_step([(0, context - 18, [5] * 16, True), *decodes]))
        steps.run(make_step([(0, context - 2, None, True), *decodes]))
        taken = device.most - before
    assert 0 < taken <= model.step_bytes


def test_a_pool_of_a_given_size_leaves_room_for_steps(device, tmp_path: Path, monkeypatch) -> None:
    instance = Instance(model_of("qwen3", tmp_path), device, monkeypatch, max_total_tokens=16384)
    instance.serve()
    assert 0 < instance.taken <= instance.model.step_bytes
    # Room for the pool and half of what steps take.
    taken = sum(pool.nbytes for pool in instance.model.pools.by_group) + instance.model.step_bytes // 2
    monkeypatch.setattr(device, "memory", lambda: Memory(2**30, taken))
    with pytest.raises(
        NotEnoughMemory, match=r"--max-total-tokens 16384 takes .* GiB that steps take, but .* are free"
    ):
        make_steps(tmp_path, monkeypatch, device, **(OPTIONS | {"max_total_tokens": 16384}))


def test_steps_that_do_not_fit_beside_the_weights_say_what_to_lower(device, tmp_path: Path, monkeypatch) -> None:
    def full(_run: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device, "peak", full)
    with pytest.raises(NotEnoughMemory, match=r"lower --chunked-prefill-size .*\(CUDA out of memory\)"):
        make_steps(model_of("qwen3", tmp_path), monkeypatch, device, **OPTIONS)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (256, 2048, 2048, 4096)),
        # Of several requests in one step.
        ({"chunked_prefill_size": 512, "max_logprobs_per_request": 100}, (256, 512, 512, 4096)),
        ({"max_logprobs_per_request": 1, "max_running_requests": 16}, (16, 2048, 16, 4096)),
        # Prompts that are never cut.
        ({"chunked_prefill_size": -1, "max_prefill_tokens": 1000}, (256, 4096, 4096, 4096)),
        (
            {"chunked_prefill_size": -1, "max_prefill_tokens": 1000, "max_logprobs_per_request": 100},
            (256, 4096, 1000, 4096),
        ),
        (
            {"max_running_requests": 2, "chunked_prefill_size": 10000, "max_prefill_tokens": 10000},
            (2, 8188, 8188, 4096),
        ),
    ],
)
def test_sizes_follow_from_the_options(options: dict, expected: tuple) -> None:
    assert StepSizes.of(ServerOptions(**options), "cuda", 4096) == (*expected, 0)
