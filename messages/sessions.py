"""Requests that are written down, to go on later: here after a restart, or at another instance.

``SnapshotReq`` asks the scheduler for a request's state and has its KV put into the store; what HTTP writes down is the
``SessionState`` of the answer. ``ResumeReq`` brings it back, as a request like any other.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from .base import Message, unpack_i32
from .moves import RunningRequest
from .outputs import TokenLogprob


class SessionState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All that an instance of the same model needs to go on with a request, but for its KV, which a store has.

    ``fingerprint``: the model's. ``kv_seed``: what the hashes of its pages begin with (``mem_cache/page_hash.py``);
    where it is another's, the KV is as well, and computed again. ``logprobs``: of all of its output where they are
    wanted, ``input_logprobs`` of its prompt. ``kv_hashes``: with ``--kv-debug``, what its whole pages held, from the
    first on, as in ``TransferDone``.
    """

    running: RunningRequest
    fingerprint: Annotated[str, Meta(min_length=1, max_length=1024)]
    kv_seed: Annotated[bytes, Meta(min_length=16, max_length=16)]
    logprobs: list[TokenLogprob] = []
    input_logprobs: list[TokenLogprob] | None = None
    kv_hashes: bytes = b""

    @property
    def token_ids(self) -> bytes:
        """Its prompt and its output, int32."""
        return self.running.request.input_ids + self.running.output

    @property
    def output_len(self) -> int:
        """Tokens that it has generated."""
        return len(self.running.output) // 4

    @property
    def is_open(self) -> bool:
        """Whether more of its answer is to come."""
        output = unpack_i32(self.running.output)
        is_stopped = len(output) > 0 and int(output[-1]) in self.running.request.stop_ids
        return len(output) < self.running.max_new_tokens and not is_stopped


class SnapshotReq(Message):
    """HTTP → scheduler: the state of a request that runs here, or has ended lately.

    ``with_output`` False: as it was before its first token. ``keep_until``: when its KV may go from the store (Unix
    time). ``key_name``: whose it has to be, None for anybody's: another key's request may have had the name before.
    """

    id: int
    rid: str
    with_output: bool
    keep_until: float
    key_name: str | None = None


class SnapshotResult(Message):
    """``state``: None where there is none, for which ``status`` and ``message`` say why.

    ``kv_tokens``: so many of its first tokens have their KV in the store, ``kv_bytes`` long; where those are not all
    that were computed ``message`` says why.
    """

    id: int
    state: SessionState | None = None
    status: int = 200
    message: str = ""
    kv_tokens: int = 0
    kv_bytes: int = 0


class ResumeReq(Message):
    """HTTP → scheduler: go on with this; named and answered as its ``request`` is."""

    state: SessionState


class ReleaseReq(Message):
    """HTTP → scheduler: nobody comes back for the KV of these tokens (int32), but for the first ``shared`` of them. No
    answer.
    """

    token_ids: bytes
    extra_key: str
    shared: int = 0


SessionMessage = SnapshotReq | ResumeReq | ReleaseReq
