"""Facts about a request: its session key, and the blocks of its prompt."""

from __future__ import annotations

import json

import pytest

from pdserve.router.facts import BLOCK_BYTES, MAX_BLOCKS, SESSION_HEADER, Facts
from pdserve.router.request_body import MAX_KEY_BYTES, RequestBody
from pdserve.runtime.web.apis import path_table
from pdserve.runtime.web.paths import Server


def facts_of(fields: dict, path: str = "/generate", headers: tuple[tuple[bytes, bytes], ...] = ()) -> Facts:
    body = json.dumps(fields).encode()
    return Facts(RequestBody.parse(body, facts=path_table(Server.ROUTER).find(path)), headers)


HEADER = ((b"accept", b"*/*"), (SESSION_HEADER, b"by header"))


@pytest.mark.parametrize(
    ("fields", "headers", "key"),
    [
        ({}, (), b""),
        ({"user": None, "prompt_cache_key": None}, (), b""),
        ({"user": "u"}, (), b'"u"'),
        ({"user": "u"}, HEADER, b"by header"),
        ({"user": "u", "prompt_cache_key": "k"}, HEADER, b'"k"'),
        ({"prompt_cache_key": {"of": "no string"}}, (), b'{"of": "no string"}'),
        ({"user": "u" * 9000}, (), b'"' + b"u" * (MAX_KEY_BYTES - 1)),
        ({}, ((SESSION_HEADER, b"h" * 9000),), b"h" * MAX_KEY_BYTES),
    ],
)
def test_the_session_key_is_the_most_specific_name_that_was_given(fields, headers, key):
    assert facts_of({"text": "x", **fields}, headers=headers).session_key == key


def test_the_owner_is_the_name_of_the_api_key():
    body = RequestBody.parse(b"{}")
    assert (Facts(body).owner, Facts(body, key_name="team").owner) == ("", "team")
    assert Facts(body, key_name="team", is_checked=False).owner == ""


def common(a: Facts, b: Facts) -> int:
    """Return the number of equal blocks, which are all at the beginning."""
    equal = [x == y for x, y in zip(a.blocks, b.blocks, strict=False)]
    assert equal == sorted(equal, reverse=True)
    return sum(equal)


def conversation(*lengths: int) -> list[dict]:
    return [{"role": "user", "content": chr(97 + i) * length} for i, length in enumerate(lengths)]


def test_prompts_have_as_many_blocks_in_common_as_their_prefix_is_long():
    path = "/v1/chat/completions"
    first = facts_of({"messages": conversation(2000, 100)}, path)
    second = facts_of({"stream": True, "messages": conversation(2000, 100, 4000), "user": "b"}, path)
    other = facts_of({"messages": conversation(1200, 4000)}, path)
    assert len(first.blocks) == len(json.dumps(conversation(2000, 100))) // BLOCK_BYTES
    assert common(first, second) == len(first.blocks)
    assert common(first, other) == 2
    assert len(set(second.blocks)) == len(second.blocks)  # also of a text that repeats itself


def test_tools_come_before_messages():
    path = "/v1/chat/completions"
    tools = [{"type": "function", "function": {"name": "f", "description": "d" * 1000}}]
    a = facts_of({"messages": conversation(2000), "tools": tools}, path)
    b = facts_of({"messages": conversation(2000, 2000), "tools": tools}, path)
    plain = facts_of({"messages": conversation(2000)}, path)
    assert common(a, b) == len(a.blocks) > 4
    assert common(a, plain) == 0


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/generate", {"text": "a" * 3000}),
        ("/generate", {"input_ids": list(range(1000))}),
        ("/v1/completions", {"prompt": ["a" * 3000, "b"]}),
        ("/v1/messages", {"system": "s" * 3000, "messages": conversation(10)}),
        ("/v1/responses", {"instructions": "s" * 3000, "input": "x"}),
        ("/api/generate", {"system": "s" * 3000, "prompt": "x"}),
        ("/v1/score", {"text_1": "s" * 3000, "text_2": ["x"]}),
    ],
)
def test_every_api_has_blocks_of_its_prompt(path, fields):
    facts = facts_of({"model": "m", **fields}, path)
    longer = facts_of({name: value + value[-1:] for name, value in fields.items()}, path)
    assert len(facts.blocks) >= 5
    assert common(facts, longer) >= 5


def test_prompts_that_share_no_cache_have_no_blocks_in_common():
    body = json.dumps({"text": "a" * 3000}).encode()
    plain, of_key = (Facts(RequestBody.parse(body), key_name=name) for name in ("", "alice"))
    salted = [facts_of({"text": "a" * 3000, name: "s"}) for name in ("extra_key", "cache_salt")]
    for one in (of_key, *salted):
        assert common(plain, one) == 0
    assert common(*salted) == len(plain.blocks) == 5


def test_the_work_has_a_limit():
    facts = facts_of({"text": "a" * (2 * MAX_BLOCKS * BLOCK_BYTES)})
    assert len(facts.blocks) == MAX_BLOCKS
    assert facts_of({"text": "a" * 400}).blocks == facts_of({}).blocks == ()


def test_a_fact_is_computed_once():
    facts = facts_of({"text": "a" * 3000, "user": "u"})
    assert facts.blocks is facts.blocks
    assert facts.session_key is facts.session_key
