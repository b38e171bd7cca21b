"""Weights as arrays: the numbers, the samples and the models that torch would make of the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from support.families import FAMILIES, make_reference
from support.gguf_export import write_gguf

from pdserve.model_files.context_length import with_context
from pdserve.model_files.errors import UnsupportedModel
from pdserve.model_files.families.registry import spec_from_hf
from pdserve.model_files.model_path import ModelSource
from pdserve.model_files.sharding import shard
from pdserve.model_files.spec import ModelSpec
from pdserve.model_files.spec_reader import read_spec
from pdserve.model_files.tensor_names import EMBEDDING
from pdserve.model_runner.cpu_engine.build import BuildError
from pdserve.model_runner.cpu_engine.conversion import NativeConversion
from pdserve.model_runner.cpu_engine.library import load_library
from pdserve.model_runner.cpu_engine.team import Team
from pdserve.model_runner.loader import arrays
from pdserve.model_runner.loader.arrays import (
    BFLOAT16,
    FLOAT8_E4M3FN,
    FLOAT8_E5M2,
    FLOAT32,
    as_bits,
    convert,
    copy_converted,
    float_type,
    have_same_values,
    is_float,
    take_rows,
    type_name,
    unknown_type,
    widen,
)
from pdserve.model_runner.loader.host_model import HostModel, weight_shapes
from pdserve.model_runner.loader.host_weights import HostLoader, HostWeights
from pdserve.model_runner.loader.samples import sample
from pdserve.model_runner.loader.tensor_samples import sample_tensor
from pdserve.model_runner.loader.tensors import dtype_of, to_array, to_tensor
from pdserve.model_runner.loader.weight_loader import WeightLoader
from pdserve.model_runner.models.decoder import Decoder
from pdserve.server.options import ServerOptions

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", [*FLOATS, "int32", "uint8", "bool"])
def test_tensors_and_arrays_share_memory(name: str) -> None:
    dtype: torch.dtype = getattr(torch, name)
    tensor = torch.arange(12).view(3, 4).to(dtype)
    values = to_array(tensor)
    assert (type_name(values.dtype), values.shape, values.nbytes) == (name, (3, 4), tensor.nbytes)
    assert is_float(values.dtype) == tensor.is_floating_point()
    again = to_tensor(values)
    assert again.dtype == dtype
    assert again.data_ptr() == tensor.data_ptr()
    if is_float(values.dtype):
        assert float_type(name) == values.dtype


def every_number(name: str) -> torch.Tensor:
    """Return all numbers of a narrow type; of others, numbers of every size, and the special ones."""
    dtype: torch.dtype = getattr(torch, name)
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    rng = np.random.default_rng(0)
    singles = rng.integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0xFF800000], np.uint32)
    small = np.array([0, 0x80000000, 1, 0x80000001, 0x00007FFF, 0x00008000, 0x00018000, 0x007FFFFF], np.uint32)
    special = np.concatenate((ties, small, [0x7FC00000, 0xFFC00001, 0x7F800001])).astype(np.uint32).view(np.float32)
    both = np.concatenate((singles, special, np.float32([65504, 65519.99, 65520, 6e-8, 2.98e-8])))
    tensor = torch.from_numpy(both).to(dtype)
    return torch.cat((tensor, torch.rand(1000, dtype=dtype))) if dtype == torch.float64 else tensor


@pytest.mark.parametrize("to", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", FLOATS)
def test_numbers_are_converted_as_torch_converts_them(name: str, to: str) -> None:
    numbers = every_number(name)
    expected = numbers.to(getattr(torch, to))
    found = convert(to_array(numbers), float_type(to))
    assert found.dtype == float_type(to)
    nan = expected.isnan()
    # Which NaN it is differs in torch from one processor to the next.
    assert torch.equal(to_tensor(found).isnan(), nan)
    wanted = as_bits(to_array(expected)).view(f"u{found.itemsize}")
    assert np.array_equal(as_bits(found).view(f"u{found.itemsize}")[~nan.numpy()], wanted[~nan.numpy()])


@pytest.mark.parametrize("shape", [(), (0,), (7,), (5, 3), (3, 0), (4, 3, 2)])
def test_pieces_are_the_whole(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "PIECE", 6)
    values = torch.randn(shape)
    for to in (FLOAT32, BFLOAT16):
        out = np.empty(shape, to)
        copy_converted(to_array(values), out)
        assert torch.equal(to_tensor(out), values.to(getattr(torch, type_name(to))))
    assert have_same_values(to_array(values), to_array(values.clone()))
    if values.numel():
        other = values.clone()
        other.view(-1)[-1] += 1e-3
        assert not have_same_values(to_array(values), to_array(other))


def test_values_are_compared_exactly_whatever_their_types() -> None:
    narrow = torch.randn(9, 5).bfloat16()
    assert have_same_values(to_array(narrow), to_array(narrow.double()))
    assert not have_same_values(to_array(narrow), to_array(narrow.T.contiguous()))
    single = torch.randn(9, 5)
    assert not have_same_values(to_array(single), to_array(single.double() + 1e-12))
    fp8 = narrow.to(torch.float8_e4m3fn)
    assert have_same_values(to_array(fp8), to_array(fp8.float()))
    nan = to_array(torch.full((2, 2), torch.nan))
    assert not have_same_values(nan, nan)


def test_rows_are_taken_in_order() -> None:
    values = torch.randn(6, 4).bfloat16()
    order = [5, 0, 0, 3]
    assert torch.equal(to_tensor(take_rows(to_array(values), np.array(order))), values[order])


def test_a_type_that_is_not_known_is_no_float() -> None:
    assert type_name(unknown_type("F4")) == "F4"
    assert not is_float(unknown_type("F4"))
    assert np.isnan(widen(np.array([0x7F, 0xFF], np.uint8).view(FLOAT8_E4M3FN))).all()
    assert np.isinf(widen(np.array([0x7C, 0xFC], np.uint8).view(FLOAT8_E5M2))).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(), (1,), (70,), (0, 4), (3, 5), (2, 30, 7), (200, 96)])
def test_samples_are_those_of_the_tensor(shape: tuple[int, ...], dtype: str) -> None:
    values = torch.randn(shape)
    sources = [values, values.bfloat16(), *([values.mT] if len(shape) > 1 and shape[0] else [])]
    for name in ("layers.0.q_proj.weight", EMBEDDING):
        for source in sources:
            found = sample(name, to_array(source), dtype)
            assert found == sample_tensor(name, source, getattr(torch, dtype))
            assert found.startswith(f"{name}{list(source.shape)}torch.{dtype}".encode())


@pytest.mark.parametrize("name", FAMILIES)
def test_arrays_have_the_names_shapes_and_types_of_the_torch_model(name: str) -> None:
    described = spec_from_hf(make_reference(name).config.to_dict())
    spec = with_context(described, described.context_length)
    for part, vocab in ((spec, None), *((own.spec, own.vocab) for own in ranks_of(spec))):
        expected = Decoder(part, torch.bfloat16, torch.device("meta"), vocab).weights()
        found = HostModel(part, "bfloat16", vocab).weights()
        # The order is that in which random weights are drawn.
        assert [(key, view.shape, type_name(view.dtype)) for key, view in found.items()] == [
            (key, tuple(view.shape), dtype_of(view)) for key, view in expected.items()
        ]
    assert weight_shapes(spec) == {key: view.shape for key, view in HostModel(spec, "float32").weights().items()}


def ranks_of(spec: ModelSpec) -> list[Any]:
    try:
        return [shard(spec, rank, 2) for rank in range(2)]
    except UnsupportedModel:
        return []


def load_both(source: ModelSource, dtype: str, **options: Any) -> tuple[HostWeights, Any]:
    """Load a model's weights as arrays and by torch."""
    try:
        load_library()
    except BuildError as error:
        pytest.skip(str(error))
    asked = ServerOptions(model_path=str(source.path), device="cpu", dtype=dtype, **options)  # type: ignore[arg-type]
    spec = read_spec(source)
    host = HostLoader(asked, source, spec, spec, dtype, None, NativeConversion(Team(2, spin_us=1))).load()
    return host, WeightLoader(asked, source, spec, spec, getattr(torch, dtype), CPU, None).load()


