"""The C++ engine on latent attention: a token's logits are the same bits, in any company."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.families import make_reference
from support.model_harness import Harness, draw
from torch import Tensor

from pdserve.model_runner.cpu_engine.build import levels_here

pytestmark = pytest.mark.skipif(not levels_here(), reason="this processor can't run the kernels")

LENGTH = 100
CONFIGS = ["deepseek-v2", "deepseek-v3-plain"]
"""Fewer heads than read a row together, and more."""


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_reference(request.param).save_pretrained(path)
    return path


@pytest.fixture
def threads() -> Iterator[None]:
    """The number of torch's threads, which is that of the engine's, as it was before."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make(folder: Path, threads: int, dtype: str) -> Harness:
    torch.set_num_threads(threads)
    return Harness(folder, attention_backend="cpu", dtype=dtype)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_the_same_bits_in_any_company(folder: Path, dtype: str) -> None:
    tokens, others = draw(LENGTH, 3), draw(LENGTH, 4)
    expected = make(folder, 1, dtype).forward((0, tokens))
    assert expected.isfinite().all()
    for count in (2, 3):
        # By rows, and where tokens are few by columns.
        assert torch.equal(make(folder, count, dtype).forward((0, tokens)), expected)
        assert torch.equal(in_chunks(make(folder, count, dtype), tokens, others), expected)


def in_chunks(harness: Harness, tokens: list[int], others: list[int]) -> Tensor:
    """Return the logits of ``tokens``, a few at a time, and after another row."""
    found, begin = [], 0
    for size in (1, 2, 31, 7, 1, LENGTH):
        part = tokens[begin : begin + size]
        found.append(harness.forward((1, others[begin : begin + size]), (0, part))[-len(part) :])
        begin += size
    return torch.cat(found)
