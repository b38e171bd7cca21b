"""Converts a checked body to requests to the engine: one ``PromptPlan`` for each prompt.

The native and the OpenAI endpoints differ in their fields and answers, but make the same plans.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from ....messages.conversation import Conversation
from ....messages.grammar import Grammar
from ....messages.readout import NO_READOUT, Readout
from ....messages.requests import Bootstrap, LogprobOptions
from ....messages.sampling import OutputMarks, SamplingParams
from ....model_files.sampling_defaults import SamplingDefaults
from ..bodies.fields import INT64_MAX
from ..bodies.request_fields import RequestFields, SamplingFields
from ..errors import bad_request
from .bootstrap_gate import BootstrapGate

V = TypeVar("V")
MAX_CHOICES = 4096
RANDOM_SEED = -1
"""A seed that asks for a new random one each time, as in llama.cpp and the clients made for it."""
ALL_TOKENS = -1
"""The ``top_k`` that cuts nothing off; a client's 0 means the same."""
SHARED_FIELDS = tuple(name for name in SamplingParams.__struct_fields__ if name in SamplingFields.model_fields)
"""Fields of a body that the engine takes by the same name."""
GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: float32 logits divided by it would overflow."""


class Prompt(NamedTuple):
    """A prompt as text, token ids or a conversation: exactly one of them is set."""

    text: str | None = None
    input_ids: list[int] | None = None
    chat: Conversation | None = None


class Terms(NamedTuple):
    """Terms of a request. ``timeout_s``: seconds until it has to be over, 0 for no limit. ``user``: its user's name."""

    priority: int = 0
    timeout_s: float = 0.0
    user: str = ""


NO_TERMS = Terms()


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """One prompt and the ``n`` choices wanted for it.

    ``rid`` names the first choice if ``n`` is 1, else choice ``i`` is ``rid-i``. ``keep_output``: False if the client
    asked for no token at all. The engine computes one, and it is dropped. ``return_prompt``: the answer needs the
    prompt's tokens or text as the tokenizer has them. ``readout``: vector that is read from the pass over the prompt.
    """

    prompt: Prompt
    sampling: SamplingParams
    n: int
    rid: str
    keep_output: bool
    logprobs: LogprobOptions | None
    bootstrap: Bootstrap | None
    extra_key: str
    add_special_tokens: bool | None = None
    return_prompt: bool = False
    terms: Terms = NO_TERMS
    readout: Readout = NO_READOUT


class Naming(NamedTuple):
    """One prompt's share of ``RequestFields``."""

    rid: str
    bootstrap: Bootstrap | None
    extra_key: str


