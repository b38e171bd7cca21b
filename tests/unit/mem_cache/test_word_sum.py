"""The checksum that devices compute, as the host does."""

from __future__ import annotations

import numpy as np
import pytest

from pdserve.mem_cache.kv_pages.word_sum import WordSum, host_checksum


def random_bytes(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)


@pytest.mark.parametrize("count", [0, 8, 8000, (1 << 19) + 24])
def test_parts_of_any_length_give_what_the_whole_does(count: int) -> None:
    data, rng = random_bytes(count), np.random.default_rng(1)
    cuts = sorted(rng.integers(0, count + 1, 20).tolist())
    hasher = WordSum()
    for part in np.split(data, cuts):
        hasher.update(part.data)
    assert hasher.intdigest() == host_checksum(data)


def test_a_word_that_is_not_whole_is_filled_up_by_zeros() -> None:
    hasher = WordSum()
    hasher.update(b"0123456789")
    assert hasher.intdigest() == host_checksum(np.frombuffer(b"0123456789".ljust(16, b"\0"), dtype=np.uint8))


def test_it_is_the_sum_of_mixed_words() -> None:
    def mixed(word: int, place: int) -> int:
        z = (word + place * 0x9E3779B97F4A7C15) % 2**64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    words = [1, 2**64 - 1, 0]
    expected = sum(mixed(word, place) for place, word in enumerate(words, 1)) % 2**64
    assert host_checksum(np.array(words, dtype=np.uint64).view(np.uint8)) == expected
