"""instructor: objects by tool calls, and once more with the error if its own check refuses one."""

from __future__ import annotations

from typing import Any

import instructor
import pytest
from instructor.core import InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel, Field, field_validator

ASK: Any = [{"role": "user", "content": "Name a town of France."}]
ASK_PARTS: Any = [{"role": "user", "content": "Name a town in parts."}]
ASK_CHECKED: Any = [{"role": "user", "content": "Name a town that is checked."}]


class Town(BaseModel):
    """A town."""

    name: str
    inhabitants: int = Field(ge=0)


class CheckedTown(Town):
    """A town with a name that is checked."""

    @field_validator("name")
    @classmethod
    def check_name(cls, name: str) -> str:
        assert name[:1].isupper(), "a name begins with a capital"
        return name


@pytest.fixture
def client(url: str) -> instructor.Instructor:
    return instructor.from_openai(OpenAI(base_url=url + "/v1", api_key="anything", max_retries=0, timeout=120))


def test_an_object_whole_and_in_parts(client: instructor.Instructor, model: str) -> None:
    town = client.create(model=model, messages=ASK, response_model=Town)
    assert town.model_dump() == {"name": "lyon", "inhabitants": 520000}
    *_, last = client.create_partial(model=model, messages=ASK_PARTS, response_model=Town)
    assert last.model_dump() == {"name": "Lyon", "inhabitants": 520000}


def test_a_refused_object_is_asked_for_again(client: instructor.Instructor, model: str) -> None:
    town, completion = client.create_with_completion(
        model=model, messages=ASK_CHECKED, response_model=CheckedTown, max_retries=2
    )
    assert town.name == "Lyon"
    assert completion.choices[0].message.tool_calls[0].function.name == "CheckedTown"
    with pytest.raises(InstructorRetryException):
        client.create(model=model, messages=ASK_CHECKED, response_model=CheckedTown, max_retries=0)
