"""Ollama's API, through the real app before an engine that sends given texts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from support.fake_engine import CACHED_TOKENS, CONTEXT_LENGTH, PROMPT_TOKENS, FakeEngine, with_engine
from support.machine import limit

from pdserve.messages.conversation import ChatMessage, ChatToolCall
from pdserve.messages.outputs import FinishReason, FinishType, ReasoningReport, ReqError, TextBatch
from pdserve.runtime.web.apis import OLLAMA_LINES
from pdserve.server.http.ollama.answers import OllamaChat, OllamaError, OllamaGenerated
from pdserve.server.http.ollama.conversation import CallIds
from pdserve.server.http.ollama.schemas import OllamaMessage

QWEN = 'tools <tool_call>{"name": .., "arguments": ..}</tool_call> <think></think>'
USER = {"role": "user", "content": "Weather in Rome?"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
LARGE_TOOL = {"function": {"name": "large", "description": "y" * 600_000}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OUTPUT = f"<think>\nRome, so a call.\n</think>\n\nLet me look.\n{CALL}\n{CALL.replace('Rome', 'Bari')}"
CHAT = {"model": "m", "messages": [USER]}
PROMPT = {"model": "m", "prompt": "Weather in Rome?"}
ANSWERS = {"/api/chat": OllamaChat, "/api/generate": OllamaGenerated}


def ask(
    path: str, body: dict[str, Any], output: str = "Sunny.", *, piece: int = 5, finish: FinishType = FinishType.STOP
) -> tuple[httpx.Response, FakeEngine]:
    """Answer a body with ``output``, in pieces of some characters, each a token."""

    async def run(engine: FakeEngine) -> tuple[httpx.Response, FakeEngine]:
        asking = asyncio.create_task(engine.post(path, body))
        while not engine.requests and not asking.done():
            await asyncio.sleep(0)
        for request in engine.requests:
            pieces = [output[i : i + piece] for i in range(0, len(output), piece)]
            for i, text in enumerate(pieces):
                is_last = i + 1 == len(pieces)
                item = engine.text(request, text, [i], finish if is_last else None)
                if is_last:
                    item.finish = FinishReason(finish, None, "why")
                item.reasoning = ReasoningReport(False, 9) if i == 0 else None
                engine.client.dispatch([TextBatch([item])])
                await asyncio.sleep(0)
        return await asking, engine

    return with_engine(run, hold=True, template=QWEN, served_model_name="m")


def lines(response: httpx.Response, path: str) -> list[dict[str, Any]]:
    """Return the lines of a stream, which are all of the declared shape."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("}\n")
    parts = response.text.splitlines()
    for part in parts:
        ANSWERS[path].model_validate_json(part, strict=True)
    found = [json.loads(part) for part in parts]
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    return found


def whole(path: str, body: dict[str, Any], *args: Any, **more: Any) -> tuple[dict[str, Any], FakeEngine]:
    response, engine = ask(path, {**body, "stream": False}, *args, **more)
    assert response.status_code == 200, response.text
    ANSWERS[path].model_validate_json(response.text, strict=True)
    return response.json(), engine


def error_of(path: str, body: dict[str, Any], **options: Any) -> dict[str, Any]:
    async def run(engine: FakeEngine) -> httpx.Response:
        return await engine.post(path, body)

    response = with_engine(run, template=QWEN, served_model_name="m", **options)
    assert response.status_code >= 400, response.text
    OllamaError.model_validate_json(response.text, strict=True)
    error: dict[str, Any] = response.json()
    assert error["status"] == response.status_code
    return error


