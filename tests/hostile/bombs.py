"""Requests of few bytes, or of many allowed ones, that ask for much work, output or memory."""

from __future__ import annotations

import json
import random
from typing import Any

from .sound import PARAMETERS_SCHEMA, function

Json = dict[str, Any]
USER = {"role": "user", "content": "x"}
SCHEMA_FIELDS = (
    *("/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"),
    *("/api/chat", "/api/generate", "/completion"),
)
"""Paths that take a JSON schema of the answer."""
TEMPLATE_NAMES = (
    *("messages", "tools", "add_generation_prompt", "bos_token", "loop", "namespace", "range", "raise_exception"),
    *("strftime_now", "self", "caller", "varargs", "enable_thinking", "documents", "__class__", "dict", "cycler"),
)
"""Variables and functions of chat templates."""


def schema_bomb(rng: random.Random) -> Json:
    """Return a JSON schema that is expensive to compile. Each is a schema of its own."""
    number = rng.getrandbits(40)
    nested: Json = {"const": number}
    for i in range(rng.randint(4, 14)):
        nested = {"anyOf": [nested, {"type": "object", "properties": {f"k{i}": nested}}]}
    deep: Json = {"const": number}
    for _ in range(rng.choice((50, 62, 120, 250))):
        deep = {"type": "array", "items": deep}
    many = {f"p{i}": {"type": "integer"} for i in range(rng.choice((200, 2000)))}
    patterns = [{"type": "string", "pattern": f"a.*{i}.*{number}"} for i in range(rng.choice((4, 20)))]
    kind = rng.choice(("allOf", "anyOf", "prefixItems"))
    doubled: Json = {"d0": {"const": number}}
    for i in range(1, rng.choice((10, 30, 60))):
        doubled[f"d{i}"] = {kind: [{"$ref": f"#/$defs/d{i - 1}"}] * 2}
    circle = {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]}, "b": {"$ref": "#/$defs/a"}}
    bombs: list[Json] = [
        nested,
        deep,
        {"type": "object", "properties": many, "title": str(number)},
        {"allOf": patterns},
        {"enum": [f"{number} {i}" for i in range(8000)]},
        {"$defs": doubled, "$ref": f"#/$defs/d{len(doubled) - 1}"},
        {"$defs": circle, "$ref": "#/$defs/a", "title": str(number)},
        {"type": "object", "patternProperties": {f"^({number % 100}|a*)*$": {"type": "string"}}},
        {"type": "array", "minItems": 10**9, "maxItems": 10**18, "items": {"const": number}},
        {"type": "string", "minLength": 2**31, "pattern": f"^[a-z{number % 10}]*$"},
        {"$ref": "http://127.0.0.1:1/schema.json"},
    ]
    return rng.choice(bombs)


def grammar_bomb(rng: random.Random) -> Json:
    """Return a field of structured output that asks for much work. Each is a grammar of its own."""
    number = rng.getrandbits(40)
    fields: list[Json] = [
        {"json_schema": schema_bomb(rng)},
        {"json_schema": "[" * 100_000},
        {"regex": f"(.*{number % 10}){{200}}" * 20},
        {"regex": f"([ab]*c?|{number}){{1,500}}"},
        {"ebnf": f'root ::= root root | "a" | "" | "{number}"'},
    ]
    return rng.choice(fields)


