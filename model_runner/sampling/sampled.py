"""What a sampler answers, as NumPy arrays on the host or as tensors on a device."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from .row_params import F32, I64, RowParams

A = TypeVar("A")
HostArray = npt.NDArray[Any]
F64 = npt.NDArray[np.float64]


class Sampled(NamedTuple, Generic[A]):
    """The tokens of N rows."""

    tokens: A
    """[N] int64."""
    finite: A
    """[N] bool; False where logits held NaN, +inf or only -inf. Such a row's token means nothing."""


class Scored(NamedTuple, Generic[A]):
    """Log-probabilities of N positions, with K alternatives each."""

    targets: A
    """[N] int64."""
    logprobs: A
    """[N] float32, of ``targets``."""
    ids: A
    """[N, K] int64, best first."""
    best: A
    """[N, K] float32, of ``ids``."""


class HostSampler(Protocol):
    """Chooses tokens from logits on the host, and sums their exponentials."""

    def sample(self, logits_NV: F32, params: RowParams, positions: I64) -> Sampled[HostArray]:
        """Return the token at ``positions[i]`` of each row's request, and whether each row's logits are finite.

        ``logits_NV``: left as they are. ``params``: [N].
        """
        ...

    def log_sums(self, logits_NV: F32, rows: I64) -> F64:
        """Return the logarithm of the sum of exponentials of each of these ``rows`` of logits, float64.

        It is NaN for a row with logits that are not finite. A row's result does not depend on the others.
        """
        ...
