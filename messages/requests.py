"""Messages that carry a request inwards: HTTP → tokenizer → scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeVar

import msgspec

from .base import Message
from .conversation import Conversation
from .sampling import SamplingParams

INT63 = 2**63
"""Seeds and bootstrap rooms are below this."""


class Bootstrap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names one hand-over: the prefill's bootstrap server and the room (63 bits) drawn for this request.

    ``refusal``: why that address is not to be asked, "" where it may be. ``vouched``: whether a router of this cluster,
    or whoever started this instance, named it; else it may be anybody's. ``leg``: which one this instance is meant to
    be, "" where nobody said.
    """

    host: str
    port: int
    room: int
    refusal: str = ""
    vouched: bool = False
    leg: Literal["", "prefill", "decode"] = ""

    @property
    def source(self) -> str:
        """Where KV comes from that only requests of the same source may use, "" for all."""
        return "" if self.vouched else f"\0{self.host}:{self.port}"


MAX_TOP_LOGPROBS = 128
"""Alternatives that a position may list."""


class LogprobOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client wants to know about probabilities.

    ``start_len``: first prompt position whose logprob is returned, -1 for none (output tokens only).
    ``top_num``: how many alternatives a position lists.
    """

    start_len: int = -1
    top_num: int = 0


class TokenizeReq(Message):
    """HTTP → tokenizer: one request, exactly one of ``text``, ``input_ids`` and ``chat`` set.

    ``arrival`` is ``time.monotonic()`` (one clock for all processes of a host) when HTTP accepted the request.
    ``place``: number of answers of the same batch that come before this one. ``forks``: rids of further answers to the
    same prompt, which is sent and tokenized once; ``forked`` says how they differ.
    ``stream``: whether the client sees the output grow; otherwise nobody looks at it before the end.
    ``add_special_tokens``: whether the tokenizer puts its own around the text (a BOS, mostly); None: around a plain
    text, not around a conversation, whose template prints them. ``return_prompt``: the answer says what the prompt was.
    ``timeout_s``: seconds from its arrival in which it has to be over, 0: as many as it takes. ``key_name``: of the API
    key that it came with, and ``user``: for whom that has sent it; "" where nobody said.
    """

    rid: str
    sampling: SamplingParams
    arrival: float
    text: str | None = None
    input_ids: list[int] | None = None
    chat: Conversation | None = None
    add_special_tokens: bool | None = None
    logprobs: LogprobOptions | None = None
    bootstrap: Bootstrap | None = None
    extra_key: str = ""
    stream: bool = False
    return_prompt: bool = False
    place: int = 0
    forks: list[str] = []
    priority: int = 0
    timeout_s: float = 0.0
    key_name: str = ""
    user: str = ""

    @property
    def rids(self) -> list[str]:
        """The rid of each answer."""
        return [self.rid, *self.forks]


class ChatRendered(Message):
    """Within the tokenizer process: the conversation of a request has been rendered. ``characters``: of its text."""

    rid: str
    characters: int


class GenerateReq(Message):
    """Tokenizer → scheduler: a request with its prompt as int32 bytes.

    ``stop_ids``: token ids that end the output: end-of-sequence ids (unless ``ignore_eos``) and ``stop_token_ids``.
    ``fork_of``: rid of an earlier request with the same prompt, which is computed, and handed over, once.
    """

    rid: str
    input_ids: bytes
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    arrival: float
    logprobs: LogprobOptions | None = None
    bootstrap: Bootstrap | None = None
    extra_key: str = ""
    stream: bool = False
    return_prompt: bool = False
    place: int = 0
    fork_of: str = ""
    priority: int = 0
    timeout_s: float = 0.0
    key_name: str = ""
    user: str = ""


R = TypeVar("R", TokenizeReq, GenerateReq)


def forked(first: R, i: int, rid: str) -> R:
    """Return answer ``i`` (0: the first) to the prompt of ``first``, named ``rid``.

    Answers differ in their seed, so that answer 0 is what a request for a single answer gives. Each has a bootstrap
    room of its own: both instances of a pair count the rooms in the same way.
    """
    if i == 0:
        return first
    sampling = msgspec.structs.replace(first.sampling, seed=(first.sampling.seed + i) % INT63)
    bootstrap = first.bootstrap
    if bootstrap is not None:
        bootstrap = msgspec.structs.replace(bootstrap, room=(bootstrap.room + i) % INT63)
    return msgspec.structs.replace(first, rid=rid, sampling=sampling, bootstrap=bootstrap, place=first.place + i)


class ForkedReq(Message):
    """Tokenizer → scheduler: several answers to one prompt, which is sent once. ``forks``: rids of those after the
    first, which is ``request``.
    """

    request: GenerateReq
    forks: list[str]

    def requests(self) -> Iterator[GenerateReq]:
        """Yield one request for each answer; they share the prompt's bytes."""
        yield self.request
        for i, rid in enumerate(self.forks, 1):
            yield msgspec.structs.replace(forked(self.request, i, rid), fork_of=self.request.rid)


class AbortReq(Message):
    """End a request early. Travels the request's own road, so that it never overtakes it. ``rid`` "" means all."""

    rid: str
    reason: str = "aborted by the client"


class StopReq(Message):
    """Detokenizer → scheduler: a stop string was found and the client answered; give the request's memory back."""

    rid: str
