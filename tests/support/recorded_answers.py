"""Sends the recorded requests, and brings their answers into a form that is the same in every run.

A line of the recording is a request with its answer. What changes from run to run is masked: times, ports, random ids,
sizes and cache hits. Events of a stream are joined: the number of tokens in one depends on the scheduling. The order of
fields counts. Log-probabilities are compared with a tolerance, because each kernel rounds differently.
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .machine import limit
from .recorded_requests import NONE, Recorded

FILE = Path(__file__).parents[1] / "e2e" / "recorded_answers.jsonl"
SECONDS = 60.0
HEADERS = (
    *("content-type", "cache-control", "retry-after", "www-authenticate", "allow", "x-pdserve-ignored", "x-request-id"),
    *("x-should-retry", "access-control-allow-origin", "content-security-policy", "connection"),
)
"""Headers that are recorded if an answer has them."""
USUAL = {"content-type": "application/json"}
"""Headers that are left out, because most answers have them."""
CHANGING = re.compile(
    r"(.*_ms|ms|.*seconds|.*_duration|e2e_latency|created|created_at|modified_at|digest|size|pdserve|started|expires|epoch|n_written|version|url|"
    r"cached_tokens|flushed|in_flight|bootstrap_port|pace|root|.*_path|fingerprint)$"
)
"""Fields with masked values, by name."""
TEXT_MASKS = (
    (re.compile(r"127\.0\.0\.1:\d+"), "127.0.0.1:PORT"),
    (re.compile(r"[0-9a-f]{16,}"), "HEX"),
    (re.compile(r"/[\w./-]*/pytest-[\w./-]*"), "FOLDER"),
)
"""What is replaced within strings."""
FLOAT = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
DIGITS = 4
"""Decimal places of recorded numbers."""
TOLERANCE = 0.01
"""Largest difference between two processors' log-probabilities of this model."""
SHOWN = 240
"""Characters of two answers that a failure shows around the place where they part."""
SUMMARIES = ("/server_info", "/get_server_info", "/metrics", "/docs", "/openapi.json")
"""Paths of which only the outline is recorded: other tests check these answers."""


