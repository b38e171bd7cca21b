"""Messages that carry a request inwards: HTTP → tokenizer → scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import msgspec

from .base import Message
from .conversation import Conversation
from .packed_text import Text
from .readout import NO_READOUT, Readout
from .sampling import SamplingParams

INT63 = 2**63
"""Exclusive upper limit of seeds and bootstrap rooms."""


class Bootstrap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Identity of one hand-over: the prefill's bootstrap server, and the room (63 bits) drawn for this request."""

    host: str
    port: int
    room: int
    refusal: str = ""
    """Why this address must not be contacted; "" if it may be."""
    trusted: bool = False
    """Whether a router of this cluster, or an option of this instance, named the address. Otherwise it may be any
    client's.
    """
    leg: Literal["", "prefill", "decode"] = ""
    """Leg that this instance is meant to be; "" if the request does not say."""

    @property
    def source(self) -> str:
        """Return a name made of the prefill's address if only the client gave it, or "" if it is ``trusted``.

        KV from a source with a name may only be used by requests of the same source.
        """
        return "" if self.trusted else f"\0{self.host}:{self.port}"


MAX_TOP_LOGPROBS = 128
"""Maximum number of alternatives that a position lists."""


class LogprobOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Log-probabilities that a client asked for."""

    start_len: int = -1
    """First prompt position with a returned logprob; -1: output tokens only."""
    top_num: int = 0
    """Number of alternatives that a position lists."""


class RequestTerms(Message):
    """The fields of a request that are the same in ``TokenizeReq`` and ``GenerateReq``."""

    rid: str
    sampling: SamplingParams
    arrival: float
    """Time at which HTTP accepted the request (``time.monotonic()``, one clock for all processes of a host)."""
    logprobs: LogprobOptions | None = None
    bootstrap: Bootstrap | None = None
    extra_key: str = ""
    stream: bool = False
    """Whether the client sees the output grow; otherwise it gets the output at the end."""
    return_prompt: bool = False
    """Whether the answer contains the prompt."""
    place: int = 0
    """Number of answers of the same batch that come before this one."""
    priority: int = 0
    timeout_s: float = 0.0
    """Seconds after its arrival in which the request has to end; 0: no limit."""
    key_name: str = ""
    """Name of the API key that came with the request; "" without one."""
    user: str = ""
    """Name of the user that the API key's owner sent the request for; "" if the request names none."""
    readout: Readout = NO_READOUT
    """Vector that the client wants from the pass over the prompt."""

    @property
    def terms(self) -> dict[str, Any]:
        """Return the fields of ``RequestTerms`` by name, for another message of the same request."""
        return {name: getattr(self, name) for name in RequestTerms.__struct_fields__}


class TokenizeReq(RequestTerms, kw_only=True):
    """HTTP → tokenizer: one request, exactly one of ``text``, ``input_ids`` and ``chat`` set."""

    text: Text | None = None
    input_ids: list[int] | None = None
    chat: Conversation | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens (mostly a BOS). None: to a plain text, but not to a conversation,
    because its template prints them.
    """
    forks: list[str] = []
    """Rids of further answers to the same prompt, which is sent and tokenized once. ``forked`` says how they differ."""

    @property
    def rids(self) -> list[str]:
        """Return the rids of all answers to the prompt, this request's own first."""
        return [self.rid, *self.forks]


class ChatRendered(Message):
    """Within the tokenizer process: the conversation of a request has been rendered. ``characters``: of its text."""

    rid: str
    characters: int


class GenerateReq(RequestTerms, kw_only=True):
    """Tokenizer → scheduler: a request with its prompt as int32 bytes.

    ``stop_ids``: token ids that end the output: end-of-sequence ids (unless ``ignore_eos``) and ``stop_token_ids``.
    ``fork_of``: rid of an earlier request with the same prompt, which is computed, and handed over, once.
    """

    input_ids: bytes
    stop_ids: tuple[int, ...]
    fork_of: str = ""

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.input_ids) // 4  # int32


R = TypeVar("R", TokenizeReq, GenerateReq)


def forked(first: R, i: int, rid: str) -> R:
    """Return the request for answer ``i`` (0: ``first`` itself) to the prompt of ``first``, under the name ``rid``.

    Answers differ in their seed, so that answer 0 is what a request for a single answer gives. Each has a bootstrap
    room of its own: both instances of a pair count the rooms in the same way. ``rid`` is ignored for answer 0.
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
        """Yield one request for each answer, the first one's first; they share the prompt's bytes.

        All but the first name it in ``fork_of``.
        """
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
