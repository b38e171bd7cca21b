"""Requests to send, and random prompts for them: equal seeds give equal prompts, in whatever order they are drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]
Seed = tuple[int, ...]
_REQUEST, _PREFIX = 0, 1


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request. ``prompt``: token ids, or text that the server tokenizes; ``output_len``: tokens to ask for."""

    prompt: TokenIds | str
    output_len: int

    @property
    def input_len(self) -> int | None:
        """Return the number of prompt tokens; None for a text, because only the server can count them."""
        return None if isinstance(self.prompt, str) else len(self.prompt)


@dataclass(frozen=True)
class TokenRange:
    """The ids that random tokens are drawn from, both ends included. Keep special tokens out of it."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int) -> TokenIds:
        """Draw ``count`` token ids, int32 [count]."""
        return rng.integers(self.low, self.high + 1, count, dtype=np.int32)


@dataclass(frozen=True)
class PromptShape:
    """What random requests look like: see the options of the same names."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0
    prefix_share: float = 1.0
    num_prefixes: int = 1


def random_requests(shape: PromptShape, tokens: TokenRange, seed: Seed) -> Iterator[RequestSpec]:
    """Yield endless random requests of one shape. Equal seeds give equal requests."""
    prefixes = [
        tokens.draw(np.random.default_rng([*seed, _PREFIX, i]), shape.prefix_len) for i in range(shape.num_prefixes)
    ]
    index = 0
    while True:
        # Each request has a generator of its own, so its prompt does not depend on earlier draws.
        yield _random_request(shape, tokens, prefixes, np.random.default_rng([*seed, _REQUEST, index]))
        index += 1


def _random_request(
    shape: PromptShape, tokens: TokenRange, prefixes: list[TokenIds], rng: np.random.Generator
) -> RequestSpec:
    input_len, output_len = (_draw_len(rng, mean, shape.range_ratio) for mean in (shape.input_len, shape.output_len))
    prompt = tokens.draw(rng, shape.prefix_len + input_len)
    if shape.prefix_len and rng.random() < shape.prefix_share:
        prompt[: shape.prefix_len] = prefixes[int(rng.integers(len(prefixes)))]
    return RequestSpec(prompt, output_len)


def _draw_len(rng: np.random.Generator, mean: int, ratio: float) -> int:
    spread = int(mean * ratio)
    return max(1, mean + int(rng.integers(-spread, spread + 1)))
