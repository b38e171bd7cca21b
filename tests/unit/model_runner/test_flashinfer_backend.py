"""Calls of FlashInfer, without a GPU.

Fake wrappers compare each call with the real signature and compute in torch what was asked for. The result is compared
with the reference backend's.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.recording_device import RecordingDevice

from pdserve.messages.worker import KVGroup, KVLayout
from pdserve.model_files.errors import UnsupportedModel
from pdserve.model_files.spec import AttentionSpec, MLASpec, NormSpec
from pdserve.model_runner.attention.flashinfer import support as flashinfer_support
from pdserve.model_runner.attention.layer_kinds import layer_kinds
from pdserve.model_runner.attention.registry import BackendNeeds, make_attention_backend
from pdserve.model_runner.engines import load
from pdserve.model_runner.engines.attention_choice import choose_attention_backend
from pdserve.model_runner.kv.pool import MHATokenToKVPool, MLATokenToKVPool
from pdserve.model_runner.steps.step_runner import StepRunner
from tests.unit.model_runner.test_attention_backends import PAGES, make_batch
from tests.unit.model_runner.test_decode_graphs import plain_steps, random_steps, same
from tests.unit.model_runner.test_kernels_engine import save_model
from tests.unit.model_runner.test_native_steps import ROWS, make_model

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 64, 16
PLAIN = AttentionSpec(heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, scale=DIM**-0.5)
LATENT = MLASpec(
    heads=4,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=8,
    qk_rope_head_dim=64,
    v_head_dim=8,
    scale=0.05,
    norm=NormSpec(eps=1e-6),
)
MIXED, DECODES = ([7, 40, 0, 63, 17], [9, 1, 33, 1, 50]), ([31, 0, 15, 16, 90], [1, 1, 1, 1, 1])


@pytest.fixture(scope="module", autouse=True)
def _flashinfer():
    """Import it when a test of this file runs: it takes seconds, and every worker collects this file."""
    pytest.importorskip("flashinfer")


@pytest.fixture
def runs(monkeypatch):
    from support.fake_flashinfer import use_fakes

    return use_fakes(monkeypatch)


def both(pools, attentions, device=None):
    """Make the reference backend, and FlashInfer's."""
    needs = BackendNeeds(pools, torch.float32, None, device or RecordingDevice(), attentions, 5 * 512, 1)
    return make_attention_backend("torch", needs), make_attention_backend("flashinfer", needs)


def mha_pool(layers: tuple[int, ...], window: int = 0) -> MHATokenToKVPool:
    group = KVGroup(layers, "mha", KV_HEADS, DIM, "float32", len(layers) * 2 * PAGE * KV_HEADS * DIM * 4, window=window)
    pool = MHATokenToKVPool(KVLayout(PAGE, (group,)), PAGES, torch.device("cpu"))
    pool.data.normal_()
    return pool


