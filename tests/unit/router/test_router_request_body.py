"""What each leg is sent for a client's body."""

import json
import tracemalloc

import orjson
import pytest

from pdserve.router.errors import BadRequestError
from pdserve.router.instance import Instance, Role
from pdserve.router.request_body import STEP, PairBodies, RequestBody
from pdserve.router.work import MAX_ANSWERS
from pdserve.runtime.web.apis import PATHS, path_table
from pdserve.runtime.web.paths import AtRouter, Server

PREFILL = Instance("http://[::1]:30000", Role.PREFILL, 9000)
CHAT = "/v1/chat/completions"


def joined(body):
    """Return the bodies that are sent to the legs of a pair, each in one piece."""
    return PairBodies(*(b"".join(pieces) for pieces in body.for_pair(PREFILL)))


def parsed(fields, path="/generate"):
    """Return the body that was sent to ``path`` as the router reads it."""
    return RequestBody.parse(json.dumps(fields).encode(), "req-7", path_table(Server.ROUTER).find(path))


def legs(path="/generate", **fields):
    bodies = joined(parsed(fields, path))
    return json.loads(bodies.prefill), json.loads(bodies.decode)


@pytest.mark.parametrize(
    ("path", "fields", "size"),
    [
        ("/generate", {"text": "a"}, None),
        ("/generate", {"text": ["a"]}, 1),
        ("/generate", {"input_ids": [1, 2]}, None),
        ("/generate", {"input_ids": [[1], [2, 3]]}, 2),
        ("/v1/completions", {"prompt": ["a", "b", "c"]}, 3),
        ("/v1/completions", {"prompt": [1, 2]}, None),
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}, None),
        # A field that the path does not have is ignored by instances, too.
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "prompt": ["a", "b"]}, None),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "input_ids": [[1], [2]]}, None),
        (CHAT, {"messages": None, "prompt": ["a", "b"]}, None),
        ("/v1/messages", {"messages": [], "prompt": ["a", "b"]}, None),
        ("/v1/responses", {"input": "a", "text": ["a", "b"]}, None),
        ("/v1/responses", {"input": [{"role": "user", "content": "a"}], "prompt": ["a"]}, None),
        ("/completion", {"prompt": ["a", "b"]}, 2),
        ("/completion", {"prompt": [[1, "a"], [2]]}, 2),
        # Instances number the rooms of the other lists themselves, and take these two for one prompt.
        ("/completion", {"prompt": ["a", [1, 2], {"prompt_string": "b"}]}, None),
        ("/completion", {"prompt": [1, "a", 2]}, None),
        ("/completion", {"prompt": ["a", 1]}, None),
        ("/completion", {"prompt": {"prompt_string": "a"}}, None),
        ("/api/generate", {"prompt": ["a", "b"]}, None),
        ("/api/chat", {"messages": [], "prompt": ["a", "b"]}, None),
        ("/generate", {"messages": [{"role": "user", "content": "a"}], "text": ["a", "b"]}, 2),
        ("/generate", {"input": "a", "prompt": ["a"], "input_ids": [[1], [2]]}, 2),
        ("/v1/completions", {"messages": [{"role": "user", "content": "a"}], "prompt": ["a", "b"]}, 2),
        ("/v1/completions", {"input": ["a"], "text": ["a"], "prompt": ["a", "b"]}, 2),
        ("/generate", {"text": []}, None),
    ],
)
def test_a_batch_gets_a_room_for_each_prompt_and_a_name(path, fields, size):
    prefill, decode = legs(path, **fields)
    assert prefill == {**decode, "stream": False, "bootstrap_leg": "prefill"}
    assert decode["bootstrap_leg"] == "decode"
    assert isinstance(decode["rid"], str)
    if size is None:
        assert (decode["bootstrap_host"], decode["bootstrap_port"]) == ("::1", 9000)
        assert isinstance(decode["bootstrap_room"], int)
        return
    assert decode["bootstrap_host"] == ["::1"] * size
    assert decode["bootstrap_port"] == [9000] * size
    assert len(set(decode["bootstrap_room"])) == size


def test_the_prefill_is_not_asked_to_stream():
    prefill, decode = legs(text="a", stream=True, stream_options={"include_usage": True})
    assert (prefill["stream"], prefill["stream_options"]) == (False, None)
    assert (decode["stream"], decode["stream_options"]) == (True, {"include_usage": True})


