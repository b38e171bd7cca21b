"""Sound requests for every path that a user key may use, so that attacks get past the first check of a handler.

``BODIES`` and ``PARAMETERS`` are by path. A path of the server that is missing in both fails a test
(``unit/harness/test_hostile_paths.py``): a new API is attacked from its first day.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import quote

from pdserve.runtime.web.apis import PATHS
from pdserve.runtime.web.paths import Access, AtRouter, PathFacts

from .cluster import MODEL

Json = dict[str, Any]
USER_PATHS = tuple(facts for facts in PATHS if facts.access in (Access.OPEN, Access.METRICS, Access.USER))
"""Paths that answer a user key."""
FORBIDDEN_PATHS = tuple(facts for facts in PATHS if facts not in USER_PATHS)
"""Paths that must refuse a user key."""
STREAMED = frozenset(facts.label for facts in PATHS if facts.at_router is AtRouter.GENERATE)
"""Paths with answers that can stream."""
WORDS = ("Hello there", "Name a colour.", "a", "\u4f60\u597d \U0001f600", "Count: 1 2 3")
LIMITS: dict[str, tuple[str, ...]] = {
    "/generate": ("sampling_params", "max_new_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_tokens",),
    "/v1/messages": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/completion": ("n_predict",),
    "/completions": ("n_predict",),
    "/api/generate": ("options", "num_predict"),
    "/api/chat": ("options", "num_predict"),
}
"""Field with the maximum number of tokens to generate, as names from the outermost object on, by path."""
REASONING = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a colour"}], "summary": []}
PARAMETERS_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


RESPONSE_ID = re.compile(rb'"id":\s*"(resp_[^"]{1,400})"')
"""The id of a response in an answer."""


class SoundRequest(NamedTuple):
    """A request that its handler accepts, if the ids in it are kept. ``label``: the path in the table of paths."""

    method: str
    label: str
    path: str
    body: Json | None

    def limited(self, tokens: int) -> SoundRequest:
        """Return the request with this limit of generated tokens."""
        *outer, last = LIMITS[self.label]
        body = place = dict(self.body or {})
        for name in outer:
            place[name] = place = dict(place.get(name, {}))
        place[last] = tokens
        return self._replace(body=body)


class Known:
    """Ids of the attacker's own responses, with the server that keeps each. Threads share it."""

    def __init__(self) -> None:
        self.responses: deque[tuple[str, str]] = deque(maxlen=512)
        """URL of the server and id of the response."""

    def note(self, server: str, answer: bytes) -> None:
        """Note the response that a server answered with, if it keeps it."""
        found = RESPONSE_ID.search(answer)
        if found is not None and b'"store":false' not in answer:
            self.responses.append((server, found[1].decode()))

    def draw(self, rng: random.Random) -> tuple[str, str]:
        """Return a server and the id of a response that it keeps; "" and an unknown id if none is kept yet."""
        known = list(self.responses)
        return rng.choice(known) if known else ("", "resp_none")


def few(rng: random.Random) -> int:
    """Return a small limit of tokens."""
    return rng.choice((1, 4, 16))


def function(name: str) -> Json:
    """Return a tool as OpenAI and Ollama describe it."""
    return {"type": "function", "function": {"name": name, "description": "x", "parameters": PARAMETERS_SCHEMA}}


def chat_messages(rng: random.Random) -> list[Json]:
    """Return a conversation of OpenAI's."""
    user = {"role": "user", "content": rng.choice(WORDS)}
    called = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    return rng.choice(
        [
            [user],
            [{"role": "system", "content": "Be brief."}, user],
            [user, {"role": "assistant", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "y"}]}],
            [
                user,
                {"role": "assistant", "tool_calls": [called], "reasoning_content": "z"},
                {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            ],
        ]
    )


def chat(rng: random.Random) -> Json:
    """Return a body of /v1/chat/completions."""
    more: list[Json] = [
        {},
        {"tools": [function("weather")], "tool_choice": rng.choice(("auto", "none", "required"))},
        {"response_format": {"type": "json_object"}},
        {"logprobs": True, "top_logprobs": 2, "n": 2},
        {"chat_template_kwargs": {"enable_thinking": True, "x": [1, {"y": "z"}]}, "stop": ["a"]},
    ]
    return {"messages": chat_messages(rng), "max_tokens": few(rng), **rng.choice(more)}


def anthropic_prompt(rng: random.Random) -> Json:
    """Return the fields of a prompt of Anthropic's."""
    user = {"role": "user", "content": rng.choice(WORDS)}
    text = {"type": "text", "text": "x"}
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [text], "is_error": True}
    tool = {"name": "weather", "input_schema": PARAMETERS_SCHEMA}
    more: list[Json] = [
        {"messages": [user]},
        {"messages": [user, {"role": "assistant", "content": [text]}, user], "system": [text]},
        {"messages": [user], "tools": [tool], "tool_choice": {"type": rng.choice(("auto", "any", "none"))}},
        {
            "messages": [
                user,
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "z", "signature": ""}, call]},
                {"role": "user", "content": [result, text]},
            ],
            "tools": [tool | {"defer_loading": False}, {"type": "web_search_20250305", "name": "web_search"}],
        },
        {"messages": [user, {"role": "system", "content": "Be brief."}], "thinking": {"type": "disabled"}},
        {"messages": [user], "output_config": {"format": {"type": "json_schema", "schema": PARAMETERS_SCHEMA}}},
    ]
    return rng.choice(more)