def with_schema(path: str, schema: Json) -> Json:
    """Return a body for ``path`` that makes the answer match ``schema``. ``path``: one of ``SCHEMA_FIELDS``."""
    bodies: dict[str, Json] = {
        "/generate": {"text": "c", "sampling_params": {"max_new_tokens": 200, "json_schema": schema}},
        "/v1/completions": {"prompt": "c", "max_tokens": 200, "json_schema": schema},
        "/v1/chat/completions": {
            "messages": [USER],
            "max_tokens": 200,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        },
        "/v1/messages": {
            "messages": [USER],
            "max_tokens": 200,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
        "/v1/responses": {
            "input": "c",
            "max_output_tokens": 200,
            "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
        },
        "/api/chat": {"messages": [USER], "format": schema, "options": {"num_predict": 200}},
        "/api/generate": {"prompt": "c", "raw": True, "format": schema, "options": {"num_predict": 200}},
        "/completion": {"prompt": "c", "n_predict": 200, "json_schema": schema},
    }
    return bodies[path]


def forced_call(rng: random.Random, schema: Json) -> tuple[str, Json]:
    """Return a path and a body that make the answer a call with arguments of ``schema``."""
    whole = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    described = {"name": "weather", "parameters": whole}
    bodies: list[tuple[str, Json]] = [
        (
            "/v1/chat/completions",
            {
                "messages": [USER],
                "tools": [{"type": "function", "function": described}],
                "tool_choice": "required",
                "max_tokens": 200,
            },
        ),
        (
            "/v1/messages",
            {
                "messages": [USER],
                "tools": [{"name": "weather", "input_schema": whole}],
                "tool_choice": {"type": "any"},
                "max_tokens": 200,
            },
        ),
        (
            "/v1/responses",
            {
                "input": "x",
                "tools": [{"type": "function", **described}],
                "tool_choice": "required",
                "max_output_tokens": 200,
            },
        ),
    ]
    return rng.choice(bodies)


def template_bomb(rng: random.Random) -> tuple[str, Json]:
    """Return a path and a body with much for a chat template to render, or with names that mean something to it."""
    deep: Any = "x"
    doublings = rng.choice((0, 8, 12))
    for level in range(rng.choice((15, 60, 64))):
        deep = [deep, deep] if level < doublings else {"a": deep}
    args = rng.choice(
        (
            {"x": deep},
            {f"k{i}": i for i in range(1000)},
            {rng.choice(TEMPLATE_NAMES): rng.choice((None, 10**9, [USER], "x", {}))},
            {"x": "{% for a in range(10**9) %}{{ a }}{% endfor %}" * 100},
            {"x": "a" * ((1 << 20) - 1)},
        )
    )
    call = {"id": "c", "type": "function", "function": {"name": "w", "arguments": {"a": ["b"] * 1000}}}
    messages = rng.choice(
        (
            [USER],
            [USER] * 4096,
            [USER, {"role": "assistant", "content": "", "tool_calls": [call] * 256}] * rng.choice((1, 20)),
            [{"role": "user", "content": [{"type": "text", "text": "x"}] * 4096}] * rng.choice((1, 30)),
            [{"role": "user", "content": "</think>" * 100_000}],
            [{"role": "user", "content": "<|im_end|>" * 50_000}],
        )
    )
    tools = [function(f"w{i}") for i in range(rng.choice((0, 1, 1024)))]
    path = rng.choice(("/apply-template", "/tokenize", "/v1/chat/completions"))
    return path, {"messages": messages, "chat_template_kwargs": args, "tools": tools}


def argument_bomb(rng: random.Random) -> tuple[str, Json]:
    """Return a path and a body of calls with arguments as text. A parser of the body does not see their values."""
    inner: Any = rng.choice(([[[]] * 50] * 50, [{}] * 3000, [0] * 30_000, ["[{,"] * 5000))
    text = json.dumps({"a": [inner] * rng.choice((1, 5))}, separators=(",", ":"))
    count = rng.choice((1, 2 << 20, 8 << 20, 24 << 20)) // len(text) + 1
    call = {"id": "c", "type": "function", "function": {"name": "w", "arguments": text}}
    item = {"type": "function_call", "call_id": "c", "name": "w", "arguments": text}
    turns = [{"role": "assistant", "tool_calls": [call] * min(count - i, 200)} for i in range(0, count, 200)]
    path = rng.choice(("/v1/chat/completions", "/tokenize", "/apply-template", "/v1/responses"))
    if path == "/v1/responses":
        return path, {"input": [USER, *[item] * count], "max_output_tokens": 1}
    return path, {"messages": [USER, *turns]}


def large_conversation(rng: random.Random) -> tuple[str, Json]:
    """Return a path and a body with a conversation at the limits of its API."""
    text = {"type": "text", "text": "x"}
    schema = {"type": "object", "properties": {f"p{i}": PARAMETERS_SCHEMA for i in range(30)}}
    change = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "w1"}}
    deferred = [{"name": f"w{i}", "input_schema": {}, "defer_loading": True} for i in range(1000)]
    call = {"type": "function_call", "call_id": "c", "name": "w", "arguments": json.dumps({"a": [1] * 500})}
    nested = {"type": "function_call", "call_id": "c", "name": "w", "arguments": "[" * 200_000}
    sealed = {"type": "reasoning", "encrypted_content": "pdserve:" + "QUFB" * rng.choice((10, 300_000))}
    turn = {"role": "assistant", "tool_calls": [{"function": {"name": "w", "arguments": {"a": ["b"] * 100}}}] * 256}
    blocks = {"role": "user", "content": [text] * 4096}
    use = {"type": "tool_use", "id": "c", "name": "w", "input": {"a": ["b"] * 500}}
    bodies: list[tuple[str, Json]] = [
        ("/v1/messages", {"messages": [USER] * 4096, "max_tokens": 1}),
        ("/v1/messages", {"messages": [blocks] * rng.choice((1, 20)), "max_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "assistant", "content": [use] * 256}] * 10, "max_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [change] * 4096}], "tools": deferred}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 1, "stop_sequences": [f"s{i}" for i in range(5000)]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a b " * (1 << 18)}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x" * 250}] * 4096}),
        (
            "/v1/messages/count_tokens",
            {
                "messages": [{"role": "user", "content": [change] * 4096}] * rng.choice((1, 50)),
                "tools": deferred,
            },
        ),
        (
            "/v1/messages/count_tokens",
            {"messages": [USER], "tools": [{"name": f"w{i}", "input_schema": schema} for i in range(500)]},
        ),
        ("/v1/responses", {"input": [USER] * 16_384, "max_output_tokens": 1}),
        ("/v1/responses", {"input": [{"role": "user", "content": [text] * 4096}] * 20, "max_output_tokens": 1}),
        ("/v1/responses", {"input": [USER, *[call] * 2000], "max_output_tokens": 1}),
        ("/v1/responses", {"input": [USER, nested], "max_output_tokens": 1}),
        ("/v1/responses", {"input": [USER, *[sealed] * rng.choice((1, 10))], "max_output_tokens": 1}),
        ("/v1/responses", {"input": "x", "metadata": {f"k{i}": "v" * 512 for i in range(16)}, "include": ["a"] * 64}),
        ("/v1/responses", {"input": "x", "instructions": "a b " * (1 << 18)}),
        ("/api/chat", {"messages": [USER] * 4096}),
        ("/api/chat", {"messages": [USER, turn] * 10}),
        ("/api/chat", {"messages": [USER], "tools": [function(f"w{i}") for i in range(1024)]}),
        ("/api/generate", {"prompt": "a b " * (1 << 20), "raw": rng.random() < 0.5}),
        ("/api/generate", {"prompt": "x", "system": "a b " * (1 << 18), "options": {"stop": ["a"] * 5000}}),
        ("/api/generate", {"prompt": "x", "options": {"num_predict": 2**31 - 1, "temperature": 0}}),
        ("/v1/chat/completions", {"messages": [USER] * 16_000, "max_tokens": 1}),
    ]
    return rng.choice(bodies)