@pytest.mark.parametrize(
    "body",
    [b"{}", b" { } \n", b'{"text": "a}"}\r\n ', b'{"stream": false, "rid": null, "stream": true, "text": ["a"]}'],
)
def test_a_clients_bytes_are_not_written_again(body):
    """Only what is added stands behind them, and counts where a name stands twice."""
    bodies = joined(RequestBody.parse(body))
    own = body.rstrip()[:-1]
    assert bodies.prefill.startswith(own)
    assert bodies.decode.startswith(own)
    expected = {"stream": True, "rid": None, **orjson.loads(body)}
    prefill, decode = orjson.loads(bodies.prefill), orjson.loads(bodies.decode)
    assert prefill["stream"] is False
    assert decode.get("stream", True) is expected["stream"]
    assert prefill["rid"] == decode["rid"] != expected["rid"]
    assert prefill.get("text") == decode.get("text") == expected.get("text")


def test_a_clients_own_room_is_replaced_and_its_rid_kept():
    prefill, decode = legs(text="a", rid="mine", bootstrap_room=5, bootstrap_host="elsewhere")
    assert prefill["rid"] == decode["rid"] == "mine"
    assert prefill["bootstrap_room"] == decode["bootstrap_room"] != 5
    assert decode["bootstrap_host"] == "::1"


@pytest.mark.parametrize(
    "body",
    [
        b'{"text": "a", "bootstrap_host": "evil", "bootstrap_port": 1, "bootstrap_room": 2}',
        b'{"bootstrap_host": ["evil"], "bootstrap_port": [1], "text": "a", "bootstrap_room": [2]}',
        b'{"text": "a", "bootstrap_host": "evil", "bootstrap_host": null}',
        b'{"text": "a", "bootstrap\\u005fhost": "evil"}',
        b'{"text": "a", "bootstrap_pair_key": "x", "bootstrap_": 1}',
    ],
)
def test_a_clients_bootstrap_fields_reach_no_instance(body):
    parsed = RequestBody.parse(body)
    assert json.loads(parsed.raw) == {"text": "a"}
    for leg in joined(parsed):
        fields = json.loads(leg)
        assert fields["bootstrap_host"] == "::1"
        assert {name for name in fields if name.startswith("bootstrap_")} == {
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_room",
            "bootstrap_leg",
        }


def test_a_body_without_them_is_passed_on_byte_for_byte():
    body = b'{ "text": "a",  "note": {"bootstrap_host": "a word in a prompt"} }'
    assert RequestBody.parse(body).raw is body


def test_a_body_that_is_nested_deeply_is_passed_on_until_it_is_nested_too_deeply():
    for begin, middle, end in ((b"[", b"", b"]"), (b'{"a":', b"1", b"}")):
        value = begin * 300 + middle + end * 300
        deep = b'{"text": ' + value + b"}"
        assert RequestBody.parse(deep).raw is deep
        assert RequestBody.parse(deep[:-1] + b', "bootstrap_host": "evil"}').raw == b'{"text":' + value + b"}"
        with pytest.raises(BadRequestError, match="not valid JSON"):
            RequestBody.parse(b'{"text": ' + begin * 5000 + middle + end * 5000 + b"}")


def test_every_path_that_generates_declares_its_prompts():
    computing = (AtRouter.GENERATE, AtRouter.READ_PROMPT)
    assert all(any(facts.prompt_fields) for facts in PATHS if facts.at_router in computing)


@pytest.mark.parametrize(
    ("path", "name"), [("/generate", "text"), ("/v1/completions", "prompt"), ("/generate", "input_ids")]
)
def test_too_many_prompts_are_refused_before_they_are_multiplied(path, name):
    one = [1] if name == "input_ids" else "a"
    assert parsed({name: [one] * 4096}, path).batch_size == 4096
    with pytest.raises(BadRequestError, match=f"{name}: more than 4096 prompts"):
        parsed({name: [one] * 4097}, path)


@pytest.mark.parametrize(
    ("path", "fields", "tokens"),
    [
        ("/generate", {"text": "x" * 40}, 11),
        ("/generate", {"text": ["x" * 40, "y"]}, 12),
        ("/generate", {"input_ids": [1, 2, 3]}, 3),
        ("/v1/completions", {"prompt": [[1], [2, 3]]}, 3),
        ("/v1/embeddings", {"input": [[1], [2, 3]]}, 3),
        ("/v1/rerank", {"query": "x" * 40, "documents": ["x" * 40, "y"]}, 23),
    ],
)
def test_a_prompts_length_is_guessed(path, fields, tokens):
    assert parsed(fields, path).prompt_tokens == tokens


