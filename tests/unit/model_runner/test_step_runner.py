"""What a ``ForwardStep`` makes of the request table, the batch and the result, with a model that is easy to predict."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
from support import sampler_reference

from pdserve.messages.base import pack_i32, unpack_i32
from pdserve.messages.worker import ForwardStep, InputLogprobSpec, RowInit, SlotDelta
from pdserve.model_runner.batch.host_batch import HostBatch
from pdserve.model_runner.device.cpu import CpuDevice
from pdserve.model_runner.grammar.matchers import NoMatchers
from pdserve.model_runner.sampling.rules import TorchRules
from pdserve.model_runner.steps.common_steps import ALL_GENERAL, CommonSteps, RequestTables
from pdserve.model_runner.steps.step_runner import StepRunner

VOCAB = 100


class FakeModel:
    """Its favourite next token is (token + position) % V; it keeps the batches that it saw, the table copied."""

    vocab_size = VOCAB
    context_length = 64
    device = CpuDevice()
    sampler = TorchRules()
    matchers = NoMatchers()

    def __init__(self) -> None:
        self.engine = self
        self.pools = SimpleNamespace(num_slots=512, page_size=16, num_window_pages=0)
        self.batches: list[HostBatch] = []
        self.tables: list[np.ndarray] = []
        self.bad_tokens: set[int] = set()

    def common_steps(self, tables: RequestTables) -> CommonSteps:
        return ALL_GENERAL

    def host_logits(self, batch: HostBatch) -> np.ndarray:
        self.batches.append(batch)
        self.tables.append(batch.req_to_token.copy())
        ids, positions = batch.input_ids[batch.logit_indices], batch.positions[batch.logit_indices]
        logits = np.zeros((len(ids), VOCAB), dtype=np.float32)
        logits[np.arange(len(ids)), (ids + positions) % VOCAB] = 10.0
        for bad in self.bad_tokens:
            logits[ids == bad] = np.nan
        return logits


def make_row(row: int, **changes) -> RowInit:
    return sampler_reference.make_row(row, **({"seed": 1, "prompt_len": 3, "temperature": 0.0} | changes))


def make_step(*entries: tuple[int, int, list[int] | None, bool], step_id: int = 1, first_slot: int = 16, **extra):
    """Make a step of entries (row, start, tokens or None for the row's last one, sample).

    Slots count up from ``first_slot``.
    """
    rows, starts, tokens, sample = zip(*entries, strict=True)
    ids = [token for entry in tokens for token in (entry or [0])]
    return ForwardStep(
        step_id=step_id,
        rows=pack_i32(rows),
        starts=pack_i32(starts),
        q_lens=pack_i32([len(entry or [0]) for entry in tokens]),
        use_last=pack_i32([entry is None for entry in tokens]),
        sample=pack_i32(sample),
        input_ids=pack_i32(ids),
        out_cache_loc=pack_i32(np.arange(first_slot, first_slot + len(ids))),
        **extra,
    )


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def runner(model: FakeModel) -> StepRunner:
    return StepRunner(model, max_reqs=4)


def next_tokens(result) -> list[int]:
    return unpack_i32(result.next_tokens).tolist()


def test_chunks_and_decode_steps_share_a_pass(runner: StepRunner, model: FakeModel) -> None:
    runner.run(make_step((2, 0, [5, 6, 7], True), new_rows=[make_row(2)]))
    result = runner.run(
        make_step((0, 4, [10, 11], False), (2, 3, None, True), (1, 0, [20], True), new_rows=[make_row(0), make_row(1)])
    )
    batch = model.batches[1]
    assert batch.input_ids.tolist() == [10, 11, 9, 20]
    assert batch.positions.tolist() == [4, 5, 3, 0]
    assert batch.out_cache_loc.tolist() == [16, 17, 18, 19]
    assert (batch.rows.tolist(), batch.starts.tolist(), batch.q_lens.tolist()) == ([0, 2, 1], [4, 3, 0], [2, 1, 1])
    assert batch.logit_indices.tolist() == [2, 3]
    assert next_tokens(result) == [12, 20]
    assert result.logprobs is None


def test_a_pass_knows_where_its_rows_prompts_end(runner: StepRunner, model: FakeModel) -> None:
    rows = [make_row(0, prompt_len=2), make_row(3, prompt_len=40)]
    runner.run(make_step((3, 0, [1, 2], False), (0, 0, [5, 6], True), new_rows=rows))
    runner.run(make_step((0, 2, None, True), (3, 2, [3], False)))
    assert [batch.prompt_lens.tolist() for batch in model.batches] == [[40, 2], [2, 40]]


def test_a_step_is_ready_before_the_result_of_the_one_before_is_known(runner: StepRunner, model: FakeModel) -> None:
    steps = [make_step((1, 0, [1, 2, 3], True), new_rows=[make_row(1)])]
    steps += [make_step((1, 3 + i, None, True), step_id=2 + i) for i in range(3)]
    assert [next_tokens(runner.run(step)) for step in steps] == [[5], [8], [12], [17]]
    assert [batch.input_ids.tolist() for batch in model.batches[1:]] == [[5], [8], [12]]


def test_the_table_follows_deltas_then_the_pass(runner: StepRunner, model: FakeModel) -> None:
    deltas = [SlotDelta(3, 0, pack_i32([32, 33, 34, 35])), SlotDelta(3, 1, pack_i32([65, 66])), SlotDelta(0, 5, b"")]
    runner.run(make_step((3, 3, [1, 2], True), new_rows=[make_row(3)], slot_deltas=deltas))
    assert model.tables[0][3, :6].tolist() == [32, 65, 66, 16, 17, 0]
    assert not model.tables[0][:3].any()


def test_a_new_request_starts_its_row_afresh(runner: StepRunner) -> None:
    history = pack_i32([1, 2, 3])
    runner.run(
        make_step((0, 0, [1, 2, 3], True), new_rows=[make_row(0, frequency_penalty=20.0, history=history, logprobs=1)])
    )
    result = runner.run(make_step((0, 0, [1, 2, 3], True), new_rows=[make_row(0)]))
    assert next_tokens(result) == [5]
    assert result.logprobs is None
    runner.run(make_step((0, 0, [1], False), new_rows=[make_row(0)]))
    assert runner.run(make_step((0, 1, [7], True))).bad_entries == []


def test_a_last_token_that_was_never_sampled_is_not_the_former_request_s(runner: StepRunner, model: FakeModel) -> None:
    runner.run(make_step((0, 0, [1, 2, 3], True), new_rows=[make_row(0)]))
    runner.run(make_step((0, 0, None, True), new_rows=[make_row(0)]))
    assert model.batches[-1].input_ids.tolist() == [-1]


def test_penalties_count_what_the_worker_itself_sampled(runner: StepRunner) -> None:
    init = make_row(0, frequency_penalty=6.0, history=pack_i32([1, 2, 3]))
    assert next_tokens(runner.run(make_step((0, 0, [1, 2, 3], True), new_rows=[init]))) == [5]
    # The model wants token 5 again and again: once output it has 10 - 6, twice -2, below the zeros of the others.
    assert next_tokens(runner.run(make_step((0, 3, [2], True)))) == [5]
    assert next_tokens(runner.run(make_step((0, 4, [1], True)))) == [0]


def test_repetition_counts_the_prompt_and_frequency_does_not(runner: StepRunner) -> None:
    prompt = pack_i32([1, 5, 3])
    first = make_step((0, 0, [1, 5, 3], True), new_rows=[make_row(0, frequency_penalty=50.0, history=prompt)])
    assert next_tokens(runner.run(first)) == [5]
    again = make_step(
        (0, 0, [1, 5, 3], True), new_rows=[make_row(0, repetition_penalty=100.0, history=prompt, logprobs=2)]
    )
    result = runner.run(again)
    assert next_tokens(result) == [5]
    assert result.logprobs[0].top[0][0] == 5


def test_min_new_tokens_holds_back_stop_tokens(runner: StepRunner) -> None:
    init = make_row(0, min_new_tokens=2, stop_ids=(5, 10**6))
    assert next_tokens(runner.run(make_step((0, 0, [1, 2, 3], True), new_rows=[init]))) == [0]
    assert next_tokens(runner.run(make_step((0, 3, [2], True)))) == [0]
    assert next_tokens(runner.run(make_step((0, 4, [1], True)))) == [5]


def test_logprobs_of_samples_align_with_entries_that_sample(runner: StepRunner) -> None:
    rows = [make_row(0), make_row(1, logprobs=0), make_row(2, logprobs=3)]
    step = make_step((0, 0, [1], True), (1, 0, [2], False), (1, 1, [2], True), (2, 0, [9], True), new_rows=rows)
    none, bare, full = runner.run(step).logprobs
    assert none is None
    assert (bare.token_id, bare.top) == (3, [])
    assert full.token_id == 9
    assert [token for token, _ in full.top] == [9, 0, 1]
    assert full.top[0][1] == full.logprob == pytest.approx(10 - np.log(np.exp(10) + VOCAB - 1), abs=1e-5)


def test_input_logprobs_score_the_prompt_s_next_tokens(runner: StepRunner, model: FakeModel) -> None:
    specs = [InputLogprobSpec(1, 1, pack_i32([22, 23]), 1), InputLogprobSpec(0, 0, pack_i32([3]), 0)]
    step = make_step(
        (0, 0, [3, 4], True),
        (1, 0, [20, 21, 22, 23], False),
        new_rows=[make_row(0), make_row(1)],
        input_logprobs=specs,
    )
    result = runner.run(step)
    assert model.batches[0].logit_indices.tolist() == [1, 3, 4, 0]
    assert next_tokens(result) == [5]
    first, second = result.input_logprobs
    assert [(entry.token_id, entry.top[0][0]) for entry in first] == [(22, 22), (23, 24)]
    assert first[0].logprob == pytest.approx(first[1].top[0][1])
    assert first[1].logprob == pytest.approx(first[1].top[0][1] - 10)
    assert (second[0].token_id, second[0].top) == (3, [])


def test_entries_whose_logits_are_not_finite_are_named(runner: StepRunner, model: FakeModel) -> None:
    model.bad_tokens = {7, 8}
    step = make_step(
        (0, 0, [1], True),
        (1, 0, [7], True),
        (2, 0, [8, 9], False),
        (3, 0, [2], True),
        new_rows=[make_row(row) for row in range(4)],
        input_logprobs=[InputLogprobSpec(2, 0, pack_i32([9]), 2)],
    )
    result = runner.run(step)
    assert result.bad_entries == [1, 2]
    assert [next_tokens(result)[i] for i in (0, 2)] == [1, 2]


def test_a_step_that_contradicts_itself_is_refused(runner: StepRunner) -> None:
    step = make_step((0, 0, [1, 2], True), new_rows=[make_row(0)])
    step.out_cache_loc = pack_i32([16])
    with pytest.raises(ValueError, match="step 1"):
        runner.run(step)


def test_nothing_wanted_gives_nothing(runner: StepRunner) -> None:
    result = runner.run(make_step((0, 0, [1, 2], False), new_rows=[make_row(0)]))
    assert (next_tokens(result), result.logprobs, result.input_logprobs) == ([], None, [])


BAD_CHANGES = {
    "a row that begins nowhere": {"new_rows": [make_row(1), make_row(4)]},
    "a slot that is not there": {"new_rows": [make_row(1)], "slot_deltas": [SlotDelta(1, 0, pack_i32([20, 512]))]},
    "a negative slot": {"slot_deltas": [SlotDelta(0, 0, pack_i32([21])), SlotDelta(1, 0, pack_i32([-1]))]},
    "a row that is not there": {"slot_deltas": [SlotDelta(0, 0, pack_i32([21])), SlotDelta(-1, 0, pack_i32([16]))]},
    "beyond the context": {"slot_deltas": [SlotDelta(0, 63, pack_i32([16, 17]))]},
    "before the first position": {"slot_deltas": [SlotDelta(0, -1, pack_i32([16]))]},
}


@pytest.mark.parametrize("name", BAD_CHANGES)
def test_bad_rows_and_moved_slots_are_errors_before_anything_is_written(runner, model, name) -> None:
    runner.run(make_step((0, 0, [1, 2, 3], True), new_rows=[make_row(0)]))
    table, state = runner.executor.req_to_token.copy(), runner.executor.rows.table.copy()
    with pytest.raises(IndexError, match="step 7"):
        runner.run(make_step((0, 3, None, True), step_id=7, **BAD_CHANGES[name]))
    assert np.array_equal(runner.executor.req_to_token, table)
    assert (runner.executor.rows.table == state).all()
    assert len(model.batches) == 1


def test_window_pages_follow_the_steps(model: FakeModel) -> None:
    model.pools.num_window_pages = 4
    runner = StepRunner(model, 4)
    first = make_step((0, 0, [1, 2, 3], True), new_rows=[make_row(0)])
    first.window_pages = pack_i32([1, 3, 31, 2])
    runner.run(first)
    at = model.batches[0].window_pages
    assert np.flatnonzero(at).tolist() == [1, 31]
    assert at[[1, 31]].tolist() == [3, 2]
    # The array stays where it is: kernels were told once.
    second = make_step((0, 3, None, True))
    second.window_pages = pack_i32([31, 0, 2, 1])
    runner.run(second)
    assert model.batches[1].window_pages is at
    assert at[[1, 2, 31]].tolist() == [3, 1, 0]


@pytest.mark.parametrize("changes", [[32, 1], [-1, 1], [1, 4], [1, -1]])
def test_window_pages_that_are_not_there_are_errors(model: FakeModel, changes: list[int]) -> None:
    for pages in (4, 0):
        model.pools.num_window_pages = pages
        step = make_step((0, 0, [1, 2, 3], True), new_rows=[make_row(0)])
        step.window_pages = pack_i32(changes)
        with pytest.raises(IndexError, match="step 1"):
            StepRunner(model, 4).run(step)
        assert not model.batches


@pytest.mark.parametrize(
    "change",
    [
        {"out_cache_loc": [16, 17, 512, 18]},
        {"out_cache_loc": [16, -1, 17, 18]},
        {"rows": [0, 4]},
        {"rows": [-1, 1]},
        {"starts": [-1, 0]},
        {"starts": [62, 0]},
        {"q_lens": [4, 0]},
        {"q_lens": [2, 1]},
        {"sample": [1]},
    ],
    ids=str,
)
def test_bad_entries_are_errors_before_anything_is_written(runner, model, change) -> None:
    step = make_step((0, 0, [1, 2, 3], True), (1, 0, [4], True))
    fields = {name: getattr(step, name) for name in step.__struct_fields__}
    bad = ForwardStep(**(fields | {name: pack_i32(values) for name, values in change.items()}))
    table = runner.executor.req_to_token.copy()
    with pytest.raises((IndexError, ValueError), match="step 1"):
        runner.run(bad)
    assert np.array_equal(runner.executor.req_to_token, table)
    assert not model.batches


def random_steps(seed: int) -> list[ForwardStep]:
    """Make steps of requests with penalties, log-probabilities and neither. Rows change owners now and then."""
    rng = random.Random(seed)
    lens: dict[int, int] = {}
    steps = []
    for step_id in range(40):
        entries, new = [], []
        for row in rng.sample(range(4), rng.randint(1, 4)):
            if row not in lens or lens[row] > 40 or rng.random() < 0.15:
                prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
                extra = rng.choice([{}, {"frequency_penalty": 6.0, "history": pack_i32(prompt)}, {"logprobs": 2}])
                new.append(make_row(row, prompt_len=len(prompt), temperature=rng.choice([0.0, 1.0]), **extra))
                entries.append((row, 0, prompt, True))
                lens[row] = len(prompt)
            else:
                entries.append((row, lens[row], None, True))
                lens[row] += 1
        steps.append(make_step(*entries, step_id=step_id, new_rows=new))
    return steps


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_steps_that_are_launched_ahead_come_to_the_same(ahead: int) -> None:
    steps, ours, theirs = random_steps(ahead), FakeModel(), FakeModel()
    runner, plain = StepRunner(ours, max_reqs=4), StepRunner(theirs, max_reqs=4)
    results, open_ = [], []
    for step in steps:
        open_.append(runner.launch(step))
        if len(open_) > ahead:
            results.append(runner.collect(open_.pop(0)))
    results += [runner.collect(launched) for launched in open_]
    expected = [plain.run(step) for step in steps]
    assert [r.step_id for r in results] == [r.step_id for r in expected]
    assert [next_tokens(r) for r in results] == [next_tokens(r) for r in expected]
    assert [r.logprobs for r in results] == [r.logprobs for r in expected]
    assert all(np.array_equal(a.input_ids, b.input_ids) for a, b in zip(ours.batches, theirs.batches, strict=True))


def test_log_probabilities_are_those_of_the_model_where_a_row_is_penalised(runner: StepRunner) -> None:
    """Edits change logits in place, and only while a token is chosen."""
    init = make_row(0, frequency_penalty=6.0, logit_bias={7: 50.0}, history=pack_i32([1, 2, 3]), logprobs=2)
    [scored] = runner.run(make_step((0, 0, [1, 2, 3], True), new_rows=[init])).logprobs
    assert scored.token_id == 7
    assert [token for token, _ in scored.top] == [5, 0]
    normaliser = np.log(np.exp(10) + VOCAB - 1)
    assert scored.logprob == pytest.approx(-normaliser, abs=1e-5)
    assert scored.top[0][1] == pytest.approx(10 - normaliser, abs=1e-5)
