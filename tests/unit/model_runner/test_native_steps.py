"""The common step in one call, against the general way: the same tokens, tables and pages, whatever the steps are."""

from __future__ import annotations

import itertools
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import sampler_reference
from support.machine import limit
from support.passes import pool_bytes

from pdserve.messages.base import pack_i32, unpack_i32
from pdserve.messages.worker import ForwardStep, InputLogprobSpec, RowInit
from pdserve.model_runner.cpu_engine.build import BuildError
from pdserve.model_runner.cpu_engine.library import load_library
from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.engines.loaded import LoadedModel
from pdserve.model_runner.steps.common_steps import ALL_GENERAL
from pdserve.model_runner.steps.native_steps import NativeSteps
from pdserve.model_runner.steps.step_runner import StepRunner
from pdserve.runtime.layers_done import LayersDone
from pdserve.server.options import ServerOptions
from tests.unit.model_runner.test_kernels_engine import CONTEXT, VOCAB, save_model

try:
    load_library()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

PAGE, ROWS = 16, 6


def make_model(folder: Path, **options: Any) -> LoadedModel:
    defaults = {"dtype": "bfloat16", "device": "cpu", "page_size": PAGE, "max_total_tokens": ROWS * CONTEXT}
    return load_model(ServerOptions(model_path=str(folder), **(defaults | options)))


def make_row(row: int, prompt_len: int, **changes: Any) -> RowInit:
    return sampler_reference.make_row(row, prompt_len, **({"seed": row, "temperature": 0.0} | changes))


