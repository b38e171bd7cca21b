"""Hidden states that a pass on the host gives besides its logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...messages.readout import ReadoutSpec

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


class HostHidden:
    """Hidden states of some tokens of a pass, after the final norm. The engine sets ``states``."""

    def __init__(self, tokens: I64) -> None:
        self.tokens = tokens
        """[H] int64: indices into the tokens of the pass."""
        self.states: F32 = np.empty((0, 0), dtype=np.float32)
        """[H, N] float32, N being the hidden size."""


def no_hidden() -> HostHidden:
    """Return a request for no hidden states."""
    return HostHidden(np.empty(0, dtype=np.int64))


def hidden_count(spec: ReadoutSpec, q_len: int) -> int:
    """Return the number of hidden states that a spec takes of an entry of ``q_len`` tokens: its last ones."""
    return {"mean": q_len, "last": 1}.get(spec.kind, 0)


def hidden_tokens(specs: Sequence[ReadoutSpec], ends: I64, q_lens: I64) -> I64:
    """Return indices into the step's tokens of the hidden states that ``specs`` take, one spec after another, [H].

    ``ends``: number of tokens up to each entry's end. ``q_lens``: number of tokens of each entry.
    """
    spans = [np.arange(ends[s.entry] - hidden_count(s, int(q_lens[s.entry])), ends[s.entry]) for s in specs]
    return np.concatenate(spans) if spans else np.empty(0, dtype=np.int64)