@pytest.mark.parametrize("lens", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_equals_the_reference_whatever_the_layers_are(runs, lens) -> None:
    torch.manual_seed(3)
    attentions = [
        PLAIN,
        replace(PLAIN, window=21),
        replace(PLAIN, softcap=1.5, scale=0.3),
        replace(PLAIN, window=5, softcap=2.0, sinks=True),
        PLAIN,
    ]
    batch, pool = make_batch(*lens, PAGE), mha_pool(tuple(range(5)))
    reference, ours = both([pool], attentions)
    reference.plan(batch)
    ours.plan(batch)
    for layer, spec in enumerate(attentions):
        q, k, v = (torch.randn(batch.num_tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        sinks = torch.randn(HEADS) if spec.sinks else None
        expected = reference.forward(layer, q, k, v, spec, sinks)
        torch.testing.assert_close(ours.forward(layer, q, k, v, spec, sinks), expected, atol=1e-5, rtol=1e-5)
    assert {run.wrapper for run in runs} == {"FakeDecode" if lens is DECODES else "FakePrefill"}
    assert [run.plan["window_left"] for run in runs] == [-1, 20, -1, 4, -1]
    kinds, of_layer = layer_kinds(attentions, dict.fromkeys(range(5), 0))
    assert (len(kinds), of_layer) == (4, [0, 1, 2, 3, 0])


@pytest.mark.parametrize("lens", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_layers_with_pages_of_their_own_read_those(runs, lens) -> None:
    attentions = [PLAIN, replace(PLAIN, window=21)]
    batch, pool, windows = make_batch(*lens, PAGE), mha_pool((0,)), mha_pool((1,), window=21)
    batch.window_pages = torch.randperm(PAGES - 1).to(torch.int32) + 1
    batch.window_pages = torch.cat((torch.zeros(1, dtype=torch.int32), batch.window_pages))
    reference, ours = both([pool, windows], attentions)
    reference.plan(batch)
    ours.plan(batch)
    for layer, spec in enumerate(attentions):
        q, k, v = (torch.randn(batch.num_tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        expected = reference.forward(layer, q, k, v, spec)
        torch.testing.assert_close(ours.forward(layer, q, k, v, spec), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lens", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_latent_rows_are_read_where_they_lie(runs, lens) -> None:
    group = KVGroup((0, 1), "mla", 1, 576, "float32", 2 * PAGE * 576 * 4, value_dim=512)
    pool = MLATokenToKVPool(KVLayout(PAGE, (group,)), PAGES, torch.device("cpu"))
    batch = make_batch(*lens, PAGE)
    pool.data.normal_()
    reference, ours = both([pool], [LATENT, LATENT])
    reference.plan(batch)
    ours.plan(batch)
    for layer in (0, 1):
        q, row = torch.randn(batch.num_tokens, 4, 576), torch.randn(batch.num_tokens, 1, 576)
        expected = reference.forward(layer, q, row, row[..., :512], LATENT)
        ours_out = ours.forward(layer, q, row, row[..., :512], LATENT)
        torch.testing.assert_close(ours_out, expected, atol=1e-4, rtol=1e-4)
    assert {run.wrapper for run in runs} == {"FakeLatent"}


@pytest.mark.parametrize("name", ["heads-64", pytest.param("heads-16", marks=pytest.mark.slow)])
def test_served_with_graphs_it_answers_as_the_reference_does(runs, monkeypatch, tmp_path: Path, name: str) -> None:
    device, folder = RecordingDevice(), save_model(tmp_path, name)
    plain = plain_steps(folder)
    monkeypatch.setattr(load, "open_device", lambda *args, **more: device)
    monkeypatch.setattr(load, "choose_attention_backend", lambda *args: "flashinfer")
    model = make_model(folder, dtype="float32", max_running_requests=ROWS, cuda_graph_bs="1,3")
    steps = StepRunner(model, ROWS)
    # The fake reads lengths while it runs, which no graph can: decode steps are captured sizes, and not replayed.
    monkeypatch.setattr(device, "capture", lambda run: Rerun(run))
    steps.capture_graphs()
    for step in random_steps(5):
        same(steps.run(step), plain.run(step))
    assert {(run.wrapper, run.captured) for run in runs} >= {("FakeDecode", 1), ("FakeDecode", 3), ("FakePrefill", 0)}


class Rerun:
    """A graph that is run anew. What it is told may have changed, as long as it is at its place."""

    def __init__(self, run) -> None:
        self._run = run
        self.output = run()

    def replay(self) -> None:
        with torch._C.DisableTorchFunction():
            self.output.copy_(self._run())


def test_the_memory_that_plans_are_swapped_in_is_flashinfer_s_own_name() -> None:
    import flashinfer
    import flashinfer.mla

    for wrapper in (flashinfer.BatchDecodeWithPagedKVCacheWrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper):
        assert "self._pin_memory_int_workspace_buffer" in inspect.getsource(wrapper)


REFUSED = {
    "not in float32": ([PLAIN], torch.float32, torch.float32),
    "scale for each token": ([PLAIN], torch.bfloat16, torch.float8_e4m3fn),
    "both of one type": ([PLAIN], torch.bfloat16, torch.float16),
    "heads of 80 elements": ([replace(PLAIN, head_dim=80)], torch.bfloat16, torch.bfloat16),
    "latent rows of 256": ([replace(LATENT, kv_lora_rank=256)], torch.float16, torch.float16),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_does_not_do_is_named(reason: str) -> None:
    assert reason in flashinfer_support.unsupported(*REFUSED[reason])
    assert flashinfer_support.unsupported([PLAIN, LATENT], torch.bfloat16, torch.bfloat16) is None


def test_where_it_is_missing_or_another_release_the_install_line_is_given(monkeypatch) -> None:
    assert flashinfer_support.missing() is None
    for version in ("0.6.9", "0.8.0"):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
        assert f"flashinfer-python {version}" in flashinfer_support.missing()
        assert "pip install 'pdserve[flashinfer]'" in flashinfer_support.missing()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'pdserve[flashinfer]'" in flashinfer_support.missing()


class Spec:
    layers = ()


def test_a_gpu_takes_the_first_that_serves_the_model(monkeypatch) -> None:
    gpu, half = torch.device("cuda"), torch.bfloat16
    assert choose_attention_backend("auto", Spec(), gpu, half, half) == "flashinfer"
    assert choose_attention_backend("auto", Spec(), gpu, torch.float32, torch.float32) != "flashinfer"
    with pytest.raises(UnsupportedModel, match="--attention-backend flashinfer: it computes in float16"):
        choose_attention_backend("flashinfer", Spec(), gpu, torch.float32, torch.float32)
    with pytest.raises(UnsupportedModel, match="--attention-backend flashinfer: FlashInfer runs on NVIDIA"):
        choose_attention_backend("flashinfer", Spec(), torch.device("cpu"), half, half)
    monkeypatch.setattr(flashinfer_support, "missing", lambda: "gone")
    with pytest.raises(UnsupportedModel, match="--attention-backend flashinfer: gone"):
        choose_attention_backend("flashinfer", Spec(), gpu, half, half)
