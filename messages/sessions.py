"""Saved requests, which continue later: here after a restart, or at another instance.

``SnapshotReq`` asks the scheduler for a request's state, and has its KV written to the store. HTTP saves the
``SessionState`` of the answer in a file. ``ResumeReq`` brings it back as an ordinary request.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from .base import Message, unpack_i32
from .moves import RunningRequest
from .outputs import TokenLogprob
from .question import Answer, Question


class SessionState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All that an instance of the same model needs to go on with a request, except its KV, which is in a store."""

    running: RunningRequest
    fingerprint: Annotated[str, Meta(min_length=1, max_length=1024)]
    """Fingerprint of the model."""
    kv_seed: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """Seed of the page hashes (``mem_cache/page_hash.py``). An instance with another seed computes the KV again."""
    logprobs: list[TokenLogprob] = []
    """Log-probabilities of the whole output, if the client asked for them."""
    input_logprobs: list[TokenLogprob] | None = None
    """Log-probabilities of the prompt, if the client asked for them."""
    kv_hashes: bytes = b""
    """Hashes of its whole pages from the first on, as in ``TransferDone``; only with ``--kv-debug``."""

    @property
    def token_ids(self) -> bytes:
        """Return the token ids of prompt and output, in this order (int32 bytes)."""
        return self.running.request.input_ids + self.running.output

    @property
    def output_len(self) -> int:
        """Number of generated tokens."""
        return len(self.running.output) // 4

    @property
    def is_open(self) -> bool:
        """Return whether the answer is unfinished: shorter than its limit, and without a stop token at its end."""
        output = unpack_i32(self.running.output)
        is_stopped = len(output) > 0 and int(output[-1]) in self.running.request.stop_ids
        return len(output) < self.running.max_new_tokens and not is_stopped


class SnapshotResult(Answer):
    """Scheduler → HTTP: result of a ``SnapshotReq``."""

    state: SessionState
    message: str = ""
    """Reason why the store has KV of fewer tokens than were computed."""
    kv_tokens: int = 0
    """Number of first tokens with KV in the store."""
    kv_bytes: int = 0
    """Bytes of that KV."""


class SnapshotReq(Question[SnapshotResult]):
    """HTTP → scheduler: return the state of a request that runs here or has ended recently."""

    rid: str
    with_output: bool
    """False: return the state before its first token."""
    keep_until: float
    """Time until which the store keeps its KV (Unix time)."""
    key_name: str | None = None
    """API key that the request has to belong to, because requests of other keys may have used its name before. None:
    any key.
    """


class ResumeReq(Message):
    """HTTP → scheduler: continue this request. Its name and its answer are those of ``running.request``."""

    state: SessionState


class ReleaseReq(Message):
    """HTTP → scheduler: the KV of these tokens is no longer needed. There is no answer."""

    token_ids: bytes
    """Token ids (int32)."""
    extra_key: str
    shared: int = 0
    """Number of first tokens with KV that other sessions still need."""
