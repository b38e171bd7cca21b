"""The requests of the recorded answers: every path of instances and routers, good and bad, drawn from one seed.

``recorded_answers.py`` sends them in this order. A request changes only state that a later one of the list restores.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pdserve.runtime.web.apis import PATHS
from pdserve.runtime.web.paths import GET, POST, Access, PathFacts

SEED = 18
BODIES = 14
"""Good bodies of each generating path. Each is sent four times: to both fronts, plain and streamed."""
FRONTS = ("instance", "router")
USER, ADMIN, WRONG, NONE = "user", "admin", "wrong", "none"
"""Names of the keys that a request can show."""
Fields = Mapping[str, Any]


class Recorded(NamedTuple):
    """One request. ``body``: JSON-ready, bytes that are sent as they are, or None for no body."""

    front: str
    method: str
    path: str
    key: str = USER
    body: Any = None
    headers: Mapping[str, str] = {}


TEXTS = ("Hello", "The sea", "One, two, three", "naïve 火", "a\nb")
ID_LISTS = ([50, 900, 77], [4000, 4001], list(range(100, 112)))
COMMON_SAMPLING: Mapping[str, Sequence[Any]] = {
    "n": (2, 3),
    "top_p": (0.5,),
    "top_k": (5, 0),
    "frequency_penalty": (0.5,),
    "repetition_penalty": (1.1,),
    "stop": ("zzz", ["x", "e"]),
    "stop_token_ids": ([7], [11, 12]),
    "ignore_eos": (True,),
    "skip_special_tokens": (False,),
    "logit_bias": ({"300": 100.0}, {"300": 50, "301": 50}),
}
BAD_SAMPLING: Mapping[str, Sequence[Any]] = {
    "n": (0, 65, "2"),
    "temperature": (-1, "hot"),
    "top_p": (0, 1.5),
    "top_k": (-2,),
    "stop": (3, ["x"] * 40),
    "logit_bias": ({"a": 1}, {"1": 200}),
    "stop_token_ids": ([-1],),
    "best_of": (5,),
}
COMMON_REQUEST: Mapping[str, Sequence[Any]] = {
    "user": ("somebody",),
    "extra_key": ("tenant",),
    "timeout_s": (600.0,),
    "unknown_field": (1,),
    "model": ("tiny",),
}
OPENAI: Mapping[str, Sequence[Any]] = {
    **COMMON_SAMPLING,
    **COMMON_REQUEST,
    "return_token_ids": (True,),
    "return_tokens_as_token_ids": (True,),
    "cache_salt": ("salt",),
    "seed": (3,),
    "min_tokens": (1,),
    "response_format": ({"type": "text"},),
    "store": (True,),
}
COMPLETION: Mapping[str, Sequence[Any]] = {**OPENAI, "logprobs": (0, 1, 3), "echo": (True,)}
CHAT: Mapping[str, Sequence[Any]] = {
    **OPENAI,
    "logprobs": (True,),
    "add_generation_prompt": (False,),
    "reasoning_effort": ("low",),
    "max_completion_tokens": (2,),
}
BAD_OPENAI: Mapping[str, Sequence[Any]] = {
    **BAD_SAMPLING,
    "max_tokens": (-1, 1.5, "many"),
    "logprobs": (99, "yes"),
    "stream_options": ({"include_usage": 1}, 3),
    "model": ("gpt-9",),
    "seed": ("s",),
    "rid": ("", "a\tb"),
    "guided_regex": ("a+",),
    "min_tokens": (50,),
    "priority": (3,),
    "timeout_s": (0,),
}
NATIVE: Mapping[str, Sequence[Any]] = {
    **COMMON_REQUEST,
    "return_logprob": (True,),
    "return_text_in_logprobs": (True,),
    "return_prompt_token_ids": (True,),
    "incremental": (True,),
    "logprob_start_len": (0, 1),
}
BAD_NATIVE: Mapping[str, Sequence[Any]] = {
    "sampling_params": (3, {"max_new_tokens": -1}, {"min_new_tokens": 9, "max_new_tokens": 1}),
    "text": (4, ""),
    "input_ids": ([[]], [-1], ["a"], [999999]),
    "return_logprob": ("yes",),
    "top_logprobs_num": (-1, 10_000),
    "rid": (["a", "b"],),
    "bootstrap_room": (5,),
    "lora_path": ("x",),
    "extra_key": (5,),
}


def draw(rng: random.Random, table: Mapping[str, Sequence[Any]], count: int) -> dict[str, Any]:
    """Draw ``count`` fields of a table, each with one of its values."""
    return {name: rng.choice(table[name]) for name in rng.sample(sorted(table), count)}


def native(rng: random.Random) -> dict[str, Any]:
    """Draw a body of ``POST /generate``."""
    prompt: dict[str, Any] = rng.choice(
        [{"text": rng.choice(TEXTS)}, {"input_ids": rng.choice(ID_LISTS)}, {"text": list(rng.sample(TEXTS, 2))}]
    )
    sampling = {"max_new_tokens": rng.choice((0, 1, 2, 4)), "temperature": 0, **draw(rng, COMMON_SAMPLING, 2)}
    body = {**prompt, "sampling_params": sampling, **draw(rng, NATIVE, 3)}
    return {**body, "top_logprobs_num": 2} if body.get("return_logprob") and rng.random() < 0.5 else body


def completion(rng: random.Random) -> dict[str, Any]:
    """Draw a body of ``POST /v1/completions``."""
    prompt = rng.choice([rng.choice(TEXTS), rng.choice(ID_LISTS), list(rng.sample(TEXTS, 2)), list(ID_LISTS[:2])])
    return {"prompt": prompt, "max_tokens": rng.choice((0, 1, 2, 4)), "temperature": 0, **draw(rng, COMPLETION, 4)}


def chat(rng: random.Random) -> dict[str, Any]:
    """Draw a body of ``POST /v1/chat/completions``."""
    messages = [{"role": "user", "content": rng.choice(TEXTS)}]
    if rng.random() < 0.4:
        messages.insert(0, {"role": rng.choice(("system", "developer")), "content": "Be brief."})
    limit = {} if rng.random() < 0.2 else {"max_tokens": rng.choice((1, 2, 4))}
    body = {"messages": messages, **limit, "temperature": 0, **draw(rng, CHAT, 4)}
    if "max_completion_tokens" in body:
        body.pop("max_tokens", None)
    body.setdefault("max_completion_tokens" if "max_tokens" not in body else "max_tokens", 2)
    return {**body, "top_logprobs": 2} if body.get("logprobs") and rng.random() < 0.5 else body


def generations(rng: random.Random) -> Iterator[Recorded]:
    """Yield good and bad requests of the three generating paths, plain and streamed."""
    for path, make, bad in (
        ("/generate", native, BAD_NATIVE),
        ("/v1/completions", completion, BAD_OPENAI),
        ("/v1/chat/completions", chat, BAD_OPENAI),
    ):
        for _ in range(BODIES):
            body = make(rng)
            usage = {"stream_options": {"include_usage": rng.random() < 0.5, "continuous_usage_stats": True}}
            usage = {} if path == "/generate" or rng.random() < 0.3 else usage
            for front in FRONTS:
                yield Recorded(front, "POST", path, body=body)
                yield Recorded(front, "POST", path, body={**body, **usage, "stream": True})
        for name in sorted(bad):
            for value in bad[name]:
                front = rng.choice(FRONTS)
                yield Recorded(front, "POST", path, body={**make(rng), name: value, "stream": rng.random() < 0.5})


def path_of(facts: PathFacts) -> str:
    """Return a path that a declaration matches."""
    return facts.path.replace("{id:path}", "7").replace("{name:path}", "absent")


def access() -> Iterator[Recorded]:
    """Yield what every path says without a key, to a wrong one, to another method and to a body that is no JSON."""
    for facts in PATHS:
        method, path = facts.methods[0], path_of(facts)
        body = {} if facts.methods == POST else None
        for front in FRONTS:
            if facts.access is not Access.OPEN:
                yield Recorded(front, method, path, NONE, body)
                yield Recorded(front, method, path, WRONG, body)
            if facts.access.is_admins or facts.access is Access.CACHE:
                yield Recorded(front, method, path, USER, body)
            yield Recorded(front, "PUT", path, ADMIN, body)
            if facts.methods == POST:
                yield Recorded(front, method, path, ADMIN, b'{"a": ')
    for front in FRONTS:
        yield Recorded(front, "GET", "/nowhere", NONE)
        yield Recorded(front, "GET", "/v1/nowhere")
        yield Recorded(front, "POST", "/generate", body=b"[1]")
        yield Recorded(front, "POST", "/generate", body=b"", headers={"content-length": str(1 << 40)})
        yield Recorded(front, "POST", "/generate", body=b"\xff")
        yield Recorded(front, "POST", "/generate", body=b"x", headers={"content-encoding": "gzip"})
        yield Recorded(front, "GET", "/livez", headers={"origin": "http://elsewhere.example"})
        yield Recorded(front, "POST", "/generate", body={"text": "a"}, headers={"x-request-timeout": "never"})


def questions() -> Iterator[Recorded]:
    """Yield the good questions: each GET, then texts and tokens."""
    gets = [path_of(facts) for facts in PATHS if facts.methods == GET and facts.path != "/v1/models/{name:path}"]
    gets.sort(key=lambda path: path != "/transfers")  # before the first hand-over
    for front in FRONTS:
        for path in (*gets, "/v1/models/tiny", "/v1/models/absent"):
            yield Recorded(front, "GET", path, ADMIN)
        yield Recorded(front, "GET", "/server_info")
        for text in ("Hello", ["Hello", "naïve 火"], "", []):
            for more in ({}, {"return_token_strs": True}, {"add_special_tokens": False, "model": "tiny"}):
                yield Recorded(front, "POST", "/tokenize", body={"prompt": text, **more})
        messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
        yield Recorded(front, "POST", "/tokenize", body={"messages": messages, "return_token_strs": True})
        yield Recorded(front, "POST", "/tokenize", body={"messages": messages, "prompt": "x"})
        yield Recorded(front, "POST", "/tokenize", body={"messages": [{"role": "dog", "content": "wuff"}]})
        for ids in ([50, 51], [[50], [51, 52]], [], [-1], [10**6], "x"):
            yield Recorded(front, "POST", "/detokenize", body={"tokens": ids})


ORDERS: Sequence[tuple[str, str, Fields]] = (
    ("/abort_request", USER, {"rid": "absent"}),
    ("/abort_request", USER, {"abort_all": True}),
    ("/abort_request", ADMIN, {"rid": "x", "abort_all": True}),
    ("/flush_cache", ADMIN, {}),
    ("/migrate", ADMIN, {"rid": "absent", "bootstrap_host": "127.0.0.1", "bootstrap_port": 1}),
    ("/migrate", ADMIN, {"rid": "absent", "bootstrap_host": "10.0.0.1", "bootstrap_port": 1}),
    ("/drain", ADMIN, {"to": ["nowhere"]}),
    ("/drain", ADMIN, {"two": []}),
    ("/role", ADMIN, {"role": "king"}),
    ("/role", ADMIN, {"role": "decode"}),
    ("/moved", NONE, {}),
    ("/release_memory_occupation", ADMIN, {"tags": ["x"]}),
    ("/resume_memory_occupation", ADMIN, {"tags": 3}),
    ("/kv/resize", ADMIN, {"tokens": -1}),
    ("/kv/hashes", ADMIN, {"input_ids": [1, 2, 3]}),
    ("/start_profile", ADMIN, {"steps": -1}),
    ("/stop_profile", ADMIN, {"x": 1}),
)


def orders() -> Iterator[Recorded]:
    """Yield orders that are refused or change nothing. A router has few of these paths."""
    for front in FRONTS:
        for path, key, body in ORDERS:
            yield Recorded(front, "POST", path, key, body)


def workers() -> Iterator[Recorded]:
    """Yield orders about the instances of a router that are refused."""
    absent = "/workers?url=http://127.0.0.1:1"
    for front in FRONTS:
        yield Recorded(front, "POST", "/workers", ADMIN, {"url": "127.0.0.1:1"})
        yield Recorded(front, "POST", "/workers", ADMIN, {"url": "http://127.0.0.1:1", "role": "king"})
        yield Recorded(front, "POST", "/workers", ADMIN, {"url": "http://127.0.0.1:1", "rank": 1})
        yield Recorded(front, "PATCH", absent, ADMIN, {"state": "cordoned"})
        yield Recorded(front, "DELETE", absent, ADMIN)
        yield Recorded(front, "DELETE", absent, USER)
        yield Recorded(front, "DELETE", f"{absent}&drain=maybe", ADMIN)


def sessions() -> Iterator[Recorded]:
    """Yield the life of sessions: saved, listed, restored and deleted, by both APIs."""
    ids = list(range(100, 140))
    short = {"max_new_tokens": 3, "temperature": 0}
    for front in FRONTS:
        own = f"of-{front}"
        for path, body in (
            ("/kv/snapshot", {"name": own, "input_ids": ids, "sampling_params": short}),
            ("/kv/snapshot", {"name": own, "text": "Hello", "extra_key": "k", "ttl_s": 600, "sampling_params": short}),
            ("/kv/snapshot", {"name": "../x", "text": "Hello"}),
            ("/kv/snapshot", {"name": own, "rid": "absent"}),
            ("/kv/snapshot", {"name": own, "text": "a", "input_ids": [1]}),
            ("/kv/restore", {"name": own}),
            ("/kv/restore", {"name": own, "return_token_ids": True}),
            ("/kv/restore", {"name": own, "resume": True, "rid": f"{own}-1"}),
            ("/kv/restore", {"name": own, "resume": True, "rid": f"{own}-2", "stream": True}),
            ("/kv/restore", {"name": "absent"}),
            ("/slots/absent?action=save", {"filename": own}),
            ("/slots/3?action=restore", {"filename": own}),
            ("/slots/3?action=dance", {"filename": own}),
            ("/slots/3?action=erase", {"filename": own}),
            ("/kv/snapshot", {"name": own, "text": "Hello"}),
        ):
            yield Recorded(front, "POST", path, body=body)
        yield Recorded(front, "GET", "/kv/sessions")
        yield Recorded(front, "DELETE", f"/kv/sessions/{own}")
        yield Recorded(front, "DELETE", f"/kv/sessions/{own}")
        yield Recorded(front, "GET", "/kv/sessions", ADMIN)


def readouts() -> Iterator[Recorded]:
    """Yield good and bad requests for embeddings, scores and ranks."""
    labels: dict[str, Any] = {"query": "The sea", "items": [" is", " was"], "label_token_ids": [300, 301]}
    ranked: dict[str, Any] = {"query": "The sea", "documents": ["Hello", {"text": "naïve 火"}]}
    for front in FRONTS:
        for path, body in (
            ("/v1/embeddings", {"input": "Hello", "dimensions": 4}),
            # One dimension is 1 or -1 on every processor.
            ("/v1/embeddings", {"input": ["Hello", "naïve 火"], "dimensions": 1, "encoding_format": "base64"}),
            ("/v1/embeddings", {"input": [[50, 900], [77]], "dimensions": 3, "model": "tiny", "user": "somebody"}),
            ("/v1/embeddings", {"input": [50, 900, 77], "dimensions": 2, "rid": "one"}),
            ("/v1/embeddings", {"input": "Hello", "dimensions": 65}),
            ("/v1/embeddings", {"input": [10**6]}),
            ("/v1/embeddings", {"input": []}),
            ("/v1/embeddings", {"input": "Hello", "model": "gpt-9"}),
            ("/api/embed", {"input": ["Hello", "One"], "dimensions": 4, "truncate": True}),
            ("/api/embed", {"input": []}),
            ("/api/embed", {"input": [], "model": "tiny:latest"}),
            ("/api/embed", {"input": 3}),
            ("/api/embeddings", {"prompt": ""}),
            ("/v1/score", labels),
            ("/v1/score", {**labels, "apply_softmax": True, "item_first": True}),
            ("/v1/score", {"query": [50], "items": [[51], [52, 53]], "label_token_ids": [5]}),
            ("/v1/score", {**labels, "label_token_ids": [10**6]}),
            ("/v1/score", {"text_1": "The sea", "text_2": ["Hello", "One"]}),
            ("/v1/score", {"text_1": "The sea"}),
            ("/v1/rerank", ranked),
            ("/v1/rerank", {**ranked, "top_n": 1, "return_documents": False}),
            ("/v1/rerank", {**ranked, "documents": []}),
        ):
            yield Recorded(front, "POST", path, body=body)


def all_requests() -> list[Recorded]:
    """Return the requests, the same ones in the same order at every call."""
    rng = random.Random(SEED)
    return [*questions(), *generations(rng), *readouts(), *sessions(), *orders(), *workers(), *access()]