def anthropic(rng: random.Random) -> Json:
    """Return a body of /v1/messages."""
    return anthropic_prompt(rng) | {"max_tokens": few(rng), "stop_sequences": ["a"], "metadata": {"user_id": "m"}}


def responses(rng: random.Random) -> Json:
    """Return a body of /v1/responses that names no kept response."""
    user = {"role": "user", "content": [{"type": "input_text", "text": rng.choice(WORDS)}]}
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'}
    output = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    tool = {"type": "function", "name": "weather", "parameters": PARAMETERS_SCHEMA}
    more: list[Json] = [
        {"input": rng.choice(WORDS)},
        {"input": [user], "instructions": "Be brief.", "metadata": {"a": "b"}},
        {"input": [user, REASONING, call, output], "include": ["reasoning.encrypted_content"]},
        {"input": [user], "tools": [tool], "tool_choice": rng.choice(("auto", "none", "required"))},
        {"input": [user], "text": {"format": {"type": "json_schema", "name": "x", "schema": PARAMETERS_SCHEMA}}},
        {"input": [user], "reasoning": {"effort": "low"}, "chat_template_kwargs": {"x": 1}},
    ]
    store = rng.choice(({}, {"store": True}, {"store": False}, {"background": False}))
    return {"max_output_tokens": few(rng), **rng.choice(more), **store}


def ollama(rng: random.Random) -> Json:
    """Return the fields that both generating bodies of Ollama's share."""
    more: list[Json] = [{}, {"format": "json"}, {"format": PARAMETERS_SCHEMA}, {"keep_alive": -1}, {"think": False}]
    options = {"num_predict": few(rng), "temperature": 0, "seed": 1, "num_ctx": 64, "stop": ["a"]}
    return {"options": options, "stream": rng.random() < 0.5, **rng.choice(more)}


def ollama_chat(rng: random.Random) -> Json:
    """Return a body of /api/chat."""
    user = {"role": "user", "content": rng.choice(WORDS)}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}]}
    if rng.random() < 0.3:
        options = {"num_predict": few(rng)}
        result = {"role": "tool", "tool_name": "weather", "content": "sunny"}
        return {"messages": [user, call, result], "tools": [function("weather")], "options": options}
    return ollama(rng) | {"messages": rng.choice(([user], [{"role": "system", "content": "x"}, user, user]))}


def ollama_generate(rng: random.Random) -> Json:
    """Return a body of /api/generate."""
    how = rng.choice(({"raw": True, "think": None}, {"system": "Be brief."}))
    return ollama(rng) | {"prompt": rng.choice(WORDS), **how}


def native(rng: random.Random) -> Json:
    """Return a body of /generate."""
    return {"text": rng.choice(WORDS), "sampling_params": {"max_new_tokens": few(rng)}, "return_logprob": True}


def completions(rng: random.Random) -> Json:
    """Return a body of /v1/completions."""
    return {"prompt": rng.choice((*WORDS, [5, 6, 7])), "max_tokens": few(rng), "logprobs": 2, "echo": True}


def llama(rng: random.Random) -> Json:
    """Return a body of /completion."""
    prompts: list[Any] = [*WORDS, [5, 6, 7], [5, "a colour", 6], {"prompt_string": "a"}, ["a", [5, 6], ["b", 7]]]
    more: list[Json] = [
        {},
        {"json_schema": PARAMETERS_SCHEMA},
        {"grammar": 'root ::= "a" | "b" root'},
        {"n_cmpl": 2, "stop": ["a"], "logit_bias": [[5, 1.5], [6, False]]},
        {"cache_prompt": False, "id_slot": 0, "samplers": [], "seed": -1},
    ]
    fields = {"n_predict": few(rng), "n_probs": 2, "return_tokens": True, "temperature": 0}
    return {"prompt": rng.choice(prompts), **fields, **rng.choice(more)}


def rendered(rng: random.Random) -> Json:
    """Return a body of /apply-template."""
    more: list[Json] = [{}, {"tools": [function("weather")]}, {"chat_template_kwargs": {"x": [1, {"y": "z"}]}}]
    return {"messages": chat_messages(rng), "add_generation_prompt": rng.random() < 0.5, **rng.choice(more)}


def embeddings(rng: random.Random) -> Json:
    """Return a body of /v1/embeddings."""
    more: list[Json] = [{}, {"dimensions": 4}, {"encoding_format": "base64"}, {"user": "m", "cache_salt": "x"}]
    given = rng.choice((rng.choice(WORDS), list(WORDS), [5, 6, 7], [[5], [6, 7]]))
    return {"input": given, **rng.choice(more)}


def ollama_embed(rng: random.Random) -> Json:
    """Return a body of /api/embed."""
    more: list[Json] = [{}, {"dimensions": 4}, {"truncate": False, "keep_alive": -1, "options": {"num_ctx": 64}}]
    return {"input": rng.choice((rng.choice(WORDS), list(WORDS))), **rng.choice(more)}


