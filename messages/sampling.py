"""Sampling parameters, as they travel from HTTP to the model worker."""

from __future__ import annotations

import msgspec

MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
"""Maximum of the repetition penalty, and of the absolute value of frequency and presence penalties."""
MIN_REPETITION_PENALTY = 0.01
"""Minimum of the repetition penalty. A logit divided by less may overflow, which looks like a broken model."""
MAX_BIAS = 100.0
"""Maximum absolute value of a token's logit bias."""
MAX_STOPS = 32
"""Maximum number of stop strings."""
MAX_STOP_CHARS = 1024


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen.

    ``temperature`` 0 means greedy; ``top_k`` -1 means the whole vocabulary. ``seed`` is always set by the HTTP
    process (drawn when the client gave none), so a request can be replayed on any instance. HTTP expands ``n`` into
    one request a choice before this struct is made.
    """

    seed: int
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] = {}
    """Token id → what is added to its logit."""

    @property
    def has_penalties(self) -> bool:
        """Whether the sampler needs the request's token history."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0