def test_a_chat_has_reasoning_text_calls_counts_and_durations() -> None:
    answer, engine = whole("/api/chat", {**CHAT, "tools": [TOOL]}, OUTPUT)
    message = answer["message"]
    assert (message["role"], message["thinking"], message["content"]) == (
        *("assistant", "Rome, so a call.", "Let me look."),
    )
    calls = [call["function"] for call in message["tool_calls"]]
    assert calls == [
        {"index": i, "name": "weather", "arguments": {"city": city}} for i, city in enumerate(("Rome", "Bari"))
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("m", True, "stop")
    assert (answer["prompt_eval_count"], answer["load_duration"]) == (PROMPT_TOKENS, 0)
    assert answer["eval_count"] == -(-len(OUTPUT) // 5)
    assert answer["total_duration"] > 0
    [sent] = engine.sent
    assert sent.chat is not None
    assert sent.chat.tools == [TOOL]


@pytest.mark.parametrize("piece", [1, 3, 500])
def test_a_stream_is_the_default_and_adds_up_to_the_whole_answer(piece: int) -> None:
    body = {**CHAT, "tools": [TOOL], "rid": "r"}
    wanted = whole("/api/chat", body, OUTPUT)[0]
    found = lines(ask("/api/chat", body, OUTPUT, piece=piece)[0], "/api/chat")
    message: dict[str, Any] = {"role": "assistant", "content": "", "thinking": "", "tool_calls": []}
    for line in found:
        message["content"] += line["message"]["content"]
        message["thinking"] += line["message"].get("thinking", "")
        message["tool_calls"] += line["message"].get("tool_calls", [])
    assert message == wanted["message"]
    assert found[-1].keys() == wanted.keys()
    assert all("done_reason" not in line for line in found[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_arguments_are_answered_on_one_line_and_else_as_the_model_wrote_them(stream: bool) -> None:
    number = 123456789012345678901234567890
    output = CALL.replace('{"city": "Rome"}', f'{{\n  "city": {number},\r\n  "text": "a\\nb"\n}}')
    response, _ = ask("/api/chat", {**CHAT, "tools": [TOOL], "stream": stream}, output)
    [call] = [call for line in response.text.splitlines() for call in json.loads(line)["message"].get("tool_calls", ())]
    assert call["function"]["arguments"] == {"city": number, "text": "a\nb"}


def test_a_prompt_is_put_into_the_chat_template_unless_it_is_raw() -> None:
    body = {**PROMPT, "system": "Be brief."}
    answer, engine = whole("/api/generate", body, "<think>\nHm.\n</think>\n\nSunny.")
    assert (answer["response"], answer["thinking"]) == ("Sunny.", "Hm.")
    [sent] = engine.sent
    assert sent.chat is not None
    assert sent.chat.messages == [ChatMessage("system", "Be brief."), ChatMessage("user", PROMPT["prompt"])]
    answer, engine = whole("/api/generate", {**PROMPT, "raw": True}, "<think>Hm.</think>")
    assert (answer["response"], engine.sent[0].chat) == ("<think>Hm.</think>", None)
    found = lines(ask("/api/generate", PROMPT)[0], "/api/generate")
    assert "".join(line["response"] for line in found) == "Sunny."


@pytest.mark.parametrize("finish", FinishType)
def test_an_answer_says_why_it_ended(finish: FinishType) -> None:
    body = {**CHAT, "stream": False}
    answer, _ = whole("/api/chat", body, finish=finish)
    assert answer["done_reason"] == ("stop" if finish is FinishType.STOP else "length")
    described = {"type": finish.value, "message": "why"}
    expected = None if finish in (FinishType.STOP, FinishType.LENGTH) else described
    assert answer.get("pdserve_finish") == expected
    assert lines(ask("/api/chat", CHAT, finish=finish)[0], "/api/chat")[-1].get("pdserve_finish") == expected


def test_options_reach_the_engine() -> None:
    options = {
        **{"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "seed": 3, "num_predict": 9},
        **{"stop": ["a", "b"], "repeat_penalty": 1.25, "presence_penalty": 0.5, "frequency_penalty": -0.5},
    }
    _, engine = whole("/api/chat", {**CHAT, "options": options})
    [sent] = engine.sent
    sampling = sent.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 7, 0.125)
    assert (sampling.seed, sampling.max_new_tokens, sampling.stop) == (3, 9, ("a", "b"))
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.25, 0.5, -0.5)


@pytest.mark.parametrize("most", [-2, -1, 0])
def test_an_answer_without_a_limit_ends_with_the_context(most: int) -> None:
    _, engine = whole("/api/chat", {**CHAT, "options": {"num_predict": most}})
    assert engine.sent[0].sampling.max_new_tokens > CONTEXT_LENGTH


def test_options_about_loading_are_ignored_by_name() -> None:
    response, _ = ask(
        "/api/chat", {**CHAT, "keep_alive": "5m", "options": {"num_ctx": 4096, "num_gpu": 1, "tfs_z": 1.0}}
    )
    assert response.headers["x-pdserve-ignored"] == "keep_alive, options.num_ctx, options.num_gpu"


@pytest.mark.parametrize(
    ("think", "expected"),
    [
        (None, {}),
        (False, {"enable_thinking": False, "thinking": False}),
        (True, {"enable_thinking": True, "thinking": True}),
        ("low", {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}),
    ],
)
def test_think_goes_to_the_template(think: Any, expected: dict[str, Any]) -> None:
    _, engine = whole("/api/chat", {**CHAT, "think": think})
    assert engine.sent[0].chat is not None
    assert engine.sent[0].chat.template_args == expected


def test_a_format_becomes_a_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for given, expected in (("json", {"type": "object"}), (schema, schema), ({}, {})):
        _, engine = whole("/api/chat", {**CHAT, "format": given})
        grammar = engine.sent[0].sampling.grammar
        assert grammar is not None
        assert (grammar.kind, json.loads(grammar.source), grammar.field) == ("json_schema", expected, "format")
    assert whole("/api/chat", {**CHAT, "format": ""})[1].sent[0].sampling.grammar is None


def test_calls_without_ids_get_some_and_their_answers_get_the_same() -> None:
    def called(name: str, **more: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"a": 1}}, **more}

    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [called("f"), called("g"), called("h", id="own")]},
        {"role": "tool", "content": "of g", "tool_name": "g"},
        {"role": "tool", "content": "of h", "tool_call_id": "own"},
        {"role": "tool", "content": "of f"},
        {"role": "Assistant", "content": "", "thinking": "Hm.", "tool_calls": [called("f")]},
        {"role": "tool", "content": "again", "tool_name": "f"},
        {"role": "tool", "content": "too many"},
    ]
    _, engine = whole("/api/chat", {**CHAT, "messages": messages, "tools": [TOOL]})
    assert engine.sent[0].chat is not None
    arguments = {"a": 1}
    assert engine.sent[0].chat.messages == [
        ChatMessage("user", USER["content"]),
        ChatMessage(
            *("assistant", None),
            tool_calls=[
                ChatToolCall("call00000", "f", arguments),
                ChatToolCall("call00001", "g", arguments),
                ChatToolCall("own", "h", arguments),
            ],
        ),
        ChatMessage("tool", "of g", "g", tool_call_id="call00001"),
        ChatMessage("tool", "of h", tool_call_id="own"),
        ChatMessage("tool", "of f", tool_call_id="call00000"),
        ChatMessage("assistant", None, reasoning_content="Hm.", tool_calls=[ChatToolCall("call00003", "f", arguments)]),
        ChatMessage("tool", "again", "f", tool_call_id="call00003"),
        ChatMessage("tool", "too many"),
    ]