def native_bomb(rng: random.Random) -> tuple[str, Json]:
    """Return a path and a body of the older APIs."""
    many = {"max_new_tokens": 1500, "n": 64, "ignore_eos": True}
    logprobs = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 128}
    bodies: list[tuple[str, Json]] = [
        ("/generate", {"text": "a " * 1500, **logprobs}),
        ("/generate", {"text": ["a " * 200] * 200, "sampling_params": {"max_new_tokens": 1, "n": 64}}),
        ("/generate", {"text": "a", "sampling_params": many, "return_logprob": True, "top_logprobs_num": 20}),
        ("/generate", {"text": "b", "sampling_params": many | {"logit_bias": {str(i): 1.0 for i in range(1024)}}}),
        ("/v1/completions", {"prompt": "a " * 1500, "logprobs": 20, "echo": True, "max_tokens": 1}),
        ("/tokenize", {"prompt": "a b " * 250_000}),
        ("/detokenize", {"tokens": [7] * 130_000}),
        ("/completion", {"prompt": [5, *["a b"] * rng.choice((4096, 5000))], "n_predict": 1}),
        ("/completion", {"prompt": [5, "a b " * (1 << 18)], "n_predict": 1}),
        ("/completion", {"prompt": [[5, "a"]] * 4096, "n_predict": 0, "n_cmpl": 2}),
        ("/completion", {"prompt": "x", "grammar": "root ::= root root | " + '"a" | ' * 5000 + '"b"', "n_predict": 9}),
        ("/generate", {"input_ids": [[5]] * 4096, "sampling_params": {"max_new_tokens": 1}}),
        ("/generate", {"text": "c", "sampling_params": {"max_new_tokens": 400, **grammar_bomb(rng)}}),
    ]
    return rng.choice(bodies)


def bomb(rng: random.Random) -> tuple[str, Json]:
    """Return a path and a body of any kind."""
    kinds = (native_bomb, native_bomb, template_bomb, argument_bomb, large_conversation, large_conversation, "schema")
    kind = rng.choice(kinds)
    if not isinstance(kind, str):
        return kind(rng)
    if rng.random() < 0.3:
        return forced_call(rng, schema_bomb(rng))
    path = rng.choice(SCHEMA_FIELDS)
    return path, with_schema(path, schema_bomb(rng))
