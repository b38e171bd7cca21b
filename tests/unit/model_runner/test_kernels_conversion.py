"""The kernels that convert weights: the numbers of NumPy and of the gguf package, to the last bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from pdserve.model_runner.cpu_engine.build import BuildError
from pdserve.model_runner.cpu_engine.conversion import NativeConversion
from pdserve.model_runner.cpu_engine.library import load_library
from pdserve.model_runner.cpu_engine.team import Team
from pdserve.model_runner.loader.arrays import BFLOAT16, FLOAT32, Array, as_bits, convert
from pdserve.model_runner.loader.quantized_blocks import FORMATS
from pdserve.model_runner.loader.random_blocks import random_blocks

try:
    load_library()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

FLOAT16 = np.dtype(np.float16)
TYPES = (FLOAT32, BFLOAT16, FLOAT16)


@pytest.fixture(params=[1, 3])
def conversion(request: pytest.FixtureRequest) -> NativeConversion:
    return NativeConversion(Team(request.param, spin_us=1))


def same_bits(one: Array, other: Array) -> bool:
    bits = (as_bits(each).view(f"u{each.itemsize}") for each in (one, other))
    return one.dtype == other.dtype and np.array_equal(*bits)


def every_number(dtype: np.dtype) -> Array:
    if dtype != FLOAT32:
        return np.arange(1 << 16, dtype=np.uint16).view(dtype)
    bits = np.random.default_rng(1).integers(0, 1 << 32, 100_003, dtype=np.uint32)
    bits[:12] = (
        0,
        1 << 31,
        1,
        0x8000,
        0x18000,
        0x7FFFFF,
        0x3F808000,
        0x3F818000,
        0x7F7FFFFF,
        0x7F800000,
        0x7F800001,
        0,
    )
    return bits.view(np.float32)


@pytest.mark.parametrize("to", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("stored", TYPES, ids=["float32", "bfloat16", "float16"])
def test_every_number_is_converted_as_by_numpy(conversion: NativeConversion, stored: np.dtype, to: np.dtype) -> None:
    values = every_number(stored)
    for size in (0, 1, 15, 257, len(values)):
        out = np.zeros(size, to)
        conversion.copy(values[:size], out)
        with np.errstate(invalid="ignore"):
            expected = convert(values[:size], to)
        nan = np.isnan(convert(expected, FLOAT32))
        assert np.array_equal(np.isnan(convert(out, FLOAT32)), nan)
        assert same_bits(out[~nan], expected[~nan])


def test_views_are_converted_wherever_they_lie(conversion: NativeConversion) -> None:
    whole = np.random.default_rng(2).normal(size=(40, 50)).astype(np.float16)
    for values in (whole[:, 7:33], whole.T, whole[3::2], whole[5:5]):
        table = np.zeros((60, values.shape[1]), BFLOAT16)
        conversion.copy(values, table[4 : 4 + len(values)])
        assert same_bits(table[4 : 4 + len(values)], convert(values, BFLOAT16))
        assert not as_bits(table[:4]).any()
        assert not as_bits(table[4 + len(values) :]).any()
    # Neither of these is contiguous, and the other type is one that the kernels do not write.
    columns = np.zeros((40, 60), BFLOAT16)
    conversion.copy(whole, columns[:, 2:52])
    assert same_bits(columns[:, 2:52], convert(whole, BFLOAT16))
    doubles = np.zeros((40, 50))
    conversion.copy(whole, doubles)
    assert np.array_equal(doubles, whole)


@pytest.mark.parametrize("to", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_blocks_are_dequantised_as_by_gguf(conversion: NativeConversion, kind: Kind, to: np.dtype) -> None:
    weights, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(3)
    for count in (1, 2, 37):
        blocks = random_blocks(kind, count, 3 * weights, rng, signed=True)
        if count == 37:
            # Blocks of any bytes, but with scales that are numbers.
            scales = rng.uniform(-3, 3, 1000).astype(np.float16)
            blocks = rng.integers(0, 256, blocks.shape, dtype=np.uint8)
            for first in range(0, blocks.shape[1], nbytes):
                for at in (208,) if kind == Kind.Q6_K else (0, 2):
                    blocks[:, first + at : first + at + 2] = rng.choice(scales, (count, 1)).view(np.uint8)
        found = conversion.dequantise(blocks, kind, to)
        assert found.shape == (count, 3 * weights)
        assert same_bits(found, convert(gguf.dequantize(blocks, kind), to))
    [cut] = conversion.dequantise(blocks[None, 3:5, nbytes:], kind, to)
    assert same_bits(cut, conversion.dequantise(blocks, kind, to)[3:5, weights:])


def test_other_kinds_are_left_to_gguf_and_plain_numbers_stay(conversion: NativeConversion) -> None:
    values = np.random.default_rng(4).normal(size=(6, 64)).astype(np.float32)
    blocks = gguf.quantize(values, Kind.MXFP4)
    found = conversion.dequantise(blocks, Kind.MXFP4, BFLOAT16)
    assert same_bits(found, convert(gguf.dequantize(blocks, Kind.MXFP4), BFLOAT16))
    assert same_bits(conversion.dequantise(values, Kind.F32, BFLOAT16), values)
    halves = values.astype(np.float16)
    assert same_bits(conversion.dequantise(halves, Kind.F16, FLOAT32), halves)
    rounded = convert(values, BFLOAT16)
    stored = as_bits(rounded).view(np.uint8)
    assert same_bits(conversion.dequantise(stored, Kind.BF16, FLOAT32), rounded)
    with pytest.raises(NotImplementedError):
        conversion.dequantise(values.astype(np.int32), Kind.I32, FLOAT32)