class Word(str):
    """A text that counts how often any of its kind is compared."""

    __slots__ = ()
    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Word.comparisons += 1
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


@pytest.mark.parametrize("answer", [{"tool_call_id": "x"}, {"tool_name": "x"}, {}])
def test_thousands_of_calls_and_answers_take_no_long_search(answer: dict[str, str]) -> None:
    calls = [{"id": f"id{i}", "function": {"name": f"f{i}"}} for i in range(200)]
    called = OllamaMessage.model_validate({"role": "assistant", "tool_calls": calls})
    answering = OllamaMessage.model_validate({"role": "tool"}).model_copy(
        update={name: Word(text) for name, text in answer.items()}
    )
    ids = CallIds()
    ids.calls_of(called)
    Word.comparisons = 0
    answered = [ids.answered_by(answering) for _ in range(201)]
    assert answered == (["x"] * 201 if "tool_call_id" in answer else [*(f"id{i}" for i in range(200)), None])
    assert Word.comparisons < 2000


@pytest.mark.parametrize("path", ANSWERS)
def test_a_body_without_a_prompt_asks_to_load_the_model(path: str) -> None:
    async def run(engine: FakeEngine) -> None:
        response = await engine.post(path, {"model": "m", "keep_alive": 0})
        ANSWERS[path].model_validate_json(response.text, strict=True)
        assert (response.json()["done"], response.json()["done_reason"]) == (True, "load")
        assert engine.sent == []

    with_engine(run, served_model_name="m")


@pytest.mark.parametrize("name", ["m", "m:latest", "default", None])
def test_a_model_is_found_with_its_tag_and_without(name: str | None) -> None:
    assert whole("/api/chat", {**CHAT, "model": name})[0]["model"] == (name or "m")


