"""GGUF files served as their own blocks: mixed kinds, what falls back, and what tells them from dequantised ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from support.passes import forward
from support.rank_threads import make_ranks, together

from pdserve.model_files.errors import InvalidWeights
from pdserve.model_runner.batch.forward_batch import ForwardBatch
from pdserve.model_runner.cpu_engine.build import BuildError
from pdserve.model_runner.cpu_engine.conversion import NativeConversion
from pdserve.model_runner.cpu_engine.library import load_library
from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.engines.loaded import LoadedModel
from pdserve.model_runner.loader import gguf_blocks
from pdserve.model_runner.loader.random_blocks import HALVES, random_blocks
from pdserve.server.options import ServerOptions
from tools.gguf_files.random_file import Size, kinds_of, write_random_gguf

try:
    load_library()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

SIZE = Size(hidden=256, inner=512, layers=2, heads=4, kv_heads=2, vocab=320)
TOKENS = 40
NEARLY_EXACT = 2e-4
"""Noise of logits when activations are rounded to 16 bits."""
MIXES = {
    "Q4_K_M": kinds_of("Q4_K_M", SIZE),
    # Queries, keys and values of three kinds, and a head of its own.
    "every kind": {
        f"blk.{i}.{name}.weight": kind
        for i, kinds in enumerate(
            (
                (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.Q8_0, Kind.IQ4_NL, Kind.Q5_0),
                (Kind.Q5_1, Kind.Q4_0, Kind.Q4_1, Kind.Q6_K, Kind.Q5_K, Kind.Q4_K),
            )
        )
        for name, kind in zip(
            ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_down", "ffn_up"),
            (*kinds, kinds[4]),
            strict=True,
        )
    }
    | {"token_embd.weight": Kind.Q8_0},
}


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def make_runner(path: Path, **options: object) -> LoadedModel:
    defaults = {"device": "cpu", "max_total_tokens": 256}
    return load_model(ServerOptions(model_path=str(path), **(defaults | options)))


def write(path: Path, kinds: dict[str, Kind], size: Size = SIZE) -> Path:
    write_random_gguf(path, size, kinds, seed=4)
    return path


def run(runner: LoadedModel, tokens: int = TOKENS) -> torch.Tensor:
    """Return all logits of a prompt."""
    page = runner.pools.layout.page_size
    table = torch.arange(64, dtype=torch.int32)[None] + page
    positions = torch.arange(tokens)
    return forward(
        runner.engine,
        ForwardBatch(
            input_ids=positions * 37 % SIZE.vocab,
            positions=positions,
            out_cache_loc=table[0, :tokens].long(),
            rows=torch.zeros(1, dtype=torch.int64),
            starts=[0],
            q_lens=[tokens],
            req_to_token=table,
            logit_indices=positions,
        ),
    )


def noise(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours - exact).norm() / exact.norm())


@pytest.mark.parametrize("mix", list(MIXES))
def test_mixed_kinds_are_near_the_dequantised_torch_model(tmp_path: Path, mix: str, threads: int) -> None:
    path = write(tmp_path / "m.gguf", MIXES[mix])
    exact = run(make_runner(path, dtype="float32", attention_backend="torch"))
    ours = make_runner(path, dtype="float32", quantization="gguf")
    assert noise(run(ours), exact) < NEARLY_EXACT
    assert noise(run(ours, 3), exact[:3]) < NEARLY_EXACT
    eight = make_runner(path, dtype="float32", quantization="gguf", quantized_activations="int8")
    # Rounding to 8 bits costs a percent; a wrong row, scale or order costs everything.
    assert 10 * NEARLY_EXACT < noise(run(eight), exact) < 0.03


@pytest.mark.parametrize("kind", list(HALVES))
def test_each_kind_is_near_the_dequantised_torch_model(tmp_path: Path, kind: Kind) -> None:
    path = write(tmp_path / "m.gguf", kinds_of(kind.name, SIZE))
    exact = run(make_runner(path, dtype="float32", attention_backend="torch"))
    assert noise(run(make_runner(path, dtype="float32", quantization="gguf")), exact) < NEARLY_EXACT


@pytest.mark.parametrize("mix", list(MIXES))
def test_ranks_have_blocks_where_they_can_be_divided(tmp_path: Path, mix: str) -> None:
    """Blocks have 256 weights: half of down_proj's columns are whole blocks, half of o_proj's are not."""
    path = write(tmp_path / "m.gguf", MIXES[mix])
    exact = run(make_runner(path, dtype="float32", attention_backend="torch"))
    options = {"device": "cpu", "max_total_tokens": 256, "dtype": "float32", "quantization": "gguf"}
    ranks = make_ranks(2, ServerOptions(model_path=str(path), **options))
    assert noise(together(ranks, run), exact) < NEARLY_EXACT
    whole = make_runner(path, dtype="float32", quantization="gguf")
    served = sum(runner.engine.step_weight_bytes for runner in ranks)
    dense_o = SIZE.layers * SIZE.hidden**2 * torch.float32.itemsize
    assert whole.engine.step_weight_bytes < served < whole.engine.step_weight_bytes + dense_o
    assert {runner.fingerprint for runner in ranks} == {whole.fingerprint}


def test_rows_that_a_rank_cannot_round_are_another_model(tmp_path: Path) -> None:
    """Half of 96 inner columns are no whole blocks. Half of 128 are."""
    prints = {}
    for inner in (96, 128):
        size = Size(hidden=64, inner=inner, layers=1, heads=2, kv_heads=2, vocab=64)
        path = write(tmp_path / f"{inner}.gguf", kinds_of("Q8_0", size), size)
        options = {"device": "cpu", "max_total_tokens": 256, "dtype": "float32", "quantization": "int8"}
        [first, _] = make_ranks(2, ServerOptions(model_path=str(path), **options))
        whole = make_runner(path, dtype="float32", quantization="int8")
        prints[inner] = first.fingerprint == whole.fingerprint
    assert prints == {96: False, 128: True}


def test_blocks_are_the_default_and_a_dtype_dequantises(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", MIXES["Q4_K_M"])
    blocks, named = make_runner(path), make_runner(path, quantization="gguf")
    floats = make_runner(path, dtype="float32")
    assert (blocks.quantization, named.quantization, floats.quantization) == ("gguf", "gguf", "none")
    assert blocks.fingerprint == named.fingerprint != floats.fingerprint
    assert blocks.engine.step_weight_bytes < floats.engine.step_weight_bytes / 5


def test_activations_rounded_otherwise_are_another_model(tmp_path: Path) -> None:
    """Its pages are never shared: hand-overs, tiers and sessions compare the fingerprint. Floats are not rounded."""
    path = write(tmp_path / "m.gguf", MIXES["Q4_K_M"])
    of_default, of_16, of_8 = (
        make_runner(path, **options)
        for options in ({}, {"quantized_activations": "int16"}, {"quantized_activations": "int8"})
    )
    assert of_default.fingerprint == of_16.fingerprint != of_8.fingerprint
    assert (of_16.quantized_activations, of_8.quantized_activations) == ("int16", "int8")
    floats = [make_runner(path, dtype="float32", quantized_activations=name) for name in ("int16", "int8")]
    assert floats[0].fingerprint == floats[1].fingerprint
    assert floats[1].quantized_activations is None


def test_without_kernels_a_gguf_is_dequantised_and_another_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "m.gguf", MIXES["Q4_K_M"])
    torch_model = make_runner(path, attention_backend="torch")
    assert torch_model.quantization == "none"
    assert "served dequantised" in caplog.text
    assert torch_model.fingerprint != make_runner(path).fingerprint


def test_the_fingerprint_follows_every_matrix(tmp_path: Path) -> None:
    kinds = MIXES["every kind"]
    prints = {make_runner(write(tmp_path / "m.gguf", kinds)).fingerprint}
    for name in kinds:
        # The same kinds in other places.
        changed = dict(kinds)
        changed[name] = Kind.Q4_1 if kinds[name] != Kind.Q4_1 else Kind.Q4_0
        prints.add(make_runner(write(tmp_path / "n.gguf", changed)).fingerprint)
    assert len(prints) == 1 + len(kinds)


def test_only_what_is_needed_is_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.gguf", MIXES["Q4_K_M"])
    shapes = []
    dequantise = NativeConversion.dequantise

    def record(self: NativeConversion, data: np.ndarray, *types: Any) -> np.ndarray:
        shapes.append(data.shape)
        return dequantise(self, data, *types)

    monkeypatch.setattr(NativeConversion, "dequantise", record)
    make_runner(path)
    # The table of embeddings; norms are a row each.
    assert [shape[0] for shape in shapes if len(shape) == 2] == [SIZE.vocab]


def test_what_falls_back_says_so_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if there were no kernels for Q5_K, so that its layers have to be dense; and a gate of a kind of its own.
    monkeypatch.setattr(gguf_blocks, "FORMATS", {k: v for k, v in gguf_blocks.FORMATS.items() if k != Kind.Q5_K})
    path = write(tmp_path / "m.gguf", MIXES["every kind"] | {"blk.0.ffn_gate.weight": Kind.Q4_0})
    exact = run(make_runner(path, dtype="float32", attention_backend="torch"))
    caplog.clear()
    with caplog.at_level(logging.INFO):
        ours = make_runner(path, dtype="float32", quantization="gguf")
    lines = [record for record in caplog.records if "dequantised to" in record.message]
    assert [record.levelname for record in lines] == ["WARNING"]
    for part in ("1 in Q4_0", "1 in Q4_K", "1 in IQ4_NL", "3 in Q5_K", "1 in Q6_K", "MiB more than as blocks"):
        assert part in lines[0].message.split("dequantised to")[1]
    assert noise(run(ours), exact) < 0.03


def test_a_file_that_is_not_what_its_config_says_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    broken = [
        (lambda t: t.pop("blk.1.attn_k.weight"), "lacks 1 tensors"),
        (lambda t: t.update({"blk.1.attn_k.weight": t["blk.1.attn_q.weight"]}), "the config means"),
    ]
    for change, says in broken:
        _write_changed(path, change)
        with pytest.raises(InvalidWeights, match=says):
            make_runner(path)


def _write_changed(path: Path, change) -> None:
    source = write(path.with_name("whole.gguf"), MIXES["Q4_K_M"])
    reader = gguf.GGUFReader(source)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    change(tensors)
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if name.startswith("llama."):
            writer.add_key_value(name, field.contents(), field.types[0])
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_random_blocks_have_the_size_that_is_asked_for() -> None:
    for kind in HALVES:
        values = gguf.dequantize(random_blocks(kind, 64, 1024, np.random.default_rng(0), 0.02), kind)
        assert np.isfinite(values).all()
        assert 0.01 < values.std() < 0.04
        assert abs(values.mean()) < 0.01