@pytest.mark.parametrize(
    ("path", "fields", "answers"),
    [
        ("/v1/completions", {"prompt": "a"}, 1),
        ("/v1/completions", {"prompt": "a", "n": 5}, 5),
        ("/v1/completions", {"prompt": "a", "n": 5, "best_of": 7}, 5),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 5}, 15),
        ("/v1/completions", {"prompt": ["a"] * 100}, MAX_ANSWERS),
        ("/v1/chat/completions", {"messages": [], "n": 64}, 64),
        ("/v1/chat/completions", {"messages": [], "n": 4096}, MAX_ANSWERS),
        ("/completion", {"prompt": "a", "n_cmpl": 3, "n": 9}, 3),
        ("/generate", {"text": "a", "n": 9}, 1),
        ("/generate", {"text": "a", "sampling_params": {"n": 4, "stop": ["n"]}}, 4),
        ("/generate", {"text": ["a", "b"], "sampling_params": {"n": 4}}, 8),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{"n": 4}, {"n": 3}]}, 7),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{"n": 4}, 5]}, 2),
        ("/generate", {"text": "a", "sampling_params": [{"n": 4}]}, 4),
        ("/generate", {"text": "a", "sampling_params": [{}] * 5000}, MAX_ANSWERS),
        ("/v1/embeddings", {"input": ["a", "b"], "n": 9}, 2),
    ],
)
def test_choices_are_counted_as_answers(path, fields, answers):
    assert parsed(fields, path).answers == answers


@pytest.mark.parametrize(
    ("number", "answers"),
    [
        *((text, 1) for text in ("true", "false", "null", '"9"', "-3", "0", "0.5", "[9]", "[]", "1e-400")),
        *(("2.0", 2), ("0.3e1", 3), ("1e2", MAX_ANSWERS), ("1e999", MAX_ANSWERS), ("9" * 1000, MAX_ANSWERS)),
        *(
            ("2." + "0" * 1000, 2),
            ("0." + "0" * 400 + "3e401", 3),
            ('{"n":{"n":2}}', 1),
            ('{"n":3}', 3),
            ('{"n":"x"}', 1),
        ),
    ],
)
def test_a_number_of_choices_may_be_anything(number, answers):
    body = b'{"prompt": "a", "n": ' + number.encode() + b" }"
    facts = path_table(Server.ROUTER).find("/v1/completions")
    assert RequestBody.parse(body, facts=facts).answers == answers


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"text":"a","sampling_params":{"x":', b"}}"),
        (b'{"text":"a","sampling_params":[{"x":', b"}]}"),
        (b'{"input_ids":', b"}"),
    ],
)
def test_a_body_nested_too_deeply_is_refused_or_measured(before, after):
    # How deep is too deep depends on the stack of the caller, and on whether a whole body or a part of it is decoded.
    refused = 0
    for depth in range(800, 1100):
        try:
            assert RequestBody.parse(before + b"[" * depth + b"]" * depth + after).answers == 1
        except BadRequestError:
            refused += 1
    assert 0 < refused < 300


def test_a_prompt_nested_deeply_is_measured_all_the_same():
    deep = b'{"text": ' + b"[" * 250 + b"]" * 250 + b"}"
    assert RequestBody.parse(deep).prompt_tokens == 1


IDS = b",".join([b"7"] * 200_000)
OBJECTS = b",".join([b'{"content":"a"}'] * 50_000)
NAMES = b",".join(b'"%d":1' % i for i in range(50_000))
TEXT = b"a" * 4_000_000 + "\N{GRINNING FACE}".encode()
"""A text with 4 bytes for each character as a ``str``."""


@pytest.mark.parametrize(
    "body",
    [
        b'{"input_ids":[' + IDS + b"]}",
        b'{"input_ids":[' + b",".join([b"[" + IDS[:399] + b"]"] * 1000) + b"]}",
        b'{"messages":[' + OBJECTS + b"]}",
        b'{"text":"a","unknown":[' + OBJECTS + b"]}",
        b'{"text":"a","sampling_params":[' + OBJECTS + b"]}",
        b'{"text":"a",' + NAMES + b"}",
        b'{"bootstrap_host":"evil","input_ids":[' + IDS + b"]}",
        b'{"text":"' + TEXT + b'"}',
        b'{"text":["' + TEXT + b'"]}',
    ],
    ids=[
        "ids",
        "lists of ids",
        "messages",
        "unknown",
        "sampling",
        "names",
        "ids and a field that is left out",
        "text",
        "texts",
    ],
)
def test_no_objects_are_built_of_a_bodys_values(body):
    """They would take ten times as long, in which the event loop can't go on, and several times the memory."""
    RequestBody.parse(b"{}")
    tracemalloc.start()
    try:
        RequestBody.parse(body)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 3 * len(body)