def slots_of(row: int, start: int, count: int) -> np.ndarray:
    """Row ``row`` owns every sixth page, so that neighbouring pages belong to others."""
    positions = np.arange(start, start + count)
    return ((positions // PAGE) * ROWS + row + 1) * PAGE + positions % PAGE


def make_step(entries: list[tuple[int, int, list[int] | None, bool]], **extra: Any) -> ForwardStep:
    """Make a step of entries (row, start, tokens or None for the row's last one, sample)."""
    lens = [1 if tokens is None else len(tokens) for _, _, tokens, _ in entries]
    spans = [slots_of(row, start, n) for (row, start, _, _), n in zip(entries, lens, strict=True)]
    return ForwardStep(
        step_id=1,
        rows=pack_i32([entry[0] for entry in entries]),
        starts=pack_i32([entry[1] for entry in entries]),
        q_lens=pack_i32(lens),
        use_last=pack_i32([entry[2] is None for entry in entries]),
        sample=pack_i32([entry[3] for entry in entries]),
        input_ids=pack_i32([token for entry in entries for token in (entry[2] or [0])]),
        out_cache_loc=pack_i32(np.concatenate(spans)),
        **extra,
    )


def random_steps(seed: int) -> list[ForwardStep]:
    """Make steps of requests that come, are prefilled in pieces, decode, and leave their rows to others.

    Some are sampled at random.
    """
    rng = random.Random(seed)
    steps, rows = [], dict[int, list[int]]()
    for _ in range(25):
        entries, new = [], []
        for row in rng.sample(range(ROWS), rng.randint(1, ROWS)):
            if row not in rows or rows[row][0] + 60 > CONTEXT or rng.random() < 0.1:
                rows[row] = [0, rng.randint(1, 90)]
                at_random = {"temperature": rng.choice([0.0, 0.8]), "top_k": rng.choice([-1, 5]), "top_p": 0.9}
                new.append(make_row(row, rows[row][1], **at_random))
            start, prompt_len = rows[row]
            left = prompt_len - start
            count = rng.randint(1, left) if left > 0 else 1
            tokens = [rng.randrange(VOCAB) for _ in range(count)] if left > 0 else None
            entries.append((row, start, tokens, start + count >= prompt_len))
            rows[row][0] += count
        steps.append(make_step(entries, new_rows=new))
    return steps


@pytest.fixture(scope="module", params=["heads-64", "heads-16"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.mark.parametrize("mode", ["unified", "prefill"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("bfloat16", "auto"), ("float32", "auto"), ("bfloat16", "int8"), ("float32", "fp8_e5m2")]
)
def test_steps_are_those_of_the_general_way(folder: Path, dtype: str, kv_dtype: str, mode: str) -> None:
    models = [make_model(folder, dtype=dtype, kv_cache_dtype=kv_dtype, disaggregation_mode=mode) for _ in range(2)]
    ours, general = (StepRunner(model, ROWS) for model in models)
    general.executor.common = ALL_GENERAL
    for model in models:
        # What former owners leave in a page.
        pool_bytes(model.pools.pool)[1:].fill_(0xFF)
    for step in random_steps(11):
        expected = general.run(step)
        result = ours.run(step)
        assert unpack_i32(result.next_tokens).tolist() == unpack_i32(expected.next_tokens).tolist()
        assert result.bad_entries == expected.bad_entries == []
    assert np.array_equal(ours.executor.req_to_token, general.executor.req_to_token)
    assert np.array_equal(ours.executor.rows.last_tokens, general.executor.rows.last_tokens)
    assert torch.equal(*(pool_bytes(model.pools.pool) for model in models))


def test_what_asks_for_more_than_tokens_goes_the_general_way(folder: Path) -> None:
    runner = StepRunner(make_model(folder), ROWS)
    native = runner.executor.common
    assert isinstance(native, NativeSteps)
    special = {
        "logprobs": {"logprobs": 2},
        "penalties": {"repetition_penalty": 1.5, "history": pack_i32([1, 2, 3])},
        "too short": {"min_new_tokens": 2, "stop_ids": (4,)},
    }
    for changes in special.values():
        runner._apply(step := make_step([(0, 0, [1, 2, 3], True)], new_rows=[make_row(0, 3, **changes)]))
        assert native.run(step) is None
    runner._apply(plain := make_step([(0, 0, [1, 2, 3], True)], new_rows=[make_row(0, 3)]))
    assert native.run(plain) is not None
    scored = make_step([(0, 0, [1, 2, 3], True)], input_logprobs=[InputLogprobSpec(0, 0, pack_i32([2]), 1)])
    assert native.run(scored) is None


def bad_steps() -> dict[str, ForwardStep]:
    step = make_step([(0, 0, [1, 2, 3], True), (1, 0, [4], True)])

    def changed(**fields: Any) -> ForwardStep:
        parts = {name: pack_i32(values) for name, values in fields.items()}
        return ForwardStep(**({f: getattr(step, f) for f in step.__struct_fields__} | parts))

    return {
        "a row that is not there": changed(rows=[0, ROWS]),
        "a negative start": changed(starts=[-1, 0]),
        "beyond the context": changed(starts=[CONTEXT - 2, 0]),
        "too few tokens": changed(q_lens=[2, 1]),
        "too many tokens": changed(q_lens=[3, 2]),
        "an empty entry": changed(q_lens=[4, 0]),
        "a slot outside the pool": changed(out_cache_loc=[16, 17, 18, (ROWS * CONTEXT) + PAGE]),
        "a token outside the vocabulary": changed(input_ids=[1, 2, VOCAB, 4]),
        "a last token before there is one": changed(use_last=[0, 1]),
        "arrays of different lengths": changed(sample=[1]),
    }


@pytest.mark.parametrize("name", bad_steps())
def test_steps_that_make_no_sense_change_nothing(folder: Path, name: str) -> None:
    runner = StepRunner(model := make_model(folder), ROWS)
    runner._apply(make_step([(0, 0, [1], True)], new_rows=[make_row(0, 3), make_row(1, 1)]))
    assert isinstance(runner.executor.common, NativeSteps)
    table, pool = runner.executor.req_to_token.copy(), pool_bytes(model.pools.pool).clone()
    assert runner.executor.common.run(bad_steps()[name]) is None
    assert np.array_equal(runner.executor.req_to_token, table)
    assert torch.equal(pool_bytes(model.pools.pool), pool)
    assert runner.executor.rows.last_tokens[:2].tolist() == [-1, -1]


class Watched(LayersDone):
    """Keeps what the pool has of the layers that are done, as soon as they are."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__()
        self._pool = pool_bytes(model.pools.pool)
        self.seen: dict[int, torch.Tensor] = {}

    def advance(self, count: int) -> None:
        super().advance(count)
        self.look()

    def look(self) -> None:
        count = self.count
        if count not in self.seen:
            self.seen[count] = self._pool[:, :count].clone()

    def watch(self, over: threading.Event) -> None:
        """Look at the threads until ``over``, while the kernels count."""
        while not over.is_set():
            self.look()


@pytest.mark.sample(2)
@pytest.mark.parametrize("length", [20, 255], ids=["by columns", "by rows"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("way", ["native", "general", "torch"])
def test_layers_that_are_done_are_in_the_pool(folder: Path, way: str, threads: int, length: int) -> None:
    backend = "torch" if way == "torch" else "cpu"
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = make_model(folder, dtype="float32", attention_backend=backend)
    finally:
        torch.set_num_threads(before)
    runner, layers = StepRunner(model, ROWS), model.spec.num_layers
    if way == "general":
        runner.executor.common = ALL_GENERAL
    mid_way: set[int] = set()
    deadline = time.monotonic() + limit(20)  # a pass is over in a moment, and others may have the cores
    for attempt in itertools.count():
        pool_bytes(model.pools.pool).zero_()
        done, over = Watched(model), threading.Event()
        observer = threading.Thread(target=done.watch, args=(over,))
        observer.start()
        runner.run(make_step([(0, 0, [(i + attempt) % VOCAB for i in range(length)], True)]), done)
        over.set()
        observer.join()
        assert done.count == layers
        for count, seen in done.seen.items():
            assert torch.equal(seen, pool_bytes(model.pools.pool)[:, :count]), count
        mid_way |= set(done.seen) & set(range(1, layers))
        if mid_way and attempt >= 5:
            return
        assert time.monotonic() < deadline, "no layer was ever seen ahead of the others"