def scored(rng: random.Random) -> Json:
    """Return a body of /v1/score."""
    labels: Json = {"label_token_ids": [5, 6], "apply_softmax": rng.random() < 0.5, "item_first": rng.random() < 0.5}
    texts = {"query": rng.choice(WORDS), "items": rng.choice((rng.choice(WORDS), list(WORDS)))}
    ids = {"query": [5, 6], "items": [[7], [8, 9]]}
    return rng.choice((texts | labels, ids | labels, {"text_1": rng.choice(WORDS), "text_2": list(WORDS)}))


def reranked(rng: random.Random) -> Json:
    """Return a body of /v1/rerank."""
    more: list[Json] = [{}, {"top_n": 2, "return_documents": False}, {"instruction": "Is it alike?"}]
    return {"query": rng.choice(WORDS), "documents": [*WORDS, {"text": "x"}], **rng.choice(more)}


def tokenized(rng: random.Random) -> Json:
    """Return a body of /tokenize."""
    return rng.choice(({"prompt": rng.choice(WORDS), "return_token_strs": True}, {"messages": chat_messages(rng)}))


def session(rng: random.Random) -> str:
    """Return the name of a session of the attacker's."""
    return f"m{rng.randrange(5)}"


BODIES: dict[str, Callable[[random.Random], Json]] = {
    "/ping": lambda rng: {},
    "/generate": native,
    "/v1/completions": completions,
    "/v1/chat/completions": chat,
    "/completion": llama,
    "/completions": llama,
    "/api/show": lambda rng: {"model": rng.choice((MODEL, f"{MODEL}:latest")), "verbose": True},
    "/api/generate": ollama_generate,
    "/api/chat": ollama_chat,
    "/v1/messages": anthropic,
    "/v1/messages/count_tokens": anthropic_prompt,
    "/v1/responses": responses,
    "/v1/responses/{id}/cancel": lambda rng: {},
    "/v1/embeddings": embeddings,
    "/v1/score": scored,
    "/v1/rerank": reranked,
    "/api/embed": ollama_embed,
    "/api/embeddings": lambda rng: {"prompt": rng.choice(WORDS)},
    "/tokenize": tokenized,
    "/detokenize": lambda rng: {"tokens": rng.choice(([5, 6], [[7], [8, 9]]))},
    "/apply-template": rendered,
    "/abort_request": lambda rng: {"rid": f"m{rng.randrange(4)}"},
    "/kv/snapshot": lambda rng: {"name": session(rng), "text": rng.choice(WORDS)},
    "/kv/restore": lambda rng: {"name": session(rng), "stream": rng.random() < 0.5},
    "/slots/{id}": lambda rng: {"filename": session(rng)},
    "/moved": lambda rng: {},
}
"""Bodies that a handler accepts, by the paths that take POST."""

PARAMETERS: dict[str, Callable[[random.Random, Known], str]] = {
    "/slots/{id}": lambda rng, known: f"/slots/m{rng.randrange(4)}?action={rng.choice(('save', 'restore', 'erase'))}",
    "/v1/models/{name}": lambda rng, known: f"/v1/models/{MODEL}",
    "/kv/sessions/{name}": lambda rng, known: f"/kv/sessions/{session(rng)}",
    "/v1/responses/{id}": lambda rng, known: f"/v1/responses/{quote(known.draw(rng)[1], safe='')}",
    "/v1/responses/{id}/cancel": lambda rng, known: f"/v1/responses/{quote(known.draw(rng)[1], safe='')}/cancel",
}
"""Targets with a parameter that exists, by path."""

FORBIDDEN: dict[str, Json | None] = {
    "/transfers": None,
    "/migrate": {"rid": "x", "bootstrap_host": "127.0.0.1", "bootstrap_port": 1},
    "/drain": {"to": ["127.0.0.1:1"]},
    "/role": {"role": "decode"},
    "/release_memory_occupation": {},
    "/resume_memory_occupation": {},
    "/kv/resize": {"max_total_tokens": 64},
    "/kv/hashes": {"text": "a"},
    "/start_profile": {"output_dir": "../x"},
    "/stop_profile": {},
    "/flush_cache": {},
    "/workers": {"url": "http://127.0.0.1:1"},
}
"""Bodies of orders that a user key must not give, by path. None: the path takes GET."""


def is_known(facts: PathFacts) -> bool:
    """Return whether there is a sound request for every method of a path of ``USER_PATHS``."""
    has_body = facts.label in BODIES or "POST" not in facts.methods
    return has_body and (facts.label in PARAMETERS or "{" not in facts.path)


def sound_request(facts: PathFacts, rng: random.Random, known: Known) -> SoundRequest:
    """Return a sound request for a path of ``USER_PATHS``."""
    method = rng.choice(facts.methods)
    path = PARAMETERS[facts.label](rng, known) if "{" in facts.path else facts.path
    return SoundRequest(method, facts.label, path, BODIES[facts.label](rng) if method == "POST" else None)