@pytest.mark.parametrize(
    ("fields", "size", "tokens"),
    [
        ({"text": ["a", [1]]}, None, 1),
        ({"input_ids": [[1], "a"]}, None, 1),
        ({"input_ids": [], "text": "x" * 40}, None, 11),
        ({"input_ids": None, "text": ["x" * 40, "\\"]}, 2, 12),
        ({"input_ids": 7, "text": {}}, None, 0),
    ],
)
def test_what_an_instance_will_refuse_is_no_batch(fields, size, tokens):
    body = RequestBody.parse(json.dumps(fields).encode())
    assert (body.batch_size, body.prompt_tokens) == (size, tokens)


@pytest.mark.parametrize("beyond", range(-12, 3))
def test_a_name_is_found_wherever_it_stands(beyond):
    before = b'{"text":"' + b"x" * (STEP + beyond - 11) + b'",'
    assert b"evil" not in RequestBody.parse(before + b'"bootstrap_host":"evil"}').raw
    assert b"evil" not in RequestBody.parse(before + b'"bootstrap\\u005fhost":"evil"}').raw


def test_names_that_must_be_looked_at_are_limited():
    many = b",".join(b'"%d":1' % i for i in range(2**17 - 3))
    assert json.loads(RequestBody.parse(b'{"bootstrap_x":"a",' + many + b"}").raw).keys() == {
        str(i) for i in range(2**17 - 3)
    }
    with pytest.raises(BadRequestError, match="more than 131072 strings"):
        RequestBody.parse(b'{"bootstrap_x":"a","b":"c",' + many + b"}")


@pytest.mark.parametrize("body", [b'{"text":"\xff"}', b'{"other":"\xff"}', b'{"text":"\\ud800"}', b"[1]", b"7", b"{"])
def test_what_is_no_json_object_is_refused(body):
    with pytest.raises(BadRequestError):
        RequestBody.parse(body)


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_drawn_ids_are_those_of_the_api_and_name_the_request(prompt):
    def drawn(**fields):
        body = parsed(fields, "/v1/completions")
        bodies = joined(body)
        assert json.loads(bodies.prefill)["rid"] == json.loads(bodies.decode)["rid"]
        return json.loads(bodies.decode)["rid"]

    first, second = drawn(prompt=prompt), drawn(prompt=prompt)
    assert first.startswith("cmpl-req-7-")
    assert first != second
    assert drawn(prompt=prompt, rid="mine") == "mine"


def test_no_body_at_all_has_no_fields():
    assert RequestBody.parse(b"") == RequestBody.parse(b"{}")
    assert json.loads(joined(RequestBody.parse(b"")).decode)["bootstrap_leg"] == "decode"


@pytest.mark.parametrize(
    ("path", "fields", "tokens"),
    [
        ("/generate", {"text": "x" * 400}, 101),
        ("/generate", {"text": "\u6f22" * 400}, 601),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 400}] * 2}, 217),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "\u6f22" * 400}]}]}, 615),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 400}] * 2, "text": "x" * 4000}, 217),
        ("/v1/messages", {"messages": [7, {"content": None}], "system": "x" * 400}, 107),
        (CHAT, {"messages": [7, {"content": None}], "tools": [{"name": "x" * 389}]}, 107),
        ("/v1/responses", {"input": "x" * 40, "instructions": "x" * 400, "tools": None}, 112),
        ("/api/generate", {"prompt": "x" * 40, "system": "x" * 400}, 112),
        ("/generate", {"messages": "x" * 400, "system": "x" * 400, "text": "x" * 40}, 11),
        (CHAT, {"messages": [7, {"content": None}]}, 6),
        (CHAT, {}, 0),
    ],
)
def test_how_long_a_prompt_is_guessed_to_be(path, fields, tokens):
    assert parsed(fields, path).prompt_tokens == tokens


def test_text_is_measured_in_bytes():
    """Chinese has one character to a token, about, and three bytes to a character."""
    body = json.dumps({"text": "\u6f22" * 400}, ensure_ascii=False).encode()
    assert RequestBody.parse(body).prompt_tokens == 301
