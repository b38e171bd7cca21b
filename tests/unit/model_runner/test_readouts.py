"""Embeddings and scores of labels, served by the real scheduler on the real engines: transformers' own numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.families import make_reference
from support.model_harness import draw
from support.served_model import ServedModel

from pdserve.messages.base import pack_i32
from pdserve.messages.outputs import ReqTokens
from pdserve.messages.readout import Readout, ReadoutKind, ReadoutSpec
from pdserve.messages.requests import AbortReq
from pdserve.messages.worker import ForwardStep
from pdserve.model_runner.batch.step_plan import StepPlan, plan_step
from pdserve.model_runner.readouts.reader import ReadoutMaker, packed

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = ["llama", "qwen3", "gemma2", "mistral", "deepseek-v3"]
LENGTHS = (1, 5, 16, 61, 90)
CHUNK = 16
MEAN, LAST = Readout("mean"), Readout("last")


def reference_states(model: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    """Return the hidden states of all tokens after the last norm, by transformers."""
    with torch.inference_mode():
        return model.base_model(torch.tensor([tokens])).last_hidden_state[0].numpy()


def normalised(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def expected(model: torch.nn.Module, tokens: list[int], readout: Readout) -> np.ndarray:
    states = reference_states(model, tokens).astype(np.float64)
    return normalised(states.mean(0) if readout == MEAN else states[-1])


def end_of(served: ServedModel, rid: str) -> ReqTokens:
    end = served.ends[rid]
    assert isinstance(end, ReqTokens), end
    return end


def read(served: ServedModel, prompts: dict[str, list[int]], readout: Readout) -> dict[str, np.ndarray]:
    """Serve the prompts together, and return their vectors."""
    for rid, tokens in prompts.items():
        served.submit(rid, tokens, max_new_tokens=1, readout=readout)
    served.run_until_idle()
    reports = {rid: end_of(served, rid).prompt for rid in prompts}
    return {rid: np.frombuffer(report.readout, "<f4") for rid, report in reports.items()}


@pytest.mark.sample(2)
@pytest.mark.parametrize("engine", ["cpu", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_those_of_transformers(family: str, engine: str, tmp_path: Path) -> None:
    model = make_reference(family)
    model.save_pretrained(tmp_path)
    prompts = {f"p{n}": draw(n, n) for n in LENGTHS}
    # Prompts of several steps each, beside others; and each in one step.
    pieces = ServedModel(tmp_path, attention_backend=engine, chunked_prefill_size=CHUNK)
    whole = ServedModel(tmp_path, attention_backend=engine, chunked_prefill_size=256)
    for readout in (MEAN, LAST):
        kind = readout.kind
        named = {f"{kind}-{rid}": tokens for rid, tokens in prompts.items()}
        in_pieces, at_once = read(pieces, named, readout), read(whole, named, readout)
        for rid, tokens in named.items():
            np.testing.assert_allclose(normalised(in_pieces[rid]), expected(model, tokens, readout), atol=1e-5, rtol=0)
            np.testing.assert_allclose(in_pieces[rid], at_once[rid], atol=1e-5, rtol=1e-5)
    assert pieces.scheduler.counters.generation_tokens == 2 * len(LENGTHS)  # one for each pass, and no decode step


def test_embeddings_by_transformers_own_class(tmp_path: Path) -> None:
    model = make_reference("qwen3")
    model.save_pretrained(tmp_path)
    served = ServedModel(tmp_path, model_impl="transformers", chunked_prefill_size=CHUNK)
    prompts = {"a": draw(37, 1), "b": draw(6, 2)}
    for readout in (MEAN, LAST):
        found = read(served, {rid + readout.kind: tokens for rid, tokens in prompts.items()}, readout)
        for rid, tokens in prompts.items():
            close = expected(model, tokens, readout)
            np.testing.assert_allclose(normalised(found[rid + readout.kind]), close, atol=1e-5, rtol=0)


def test_the_last_token_uses_the_prefix_cache_and_the_mean_computes_all(tmp_path: Path) -> None:
    model = make_reference("qwen3")
    model.save_pretrained(tmp_path)
    served, tokens = ServedModel(tmp_path, chunked_prefill_size=CHUNK), draw(45, 3)
    first = read(served, {"mean": tokens}, MEAN)["mean"]
    found = read(served, {"last": tokens}, LAST)["last"]
    again = read(served, {"again": tokens}, MEAN)["again"]
    assert [end_of(served, rid).meta.cached_tokens for rid in ("mean", "last", "again")] == [0, 44, 0]
    np.testing.assert_allclose(normalised(found), expected(model, tokens, LAST), atol=1e-5, rtol=0)
    np.testing.assert_allclose(again, first, atol=1e-6)


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_prompt_that_begins_again_has_its_own_mean(is_aborted: bool, tmp_path: Path) -> None:
    """Its row, or that of an aborted request, has the sum of a first piece by then."""
    model = make_reference("llama")
    model.save_pretrained(tmp_path)
    served = ServedModel(tmp_path, chunked_prefill_size=CHUNK, max_running_requests=1)
    prompts = {"a": draw(45, 8), "b": draw(45, 9)}
    for rid, tokens in prompts.items():
        served.submit(rid, tokens, max_new_tokens=1, readout=MEAN)
    served.plan()
    assert served.work()
    (first,) = (req for req in served.scheduler.reqs.values() if req.hold is not None)
    assert 0 < first.computed < first.prompt_len
    if is_aborted:
        served.scheduler.abort(AbortReq(first.rid))
        del prompts[first.rid]
    else:
        served.scheduler.planner.retraction.retract(first, served.now)
    served.run_until_idle()
    for rid, tokens in prompts.items():
        found = np.frombuffer(end_of(served, rid).prompt.readout, "<f4")
        np.testing.assert_allclose(normalised(found), expected(model, tokens, MEAN), atol=1e-5, rtol=0)


def test_generating_requests_go_on_beside_embeddings(tmp_path: Path) -> None:
    model = make_reference("llama")
    model.save_pretrained(tmp_path)
    served, prompt = ServedModel(tmp_path, chunked_prefill_size=CHUNK), draw(30, 4)
    served.submit("alone", prompt, max_new_tokens=12)
    served.run_until_idle()
    served = ServedModel(tmp_path, chunked_prefill_size=CHUNK)
    served.submit("a", prompt, max_new_tokens=12)
    vector = read(served, {"e": draw(70, 5)}, MEAN)["e"]
    np.testing.assert_allclose(normalised(vector), expected(model, draw(70, 5), MEAN), atol=1e-5, rtol=0)
    assert len(served.tokens["a"]) == 12


@pytest.mark.parametrize("engine", ["cpu", "torch"])
def test_labels_have_their_log_probabilities_at_the_prompts_end(engine: str, tmp_path: Path) -> None:
    model = make_reference("qwen3")
    model.save_pretrained(tmp_path)
    served, labels = ServedModel(tmp_path, attention_backend=engine, chunked_prefill_size=CHUNK), (5, 90, 0)
    prompts = {"a": draw(40, 6), "b": draw(3, 7)}
    found = read(served, prompts, Readout("labels", labels))
    for rid, tokens in prompts.items():
        with torch.inference_mode():
            logprobs = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        np.testing.assert_allclose(found[rid], logprobs[list(labels)].numpy(), atol=1e-4)


def step(start: int, count: int) -> StepPlan:
    """Return the plan of a step of one row, which computes a piece of its prompt."""
    slots = pack_i32(range(16 + start, 16 + start + count))
    lists = {"rows": pack_i32([1]), "starts": pack_i32([start]), "q_lens": pack_i32([count])}
    flags = {"use_last": pack_i32([0]), "sample": pack_i32([0])}
    ids = pack_i32([0] * count)
    return plan_step(ForwardStep(1, **lists, **flags, input_ids=ids, out_cache_loc=slots), 4)


@pytest.mark.parametrize("kind", ["mean", "last"])
def test_states_of_a_type_that_numpy_lacks_can_be_read(kind: ReadoutKind) -> None:
    maker = ReadoutMaker(torch.float64, lambda logits, row, labels: logits[row, labels])
    states = torch.full((1, 8), 1.5, dtype=torch.bfloat16)
    (vector,) = maker.make([ReadoutSpec(0, kind, True)], step(0, 1), states, torch.zeros(0, 5))
    assert np.frombuffer(packed(vector.numpy()), "<f4").tolist() == [1.5] * 8


def test_a_mean_that_skips_tokens_is_a_fault() -> None:
    maker = ReadoutMaker(np.float64, lambda logits, row, labels: logits[row, labels])
    spec, nothing = ReadoutSpec(0, "mean", False), np.zeros((0, 5), np.float32)
    assert maker.make([spec], step(0, 3), np.ones((3, 8), np.float32), nothing) == []
    with pytest.raises(ValueError, match="goes on at token 5, its sum has 3"):
        maker.make([spec], step(5, 2), np.ones((2, 8), np.float32), nothing)
    last = ReadoutSpec(0, "mean", True)
    (mean,) = maker.make([last], step(3, 1), np.full((1, 8), 5, np.float32), nothing)
    assert mean.tolist() == [2.0] * 8
