"""What a benchmark sends, and when: prompts, arrivals, traces, texts, scenarios."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pdserve.benchmark.arrivals import burst_arrivals, random_arrivals
from pdserve.benchmark.errors import BenchOptionsError, WorkloadError
from pdserve.benchmark.options import BenchOptions
from pdserve.benchmark.prompts import PromptShape, RequestSpec, TokenRange, random_requests
from pdserve.benchmark.scenario import read_scenario
from pdserve.benchmark.texts import read_texts, text_requests
from pdserve.benchmark.trace import TraceReplay, read_trace
from pdserve.benchmark.workload import Load, LoadGroup, WorkloadSource

TOKENS = TokenRange(1000, 1999)


def take(shape: PromptShape, count: int, seed: tuple[int, ...] = (0,)) -> list[RequestSpec]:
    return list(itertools.islice(random_requests(shape, TOKENS, seed), count))


def prompts(specs: list[RequestSpec]) -> list[list[int]]:
    return [spec.prompt.tolist() for spec in specs]


def one_group(**options) -> LoadGroup:
    source = WorkloadSource(BenchOptions(**options))
    (group,) = source.build(0, source.loads[0]).groups
    return group


def test_equal_seeds_give_equal_prompts_and_others_do_not() -> None:
    shape = PromptShape(20, 5, range_ratio=0.5)
    assert prompts(take(shape, 5)) == prompts(take(shape, 5))
    assert prompts(take(shape, 1)) != prompts(take(shape, 1, (1,)))
    firsts = [tuple(p) for p in prompts(take(shape, 50))]
    assert len(set(firsts)) == 50


def test_random_lengths_and_ids_stay_in_their_ranges() -> None:
    specs = take(PromptShape(20, 100, range_ratio=0.5), 500)
    lengths = {len(spec.prompt) for spec in specs}
    assert (min(lengths), max(lengths)) == (10, 30)
    assert (min(s.output_len for s in specs), max(s.output_len for s in specs)) == (50, 150)
    ids = np.concatenate([spec.prompt for spec in specs])
    assert (ids.min(), ids.max(), ids.dtype) == (1000, 1999, np.int32)
    assert {(len(s.prompt), s.output_len) for s in take(PromptShape(20, 100), 20)} == {(20, 100)}


def test_shared_prefixes() -> None:
    specs = take(PromptShape(4, 1, prefix_len=8, prefix_share=0.75, num_prefixes=2), 400)
    prefixes = [tuple(prompt[:8]) for prompt in prompts(specs)]
    shared = {p for p in prefixes if prefixes.count(p) > 1}
    assert len(shared) == 2
    assert sum(p in shared for p in prefixes) / 400 == pytest.approx(0.75, abs=0.08)
    assert all(len(spec.prompt) == 12 for spec in specs)
    assert len({tuple(prompt[8:]) for prompt in prompts(specs)}) == 400


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, math.inf])
def test_arrivals_have_their_rate_and_burstiness(burstiness: float) -> None:
    times = list(itertools.islice(random_arrivals(8.0, burstiness, (3,)), 20_000))
    assert times == list(itertools.islice(random_arrivals(8.0, burstiness, (3,)), 20_000))
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(0 if math.isinf(burstiness) else burstiness**-0.5, abs=0.05)


def test_bursts_and_all_at_once() -> None:
    assert list(itertools.islice(burst_arrivals(3, 2, 1), 5)) == [1, 1, 4, 4, 7]
    assert list(itertools.islice(random_arrivals(math.inf, 1, (0,), 2.0), 3)) == [2.0, 2.0, 2.0]


def write_trace(path: Path, *lines: tuple[float, int, int, list[int]]) -> Path:
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("\n".join(json.dumps(dict(zip(keys, line, strict=True))) for line in lines))
    return path


def test_a_trace_is_replayed_with_equal_blocks_for_equal_ids(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "t.jsonl",
        (3000, 1024, 10, [7, 8]),
        (1000, 700, 200, [7, 9]),
        (9000, 513, 1, [4, 7]),
        (9500, 5, 1, [8]),
    )
    group = one_group(dataset="trace", dataset_path=path, length_scale=0.25, time_scale=0.5, num_prompts=3)
    specs = list(group.requests)
    first, second, third = prompts(specs)
    assert list(group.arrivals) == [0.0, 1.0, 4.0]
    assert [len(p) for p in (first, second, third)] == [175, 256, 128]
    assert [spec.output_len for spec in specs] == [50, 2, 1]
    # Blocks are 128 tokens now. Block 7 opens the first two prompts; 8 and 9 differ.
    assert first[:128] == second[:128]
    assert first[128:] != second[128:175]
    assert third != first[:128]
    again = one_group(dataset="trace", dataset_path=path, length_scale=0.25, seed=1)
    assert next(again.requests).prompt.tolist()[:128] != first[:128]


def test_a_block_is_the_same_wherever_it_stands(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", (0, 1536, 1, [1, 2, 3]), (1, 1024, 1, [3, 1]))
    a, b = (t.spec.prompt.tolist() for t in TraceReplay(TOKENS, (0,), 1.0, 1.0).replay(read_trace(path, None)))
    assert (a[:512], a[1024:]) == (b[512:], b[:512])


def test_lengths_scale_in_whole_blocks() -> None:
    assert TraceReplay(TOKENS, (0,), 0.1, 1).effective_scale == 51 / 512
    assert TraceReplay(TOKENS, (0,), 1e-9, 1).effective_scale == 1 / 512


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no requests"),
        ('{"timestamp": 0}', "line 1: .*input_length"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "line 1: 1 blocks"),
        ("[]", "line 1"),
    ],
)
def test_a_bad_trace_is_refused(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(content)
    with pytest.raises(WorkloadError, match=says):
        read_trace(tmp_path / "t.jsonl", None)
    with pytest.raises(WorkloadError, match="can't be read"):
        read_trace(tmp_path / "missing", None)


def test_texts_from_lines_json_lines_and_conversations(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert text_requests(read_texts(tmp_path / "a.txt", 1), None, 9) == [RequestSpec("one", 9)]
    (tmp_path / "a.jsonl").write_text('{"prompt": "one", "output_len": 3}\n{"prompt": "two"}\n')
    entries = read_texts(tmp_path / "a.jsonl", None)
    assert text_requests(entries[:1], None, None) == [RequestSpec("one", 3)]
    with pytest.raises(WorkloadError, match="--output-len"):
        text_requests(entries, None, None)
    turns = [{"from": "human", "value": "Hi there"}, {"from": "gpt", "value": "Hello, how are you?"}]
    (tmp_path / "a.json").write_text(json.dumps([{"conversations": turns[:1]}, {"conversations": turns}]))
    (entry,) = read_texts(tmp_path / "a.json", None)
    (spec,) = text_requests([entry], "smollm2", None)
    assert (len(spec.prompt), spec.output_len, spec.prompt.dtype) == (2, 6, np.int32)
    with pytest.raises(WorkloadError, match="--tokenizer"):
        text_requests([entry], str(tmp_path), None)


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.json", "{}"), ("a.json", '[{"conversations": [1, 2]}]'), ("a.jsonl", "[]"), ("a.txt", " ")],
)
def test_bad_texts_are_refused(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(WorkloadError, match=name):
        read_texts(tmp_path / name, None)


def test_a_sweep_has_prompts_of_its_own_for_each_load() -> None:
    source = WorkloadSource(BenchOptions(request_rate=[1.0, 2.0], max_concurrency=[4, 8], num_prompts=3, input_len=8))
    assert source.loads == [Load(1.0, 4), Load(1.0, 8), Load(2.0, 4), Load(2.0, 8)]
    assert source.loads[0].label == "1 req/s, concurrency 4"
    first, second = (source.build(i, source.loads[0]) for i in range(2))
    drawn = [*first.groups[0].requests, *second.groups[0].requests, *first.warmup, *second.warmup]
    assert len({tuple(spec.prompt.tolist()) for spec in drawn}) == len(drawn) == 8


def test_no_rate_with_a_concurrency_is_a_closed_loop() -> None:
    group = one_group(max_concurrency=[2], num_prompts=5)
    assert (group.arrivals, group.concurrency, group.count) == (None, 2, 5)
    assert one_group(num_prompts=5).arrivals is not None


def test_the_mixed_scenario_is_the_documented_one() -> None:
    source = WorkloadSource(BenchOptions(scenario="mixed", warmup_requests=4))
    workload = source.build(0, source.loads[0])
    short, long = workload.groups
    assert (short.name, short.concurrency, short.arrivals, workload.duration) == ("short", 8, None, 40)
    spec = next(short.requests)
    assert (spec.input_len, spec.output_len) == (64, 200)
    assert list(itertools.takewhile(lambda at: at < long.end, long.arrivals))[:7] == [2, 2, 2, 5, 5, 5, 8]
    spec = next(long.requests)
    assert (spec.input_len, spec.output_len) == (1500, 4)
    assert [s.input_len for s in workload.warmup] == [64, 1500, 64, 1500]


GROUP = {"name": "a", "input_len": 8, "output_len": 4, "rate": 2.5}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"every": 1}, "one of concurrency, rate and every"),
        ({"rate": None}, "one of concurrency, rate and every"),
        ({"rate": 0}, "above 0"),
        ({"input_len": 0}, "above 0"),
        ({"range_ratio": 1}, "out of range"),
        ({"inputs": 3}, "inputs"),
    ],
)
def test_a_bad_scenario_is_refused(changes: dict, says: str, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(json.dumps({"duration": 5, "groups": [GROUP]}))
    assert read_scenario(str(path)).groups[0].rate == 2.5
    path.write_text(json.dumps({"duration": 5, "groups": [GROUP | changes]}))
    with pytest.raises(WorkloadError, match=says):
        read_scenario(str(path))
    with pytest.raises(WorkloadError, match="neither a file nor one of mixed"):
        read_scenario("nowhere")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"base_url": "localhost:1"}, "--base-url"),
        ({"scenario": "mixed", "max_concurrency": [3]}, "--scenario"),
        ({"dataset": "trace"}, "--dataset-path"),
        ({"dataset": "trace", "dataset_path": Path("x"), "request_rate": [1.0]}, "--time-scale"),
        ({"flush_cache": True, "backend": "vllm"}, "--flush-cache"),
        ({"request_rate": [0.0]}, "--request-rate"),
        ({"num_prompts": 0}, "--num-prompts"),
        ({"range_ratio": 1.0}, "--range-ratio"),
        ({"min_token_id": 5, "max_token_id": 4}, "--min-token-id"),
        ({"burstiness": 0.0}, "--burstiness"),
        ({"seed": -1}, "--seed"),
    ],
)
def test_options_that_cannot_work_are_refused(changes: dict, says: str) -> None:
    BenchOptions().check()
    with pytest.raises(BenchOptionsError, match=says):
        replace(BenchOptions(), **changes).check()
