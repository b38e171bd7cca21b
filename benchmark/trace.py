"""Replay of request traces in Mooncake's format: JSON lines of timestamp, input_length, output_length, hash_ids.

``hash_ids`` names the prompt's blocks of 512 tokens; equal ids are equal blocks. The contents are not in the trace. So
each id stands for random tokens of its own, and a prefix cache could reuse as much as in the original.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from .errors import WorkloadError
from .prompts import RequestSpec, Seed, TokenIds, TokenRange

BLOCK_TOKENS = 512
MS = 1e-3


class TraceEntry(msgspec.Struct, frozen=True):
    """One line. ``timestamp`` in ms from the trace's start, lengths in tokens."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


@dataclass(frozen=True)
class TracedRequest:
    """``at``: seconds after the first request."""

    at: float
    spec: RequestSpec


def read_trace(path: Path, limit: int | None) -> list[TraceEntry]:
    """Read the first ``limit`` entries of the file (None: all), and return them in order of time.

    Raises ``WorkloadError``.
    """
    decoder = msgspec.json.Decoder(TraceEntry)
    entries: list[TraceEntry] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if limit is not None and len(entries) >= limit:
                    break
                if line.strip():
                    entries.append(_checked(decoder.decode(line), path, number))
    except OSError as e:
        raise WorkloadError(f"the trace can't be read: {e}") from e
    except msgspec.MsgspecError as e:
        raise WorkloadError(f"{path}, line {number}: {e}") from e
    if not entries:
        raise WorkloadError(f"{path} holds no requests")
    return sorted(entries, key=lambda entry: entry.timestamp)


def _checked(entry: TraceEntry, path: Path, number: int) -> TraceEntry:
    if entry.input_length < 1 or len(entry.hash_ids) * BLOCK_TOKENS < entry.input_length:
        raise WorkloadError(
            f"{path}, line {number}: {len(entry.hash_ids)} blocks of {BLOCK_TOKENS} tokens don't make up "
            f"an input_length of {entry.input_length}"
        )
    return entry


class TraceReplay:
    """Turns entries into requests, lengths and times scaled.

    Blocks are whole tokens, so ``length_scale`` is rounded to steps of 1/512 (``effective_scale``); a prompt is its
    blocks, cut to its scaled length.
    """

    def __init__(self, tokens: TokenRange, seed: Seed, length_scale: float, time_scale: float) -> None:
        self._tokens = tokens
        self._seed = seed
        self._block_len = max(1, round(BLOCK_TOKENS * length_scale))
        self._time_scale = time_scale

    @property
    def effective_scale(self) -> float:
        """Return the factor by which lengths are scaled, rounded to steps of 1/512."""
        return self._block_len / BLOCK_TOKENS

    def replay(self, entries: list[TraceEntry]) -> list[TracedRequest]:
        """Make a request for each entry, in the order of ``entries``, with scaled lengths and times.

        The first one arrives at 0 seconds.
        """
        first = entries[0].timestamp
        return [
            TracedRequest((entry.timestamp - first) * MS * self._time_scale, self._request(entry)) for entry in entries
        ]

    def _request(self, entry: TraceEntry) -> RequestSpec:
        prompt = np.concatenate([self._block(block) for block in entry.hash_ids])
        return RequestSpec(prompt[: self._scaled(entry.input_length)], self._scaled(entry.output_length))

    def _block(self, block: int) -> TokenIds:
        # Drawn again for each use: cheaper than it looks (10 µs), and a long trace's blocks would fill the memory.
        return self._tokens.draw(np.random.default_rng([*self._seed, block]), self._block_len)

    def _scaled(self, length: int) -> int:
        return max(1, round(length * self.effective_scale))
