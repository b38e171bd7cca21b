"""What request bodies may hold: every refusal names its field, and nothing a client writes is more than a 400."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pdserve.server.http.bodies.field_names import FieldNames
from pdserve.server.http.bodies.fields import Body
from pdserve.server.http.engine.bootstrap_gate import BootstrapGate
from pdserve.server.http.errors import ApiError
from pdserve.server.http.generation.abort import AbortBody
from pdserve.server.http.native.generate import is_batch, plan_generate
from pdserve.server.http.native.schemas import GenerateBody, SamplingParamsBody
from pdserve.server.http.openai.completions import read_prompts
from pdserve.server.http.openai.schemas import ChatBody, CompletionBody
from pdserve.server.http.parsing import parse_json
from pdserve.server.http.parsing import validate as validate_types
from pdserve.server.options import ServerOptions

B = TypeVar("B", bound=Body)


def validate(schema: type[B], body: dict[str, Any]) -> B:
    """Validate a body as a server with --unknown-fields refuse does."""
    FieldNames("refuse").check(schema, body)
    return validate_types(schema, body)


def refusal(schema: type[Body], body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        validate(schema, body)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"txt": "a"}, "txt", 'did you mean "text"?'),
        ({"temperature": 1}, "temperature", 'belongs in "sampling_params"'),
        ({"sampling_params": {"max_tokens": 1}}, "sampling_params.max_tokens", '"max_new_tokens"'),
        ({"sampling_params": {"seed": 1}}, "sampling_params.seed", '"sampling_seed"'),
        ({"zzzz": None}, "zzzz", "no such field"),
        ({"image_data": "x"}, "image_data", "does not serve"),
        ({"sampling_params": {"stop_regex": "a*"}}, "sampling_params.stop_regex", "does not serve"),
        ({"text": 5}, "text", "must be a string, not 5"),
        ({"text": ["a", None]}, "text[1]", "must be a string, not null"),
        ({"input_ids": [1, True]}, "input_ids[1]", "must be an integer, not true"),
        ({"input_ids": [[1], [1, -2]]}, "input_ids[1][1]", "greater than or equal to 0"),
        ({"input_ids": [2**31]}, "input_ids[0]", "less than or equal to 2147483647"),
        ({"stream": 1}, "stream", "must be true or false"),
        ({"sampling_params": "x"}, "sampling_params", "must be an object"),
        ({"sampling_params": {"temperature": "1"}}, "sampling_params.temperature", "must be a number"),
        ({"sampling_params": {"temperature": -0.1}}, "sampling_params.temperature", "not -0.1"),
        ({"sampling_params": {"temperature": 1e300}}, "sampling_params.temperature", "less than"),
        ({"sampling_params": {"temperature": True}}, "sampling_params.temperature", "must be a number"),
        ({"sampling_params": {"top_p": -0.1}}, "sampling_params.top_p", "greater than or equal to 0"),
        ({"sampling_params": {"top_k": -2}}, "sampling_params.top_k", "-1"),
        ({"sampling_params": {"min_p": 1.5}}, "sampling_params.min_p", "1"),
        ({"sampling_params": {"frequency_penalty": 2.5}}, "sampling_params.frequency_penalty", "2"),
        (
            {"sampling_params": {"repetition_penalty": 0}},
            "sampling_params.repetition_penalty",
            "greater than or equal to 0.01",
        ),
        ({"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens", "0"),
        ({"sampling_params": {"max_new_tokens": 1.5}}, "sampling_params.max_new_tokens", "must be an integer"),
        ({"sampling_params": {"max_new_tokens": 2**64 - 1}}, "sampling_params.max_new_tokens", "less than"),
        ({"sampling_params": {"min_new_tokens": 129}}, "sampling_params.min_new_tokens", "max_new_tokens (128)"),
        ({"sampling_params": [{}, {"min_new_tokens": 129}]}, "sampling_params[1].min_new_tokens", "129 is above"),
        ({"sampling_params": [{}, {"top_K": 1}]}, "sampling_params[1].top_K", 'did you mean "top_k"?'),
        ({"sampling_params": [{}, {"stop_regex": "a"}]}, "sampling_params[1].stop_regex", "does not serve"),
        ({"sampling_params": {"best_of": 3, "n": 2}}, "sampling_params.best_of", '"n": 3'),
        ({"sampling_params": {"n": 65}}, "sampling_params.n", "64"),
        ({"sampling_params": {"stop": ["a"] * 33}}, "sampling_params.stop", "the limit is 32"),
        ({"sampling_params": {"stop_token_ids": [-1]}}, "sampling_params.stop_token_ids[0]", "0"),
        ({"rid": ""}, "rid", "must not be empty"),
        ({"rid": "a\nb"}, "rid", "printable"),
        ({"bootstrap_room": 2**63}, "bootstrap_room", "less than or equal"),
        ({"bootstrap_port": 0}, "bootstrap_port", "1"),
    ],
)
def test_generate_refuses_by_name(body: dict[str, Any], param: str, says: str) -> None:
    error = refusal(GenerateBody, body)
    assert error.param == param
    assert error.message.startswith(f"{param}: ")
    assert says in error.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "input_ids"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a", ""]}, "text[1]"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids[1]"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
        ({"text": "a", "rid": ["x"]}, "rid"),
        ({"text": "a", "sampling_params": []}, "sampling_params"),
        ({"text": "a", "bootstrap_room": 1}, "bootstrap_host"),
        ({"text": "a", "bootstrap_host": "h"}, "bootstrap_room"),
        ({"text": ["a"] * 128, "sampling_params": {"n": 64}}, "n"),
    ],
)
def test_generate_refuses_what_does_not_fit_together(body: dict[str, Any], param: str) -> None:
    checked = validate(GenerateBody, {"rid": "r"} | body)
    with pytest.raises(ApiError) as caught:
        plan_generate(checked, is_batch(checked), BootstrapGate(ServerOptions()))
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (GenerateBody, {"text": "a", "image_data": None, "lora_path": "", "log_metrics": True, "priority": 0}),
        (GenerateBody, {"text": "a", "sampling_params": {"regex": None, "spaces_between_special_tokens": True}}),
        (GenerateBody, {"text": None, "input_ids": [1], "rid": None, "sampling_params": {"max_new_tokens": None}}),
        (CompletionBody, {"prompt": "a", "best_of": 1, "logit_bias": {}, "suffix": None, "user": "u"}),
        (ChatBody, {"messages": [{"role": "user", "content": "a", "name": None}], "tools": [], "tool_choice": "auto"}),
        (ChatBody, {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "text"}}),
        (AbortBody, {"rid": "", "abort_all": True}),
    ],
)
def test_what_asks_for_nothing_is_accepted(schema: type[Body], body: dict[str, Any]) -> None:
    validate(schema, body)


@pytest.mark.parametrize(
    ("schema", "body", "param"),
    [
        (CompletionBody, {}, "prompt"),
        (CompletionBody, {"prompt": "a", "suffix": "b"}, "suffix"),
        (CompletionBody, {"prompt": "a", "best_of": 2}, "best_of"),
        (CompletionBody, {"prompt": [1, "a"]}, "prompt[1]"),
        (CompletionBody, {"prompt": "a", "logprobs": True}, "logprobs"),
        (CompletionBody, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        (CompletionBody, {"prompt": "a", "stream_options": {"include_usag": True}}, "stream_options.include_usag"),
        (ChatBody, {"messages": []}, "messages"),
        (ChatBody, {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        (ChatBody, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (ChatBody, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (ChatBody, {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools[0].type"),
        (
            ChatBody,
            {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json"}},
            "response_format.type",
        ),
        (ChatBody, {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "top_logprobs"),
        (AbortBody, {}, "rid"),
        (AbortBody, {"rid": "a", "abort_all": True}, "rid"),
    ],
)
def test_other_bodies_refuse_by_name(schema: type[Body], body: dict[str, Any], param: str) -> None:
    assert refusal(schema, body).param == param


def test_an_empty_list_of_messages_is_called_empty() -> None:
    assert str(refusal(ChatBody, {"messages": []})) == "messages: must not be empty"


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[1]",
        b'"a"',
        b"null",
        b'{"text": NaN}',
        b'{"text": Infinity}',
        b'{"text": "\\ud800"}',
        b"\xff",
        b"[" * 5000,
    ],
)
def test_what_is_not_a_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json(data)
    assert caught.value.status == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(string.ascii_letters, max_size=3), inner, max_size=2)
    ),
    max_leaves=6,
)
NESTED = {"sampling_params": SamplingParamsBody}


def bodies(schema: type[Body]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw objects with some of the known fields, whatever their values."""
    names = [*schema.model_fields, *schema.unserved]
    values = {name: bodies(NESTED[name]) | JSON if name in NESTED else JSON for name in names}
    return st.fixed_dictionaries({}, optional=values).map(lambda body: dict(list(body.items())[:6]))