def answer(request: Recorded, number: int, port: int, keys: Mapping[str, str]) -> str:
    """Send a request to the server at ``port``; return its line of the recording. ``keys``: keys by name."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit(SECONDS))
    body = request.body if request.body is None or isinstance(request.body, bytes) else json.dumps(request.body)
    headers = {"x-request-id": f"r{number}", **request.headers}
    if request.key != NONE:
        headers["authorization"] = f"Bearer {keys[request.key]}"
    try:
        connection.request(request.method, request.path, body, headers)
        response = connection.getresponse()
        data = response.read()
    finally:
        connection.close()
    given = {name: value for name in HEADERS if (value := response.headers[name]) is not None}
    kept = {name: masked(value, name) for name, value in given.items() if USUAL.get(name) != value}
    kept = {name: value for name, value in kept.items() if (name, value) != ("x-request-id", f"r{number}")}
    asked = body.decode("latin-1") if isinstance(body, bytes) else request.body
    line = {
        "to": f"{request.front} {request.method} {request.path}",
        "key": request.key,
        **({} if asked is None else {"body": asked}),
        **({} if not request.headers else {"sent": request.headers}),
        "status": response.status,
        **({} if not kept else {"headers": kept}),
        "answer": outline(request, data.decode(), given.get("content-type", "")),
    }
    return json.dumps(line, ensure_ascii=False)


def outline(request: Recorded, text: str, kind: str) -> Any:
    """Return an answer, JSON-ready and masked."""
    if kind.startswith("text/event-stream"):
        repeats = "sampling_params" in (request.body or {}) and not request.body.get("incremental")
        return masked(joined(text, repeats=repeats or request.path == "/kv/restore"))
    if not kind.startswith("application/json"):
        return masked("a page" if request.path in SUMMARIES else text)
    content = json.loads(text)
    if request.path == "/openapi.json" and "paths" in content:
        schemas = content["components"]["schemas"]
        return {
            "paths": list(content["paths"]),
            "schemas": {n: list(s.get("properties", ())) for n, s in schemas.items()},
        }
    if request.path in SUMMARIES and "error" not in content:
        return {name: type(value).__name__ for name, value in content.items()}
    return masked(content)


def masked(value: Any, name: str = "") -> Any:
    """Return a JSON value without what changes from run to run. ``name``: the field that has the value."""
    if CHANGING.match(name) and value is not None:
        return f"<{type(value).__name__}>"
    if name == "bytes" and isinstance(value, int):
        return "<size>"
    if name == "timing":
        return " ".join(value)  # the phases depend on when a step began
    if isinstance(value, dict):
        return {key: masked(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [masked(inner) for inner in value]
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, str):
        for pattern, word in TEXT_MASKS:
            value = pattern.sub(word, value)
    return value


def joined(text: str, *, repeats: bool) -> list[Any]:
    """Return a stream as one event for each choice, in the order of choices, between the events that belong to none.

    ``repeats``: each event holds everything so far, so that the last one of a choice counts.
    """
    parts = [part for part in text.split("\n\n") if part and not part.startswith(":")]
    assert all(part.startswith("data: ") for part in parts), text
    openings: dict[int, Any] = {}
    choices: dict[int, Any] = {}
    rest: list[Any] = []
    for part in parts:
        data = part.removeprefix("data: ")
        event = data if data == "[DONE]" else json.loads(data)
        choice = _choice(event)
        if choice is None:
            rest.append(event)
        elif "role" in choice.get("delta", ()):
            # The usage so far depends on how many tokens came before the first event was written.
            openings[choice["index"]] = event | ({"usage": "<dict>"} if event.get("usage") else {})
        else:
            index = choice.get("index", 0)
            choices[index] = event if repeats or index not in choices else _sum(choices[index], event)
    return [by_index[index] for by_index in (openings, choices) for index in sorted(by_index)] + rest


def _choice(event: Any) -> Any:
    """Return the part of an event that belongs to one choice, None if none does."""
    if not isinstance(event, dict) or "error" in event:
        return None
    if "choices" in event:
        return event["choices"][0] if event["choices"] else None
    return event


def _sum(first: Any, second: Any, name: str = "") -> Any:
    """Return what two events say together: text and lists one after the other, the later value of all else."""
    if name == "choices":
        return [_sum(first[0], second[0])]
    if isinstance(first, dict) and isinstance(second, dict):
        # In the order of the later event: the last one has the fields of the end at their place.
        both = {key: _sum(first[key], value, key) if key in first else value for key, value in second.items()}
        return both | {key: value for key, value in first.items() if key not in second}
    if (isinstance(first, list) and isinstance(second, list)) or name in ("text", "content"):
        return first + second
    return second


def differences(recorded: Iterable[str], found: Iterable[str]) -> list[str]:
    """Describe the first lines that differ: the request, and both answers where they part."""
    pairs = [(was, now) for was, now in zip(recorded, found, strict=True) if not is_same(was, now)]
    return [_difference(was, now) for was, now in pairs[:10]]


def _difference(was: str, now: str) -> str:
    request = now.partition(', "status"')[0]
    differ = next((i for i, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
    at = max(0, differ - SHOWN // 2)
    return f"{request}\n  recorded …{was[at : at + SHOWN]}\n  now      …{now[at : at + SHOWN]}"


def is_same(was: str, now: str) -> bool:
    """Return whether two lines differ in no more than the last digits of their log-probabilities."""
    if FLOAT.sub("#", was) != FLOAT.sub("#", now):
        return False
    numbers = zip(FLOAT.findall(was), FLOAT.findall(now), strict=True)
    return all(abs(float(a) - float(b)) <= TOLERANCE for a, b in numbers)
