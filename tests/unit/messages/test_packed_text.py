"""Long texts in messages take the memory of their UTF-8."""

from __future__ import annotations

import tracemalloc

import pytest

from pdserve.messages.packed_text import LONG_CHARACTERS, PackedText, pack, pack_joined, unpack

LONG = "a" * LONG_CHARACTERS


@pytest.mark.parametrize(
    "texts", [["a"], ["a", "\U0001f600"], [LONG, "b"], [LONG, "\U0001f600"], [LONG, "ü\ud800", ""], []]
)
def test_joined_texts_are_packed_as_one(texts: list[str]) -> None:
    packed = pack_joined("\n\n", texts)
    assert packed == pack("\n\n".join(texts))
    assert unpack(packed) == "\n\n".join(texts)


def test_a_wide_text_does_not_widen_the_others() -> None:
    texts = ["a" * 4_000_000, "\U0001f600"]
    tracemalloc.start()
    try:
        packed = pack_joined("\n", texts)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(packed, PackedText)
    assert most < 3 * len(packed)