def status_of(check: Callable[[], object]) -> int:
    """Return 200, or the status of the refusal."""
    try:
        check()
    except ApiError as e:
        return e.status
    return 200


@given(bodies(GenerateBody))
def test_any_generate_body_is_planned_or_refused(body: dict[str, Any]) -> None:
    def check() -> None:
        checked = validate(GenerateBody, body if body.get("rid") is not None else body | {"rid": "r"})
        plans = plan_generate(checked, is_batch(checked), BootstrapGate(ServerOptions()))
        assert all(plan.prompt.text or plan.prompt.input_ids for plan in plans)

    assert status_of(check) in (200, 400)


@given(bodies(CompletionBody))
def test_any_completion_body_is_checked_or_refused(body: dict[str, Any]) -> None:
    assert status_of(lambda: read_prompts(validate(CompletionBody, {"prompt": "a"} | body).prompt)) in (200, 400)


@given(bodies(ChatBody))
def test_any_chat_body_is_checked_or_refused(body: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "a"}]
    assert status_of(lambda: validate(ChatBody, {"messages": messages} | body)) in (200, 400)


@pytest.mark.parametrize(
    ("schema", "body", "param"),
    [
        (GenerateBody, {"text": [1] * 50}, "text[0]"),
        (GenerateBody, {"input_ids": [{}] * 50}, "input_ids[0]"),
        (GenerateBody, {"input_ids": [[{}] * 50] * 50}, "input_ids[0][0]"),
        (GenerateBody, {"rid": [1] * 50}, "rid[0]"),
        (GenerateBody, {"bootstrap_port": ["a"] * 50}, "bootstrap_port[0]"),
        (GenerateBody, {"sampling_params": [1] * 50}, "sampling_params[0]"),
        (GenerateBody, {"sampling_params": {"stop": [1] * 50}}, "sampling_params.stop[0]"),
        (GenerateBody, {"sampling_params": {"stop_token_ids": ["a"] * 50}}, "sampling_params.stop_token_ids[0]"),
        (CompletionBody, {"prompt": [True] * 50}, "prompt[0]"),
        (CompletionBody, {"prompt": ["a", *[1] * 50]}, "prompt[1]"),
        (CompletionBody, {"prompt": [["a"] * 50] * 50}, "prompt[0][0]"),
        (ChatBody, {"messages": [1] * 50}, "messages[0]"),
        (ChatBody, {"messages": [{"role": "user", "content": [1] * 50}]}, "messages[0].content[0]"),
    ],
)
def test_only_the_first_wrong_entry_of_a_list_is_looked_at(
    schema: type[Body], body: dict[str, Any], param: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(body)
    assert caught.value.error_count() <= len(schema.model_fields)
    assert len([e for e in caught.value.errors() if e["type"] != "missing"]) == 1
    assert refusal(schema, body).param == param


@pytest.mark.parametrize(
    ("schema", "body", "param"),
    [
        (GenerateBody, {"text": ["a"] * 4097}, "text"),
        (GenerateBody, {"input_ids": [[1]] * 4097}, "input_ids"),
        (CompletionBody, {"prompt": ["a"] * 4097}, "prompt"),
        (CompletionBody, {"prompt": [[1]] * 4097}, "prompt"),
    ],
)
def test_a_body_holds_at_most_4096_prompts(schema: type[Body], body: dict[str, Any], param: str) -> None:
    error = refusal(schema, body)
    assert (error.param, error.message) == (param, f"{param}: holds too many entries, the limit is 4096")


def test_a_giant_field_name_is_not_repeated() -> None:
    error = refusal(GenerateBody, {"x" * 5000: 1})
    assert len(error.message) < 200
    assert error.param is not None
    assert len(error.param) < 100