def test_a_tag_alone_is_no_name() -> None:
    assert error_of("/api/chat", {**CHAT, "model": ":latest"})["code"] == "model_not_found"


@pytest.mark.parametrize("text", ["a\u2028b", "a\u2029b", "a\u0085b"])
def test_no_character_but_the_line_end_ends_a_line(text: str) -> None:
    response, _ = ask("/api/chat", {**CHAT, "model": "m"}, text, piece=9)
    assert [line["message"]["content"] for line in lines(response, "/api/chat")] == [text, ""]
    response, _ = ask("/api/generate", PROMPT, text, piece=9)
    assert [line["response"] for line in lines(response, "/api/generate")] == [text, ""]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/show"])
def test_another_model_is_not_found(path: str) -> None:
    error = error_of(path, {**CHAT, **PROMPT, "model": "llama3"})
    assert (error["status"], error["code"]) == (404, "model_not_found")
    assert error["error"] == 'model "llama3" not found; "m:latest" is served'


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/api/chat", {"messages": [{**USER, "images": ["aGk="]}]}, "messages[0].images"),
        ("/api/chat", {"messages": [{**USER, "role": "dog"}]}, "messages[0].role"),
        ("/api/chat", {"messages": [{**USER, "tool_calls": [{"function": {"name": "f"}}]}]}, "messages[0].tool_calls"),
        ("/api/chat", {"messages": [USER] * 4097}, "messages"),
        ("/api/chat", {"format": "yaml"}, "format"),
        ("/api/chat", {"format": "json", "tools": [TOOL]}, "format"),
        ("/api/chat", {"tools": [{"type": "web_search"}, {"function": {"parameters": {}}}]}, "tools[1].function.name"),
        ("/api/chat", {"tools": [{"type": "function"}]}, "tools[0].function"),
        ("/api/chat", {"tools": [LARGE_TOOL] * 2}, "tools"),
        ("/api/chat", {"think": "a lot"}, "think"),
        ("/api/chat", {"logprobs": True}, "logprobs"),
        ("/api/chat", {"options": {"top_p": 1.5}}, "options.top_p"),
        ("/api/chat", {"options": {"mirostat": 2}}, "options.mirostat"),
        ("/api/chat", {"options": {"num_predict": -3}}, "options.num_predict"),
        ("/api/generate", {"suffix": "end"}, "suffix"),
        ("/api/generate", {"template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"context": [1, 2]}, "context"),
        ("/api/generate", {"images": ["aGk="]}, "images"),
        ("/api/generate", {"raw": True, "system": "Be brief."}, "system"),
        ("/api/generate", {"raw": True, "think": True}, "think"),
        ("/api/show", {"model": ""}, "model"),
        ("/api/chat", {"model": "", "messages": []}, "model"),
    ],
)
def test_what_would_change_an_answer_is_refused_by_name(path: str, fields: dict[str, Any], param: str) -> None:
    body = {"/api/chat": CHAT, "/api/generate": PROMPT, "/api/show": {}}[path]
    error = error_of(path, {**body, **fields})
    assert (error["status"], error["param"], error["type"]) == (400, param, "invalid_request_error")


def test_a_model_that_does_not_reason_is_not_asked_to() -> None:
    assert error_of("/api/chat", {**CHAT, "think": True}, reasoning_parser="none")["param"] == "think"


def test_tools_of_other_types_are_ignored() -> None:
    untyped = {"type": None, "function": {**TOOL["function"], "name": "untyped"}}
    _, engine = whole("/api/chat", {**CHAT, "tools": [TOOL, {"type": "web_search"}, untyped]})
    assert engine.sent[0].chat is not None
    assert engine.sent[0].chat.tools == [TOOL, {**untyped, "type": "function"}]


def test_neutral_values_of_ollamas_clients_are_taken() -> None:
    _, engine = whole("/api/generate", {**PROMPT, "raw": True, "think": False, "options": {"top_p": 0}})
    assert 0 < engine.sent[0].sampling.top_p < 1e-6