def sampling_params(
    fields: SamplingFields,
    max_new: int,
    min_new: int,
    seed: int | None,
    defaults: SamplingDefaults,
    marks: OutputMarks | None = None,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """Convert ``fields`` to the engine's parameters, with the model's ``defaults`` for those that the client left out.

    ``max_new``, ``min_new``: limits of the output in tokens. A ``max_new`` of 0 becomes 1, as the engine always
    computes a token. ``marks``: what the detokenizer needs to know of the answer's format. ``grammar``: what the output
    must match, in place of the fields' own. A seed is drawn if the client gives none, or -1. Of any other seed, also a
    negative one, the low 63 bits count.
    """
    left_out = {name: value for name, value in defaults.given.items() if name not in fields.model_fields_set}
    if left_out:
        fields = fields.model_copy(update=left_out)
    changed = {
        "seed": secrets.randbits(63) if seed is None or seed == RANDOM_SEED else seed & INT64_MAX,
        # The engine always computes a token; PromptPlan.keep_output drops it.
        "max_new_tokens": max(max_new, 1),
        "min_new_tokens": min_new,
        "temperature": fields.temperature if fields.temperature >= GREEDY_BELOW else 0.0,
        "top_k": fields.top_k or ALL_TOKENS,
        "stop": (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop),
        "stop_token_ids": tuple(fields.stop_token_ids),
        "logit_bias": {int(token_id): bias for token_id, bias in fields.logit_bias.items()},
        "marks": marks,
        "grammar": grammar or fields.grammar(),
    }
    return SamplingParams(**{name: getattr(fields, name) for name in SHARED_FIELDS} | changed)


def make_prompts(field: str, texts: Sequence[str] | None, id_lists: Sequence[list[int]] | None) -> list[Prompt]:
    """Make a ``Prompt`` of each text and each list of token ids.

    Raises ``ApiError`` 400 if there is none or one is empty. ``field``: their name in the client's body, for errors.
    """
    prompts = [Prompt(text=t) for t in texts or ()] + [Prompt(input_ids=ids) for ids in id_lists or ()]
    if not prompts:
        raise bad_request(field, "is empty; give at least one prompt")
    for i, prompt in enumerate(prompts):
        if not (prompt.text or prompt.input_ids):
            where = field if len(prompts) == 1 else f"{field}[{i}]"
            raise bad_request(where, "is empty; a prompt needs at least one token")
    return prompts


def name_requests(
    fields: RequestFields, counts: Sequence[int], batch: bool, gate: BootstrapGate, default_key: str | None = None
) -> list[Naming]:
    """Return id, bootstrap address and cache namespace of each prompt. Prompt ``i`` has ``counts[i]`` choices.

    ``batch``: whether the body has a list of prompts. ``default_key``: namespace of prompts without one. A scalar
    ``bootstrap_room`` names the first choice of a batch; the others count on from it, modulo 2^63. So both instances of
    a pair, which get the same body, agree. Refused addresses raise nothing: the ``Bootstrap`` says why. Raises
    ``ApiError`` 400.
    """
    if sum(counts) > MAX_CHOICES:
        raise bad_request("n", f"{sum(counts)} answers in one request, the limit is {MAX_CHOICES}; split the batch")
    size = len(counts)
    rids = _rids(fields.rid, size, batch)
    keys = per_prompt("extra_key", fields.extra_key, size, batch)
    hosts = per_prompt("bootstrap_host", fields.bootstrap_host, size, batch)
    ports = per_prompt("bootstrap_port", fields.bootstrap_port, size, batch)
    if isinstance(fields.bootstrap_room, int):
        firsts = accumulate(counts[:-1], initial=0)
        rooms: list[int | None] = [(fields.bootstrap_room + first) & INT64_MAX for first in firsts]
    else:
        rooms = per_prompt("bootstrap_room", fields.bootstrap_room, size, batch)
    named = fields.bootstrap_host is not None
    namings, refusal, trusted = [], gate.refusal(fields) if named else "", named and gate.trusted(fields)
    for rid, key, host, port, room in zip(rids, keys, hosts, ports, rooms, strict=True):
        if (host is None) != (room is None):
            missing, given = (
                ("bootstrap_room", "bootstrap_host") if room is None else ("bootstrap_host", "bootstrap_room")
            )
            raise bad_request(missing, f"is required with {given}")
        bootstrap = None
        if host is not None and room is not None:
            leg = fields.bootstrap_leg or ""
            bootstrap = Bootstrap(host, port or gate.default_port, room, refusal, trusted, leg)
        namings.append(Naming(rid, bootstrap, key or default_key or ""))
    return namings


def per_prompt(field: str, value: Any, size: int, batch: bool) -> list[Any]:
    """Return ``value`` for each of ``size`` prompts: split a list, repeat anything else.

    Raises ``ApiError`` 400 for a list of another length, or if the prompts are no ``batch``.
    """
    if not isinstance(value, list):
        return [value] * size
    if not batch:
        raise bad_request(field, "is a list, but there is one prompt; give one value")
    if len(value) != size:
        raise bad_request(field, f"has {len(value)} entries for {size} prompts")
    return value


def _rids(rid: str | list[str] | None, size: int, batch: bool) -> list[str]:
    assert rid is not None, "request_names.named comes first"
    if isinstance(rid, str):
        return [f"{rid}-{i}" for i in range(size)] if batch else [rid]
    rids: list[str] = per_prompt("rid", rid, size, batch)
    if len(set(rids)) != size:
        raise bad_request("rid", "two prompts of the batch share an id")
    return rids
