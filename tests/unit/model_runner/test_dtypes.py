"""Conversion of numbers to bfloat16 and back without torch: the bits are torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pdserve.model_runner.dtypes import round_to, round_to_bfloat16, widen_bfloat16

NANS = np.array([0x7F800001, 0x7F80FFFF, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32)


def test_nan_stays_nan_whatever_its_bits() -> None:
    """With a payload in the low bits alone, or with ones that carry into the sign."""
    rounded = round_to_bfloat16(NANS.view(np.float32))
    assert np.isnan(widen_bfloat16(rounded)).all()
    assert [bits >> 15 for bits in rounded] == [bits >> 31 for bits in NANS]
    assert np.isnan(round_to(float("nan"), "bfloat16"))


def test_numbers_are_rounded_as_torch_rounds_them() -> None:
    rng = np.random.default_rng(0)
    ties = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x80000000, 1], np.uint32)
    values = np.concatenate([ties, rng.integers(0, 1 << 32, 10_000, dtype=np.uint32)]).view(np.float32)
    values = values[~np.isnan(values)]
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(round_to_bfloat16(values), expected)


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        round_to(1.0, "float16")