def assert_same(host: HostWeights, loaded: Any) -> None:
    expected = loaded.model.weights()
    for name, values in host.model.weights().items():
        assert torch.equal(to_tensor(values), expected[name]), name
    assert (host.fingerprint, host.nbytes) == (loaded.fingerprint, loaded.nbytes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3-moe", "gemma2", "deepseek-v2", "gpt-oss", "phi3", "qwen2-moe"]
)
def test_files_become_the_weights_of_the_torch_model(name: str, dtype: str, tmp_path: Path) -> None:
    model = make_reference(name)
    for kind in (Kind.F32, Kind.F16, Kind.BF16):
        path = write_gguf(model, tmp_path / f"{kind.name}.gguf", kind)
        assert_same(*load_both(ModelSource("gguf", path), dtype))
    for stored in (torch.float32, torch.float16, torch.bfloat16):
        make_reference(name).to(stored).save_pretrained(tmp_path / str(stored))
        assert_same(*load_both(ModelSource("hf", tmp_path / str(stored)), dtype))


def test_random_weights_are_those_of_the_torch_model(tmp_path: Path) -> None:
    make_reference("qwen2-moe").config.save_pretrained(tmp_path)
    assert_same(*load_both(ModelSource("hf", tmp_path), "bfloat16", load_format="dummy"))