@pytest.mark.parametrize(
    ("path", "field", "param"),
    [
        ("/api/chat", "chat_template_kwargs", "think"),
        ("/api/chat", "messages", "messages"),
        ("/api/generate", "chat_template_kwargs", "think"),
        ("/api/generate", "messages", "prompt"),
    ],
)
def test_a_refusal_by_the_template_names_a_field_of_the_body(path: str, field: str, param: str) -> None:
    async def run(engine: FakeEngine) -> None:
        engine.errors = [ReqError("", 400, "refused", field=field)]
        error = (await engine.post(path, {**CHAT, **PROMPT})).json()
        assert (error["param"], error["error"]) == (param, f"{param}: refused")

    with_engine(run, template=QWEN, served_model_name="m")


def test_the_engines_errors_have_the_clients_names() -> None:
    async def run(engine: FakeEngine) -> None:
        for path, body, field in (("/api/chat", CHAT, "messages"), ("/api/generate", PROMPT, "prompt")):
            for stream in (True, False):
                engine.errors = [ReqError("", 400, "too long", field="text", code="context_length_exceeded")]
                response = await engine.post(path, {**body, "stream": stream})
                assert response.json() == {
                    "error": f"{field}: too long",
                    "type": "invalid_request_error",
                    "param": field,
                    "code": "context_length_exceeded",
                    "status": 400,
                }

    with_engine(run, template=QWEN, served_model_name="m")


def test_an_error_in_the_middle_of_a_stream_is_a_line() -> None:
    async def run(engine: FakeEngine) -> None:
        stream = asyncio.create_task(engine.post("/api/chat", CHAT))
        await engine.wait_for(lambda: bool(engine.requests))
        (request,) = engine.requests
        # Sent one by one, or the stream would begin with the error and be a status.
        engine.client.dispatch([TextBatch([engine.text(request, "a", [0])])])
        live = engine.client.live.get(request.rid)
        async with asyncio.timeout(limit(10)):
            while live is not None and not live.choice.opened:
                await asyncio.sleep(0)
        engine.client.dispatch([ReqError(request.rid, 500, "broke")])
        first, last = (await stream).text.splitlines()
        assert json.loads(first)["message"]["content"] == "a"
        assert json.loads(last) == {
            "error": "broke",
            "type": "server_error",
            "param": None,
            "code": None,
            "status": 500,
        }
        assert last.encode().startswith(OLLAMA_LINES.error_sign)

    with_engine(run, hold=True, served_model_name="m")


@pytest.mark.parametrize("answer", ANSWERS.values())
def test_what_keeps_a_stream_alive_has_the_shape_of_a_line(answer: type[OllamaChat | OllamaGenerated]) -> None:
    content = json.loads(OLLAMA_LINES.keep_alive)
    answer.model_validate({name: content[name] for name in content if name in answer.model_fields})


def test_the_model_is_listed_by_each_name_and_shown() -> None:
    async def run(engine: FakeEngine) -> None:
        listed = (await engine.get("/api/tags")).json()["models"]
        running = (await engine.get("/api/ps")).json()["models"]
        assert [model["name"] for model in listed] == ["m:latest", "org/n:7b"]
        assert [model["model"] for model in running] == ["m:latest", "org/n:7b"]
        assert listed[0]["details"]["family"] == "llama"
        assert (len(listed[0]["digest"]), listed[0]["size"] > 0) == (64, True)
        assert (running[0]["context_length"], running[0]["size_vram"]) == (CONTEXT_LENGTH, 0)
        for body in ({"model": "m"}, {"name": "m:latest"}):
            shown = (await engine.post("/api/show", body)).json()
            assert shown["capabilities"] == ["completion", "tools", "thinking"]
            assert shown["model_info"]["llama.context_length"] == CONTEXT_LENGTH

    with_engine(run, template=QWEN, served_model_name="m,org/n:7b")


def test_clients_find_out_that_it_runs() -> None:
    async def run(engine: FakeEngine) -> None:
        async with engine.http() as client:
            for path in ("/", ""):
                assert (await client.get(path)).text == "Ollama is running"
            head = await client.head("/")
            assert (head.status_code, head.content) == (200, b"")
            assert (await client.get("/api/version")).json()["version"].count(".") == 2
            for path in ("/api/pull", "/api/delete"):
                missing = await client.post(path, json={"model": "m"})
                OllamaError.model_validate_json(missing.text, strict=True)
                assert missing.status_code == 404

    with_engine(run)


def test_cached_tokens_are_part_of_the_prompt() -> None:
    assert whole("/api/chat", CHAT)[0]["prompt_eval_count"] == PROMPT_TOKENS > CACHED_TOKENS
