"""GGUF weights: joining rows for the gguf package changes no number."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from pdserve.model_runner.loader.dequantise import dequantise

KINDS = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 7, 96, 4096])
def test_rows_that_are_joined_have_the_numbers_that_they_have_alone(kind, rows):
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    columns = 2 * block
    data = np.random.default_rng(0).integers(0, 256, (rows, columns // block * nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # some of the scales are no numbers
        expected, found = gguf.dequantize(data, kind), dequantise(data, kind)
    assert found.shape == (rows, columns)
    np.testing.assert_array_equal(found, expected)


def test_plain_numbers_stay_as_they_are():
    data = np.arange(24, dtype=np.float16).reshape(8, 3)
    np.testing.assert_array_equal(dequantise(data, Kind.F16), data.astype(np.float32))
    vector = np.arange(8, dtype=np.float32)
    np.testing.assert_array_equal(dequantise(vector, Kind.F32), vector)
