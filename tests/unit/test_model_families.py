"""Every family from safetensors against transformers in float32: chunks, decodes, a shared prefix, greedy tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.families import FAMILIES, make_reference
from support.model_harness import PAGE, Harness, close, draw, reference_logits

LENGTH = 150


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on busy cores would make these tests many times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_family_equals_transformers(name: str, tmp_path: Path) -> None:
    model = make_reference(name)
    model.save_pretrained(tmp_path)
    harness, tokens = Harness(tmp_path), draw(LENGTH, 3)
    expected = reference_logits(model, tokens)
    assert expected.std() > 0.3
    close(harness.forward((0, tokens[:50])), expected[:50])
    close(harness.forward((0, tokens[50:141])), expected[50:141])
    for position in range(141, LENGTH):
        close(harness.forward((0, tokens[position : position + 1])), expected[position : position + 1])
    # Another row has the same beginning, and goes on while the first does.
    prefix = 18 * PAGE
    other = tokens[:prefix] + draw(30, 4)
    harness.share(0, 1, prefix)
    logits = harness.forward((1, other[prefix:]), (0, [5]))
    close(logits[:-1], reference_logits(model, other)[prefix:])
    close(logits[-1:], reference_logits(model, [*tokens, 5])[-1:])
    for _ in range(6):
        other.append(int(logits[-2 if len(logits) > 1 else 0].argmax()))
        logits = harness.forward((1, other[-1:]))
        expected = reference_logits(model, other)
        close(logits, expected[-1:])
        assert logits[0].argmax() == expected[-1].argmax()


def test_longrope_of_a_short_context(tmp_path: Path) -> None:
    model = make_reference("phi3-long")
    model.save_pretrained(tmp_path)
    short, long, tokens = Harness(tmp_path, context_length=64), Harness(tmp_path), draw(64, 3)
    expected = reference_logits(model, tokens)
    close(torch.cat((short.forward((0, tokens[:40])), short.forward((0, tokens[40:])))), expected)
    assert (long.forward((0, tokens)) - expected).abs().max() > 0.1
    assert short.runner.fingerprint != long.runner.fingerprint
