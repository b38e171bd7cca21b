"""The base of all answers, and the answers of several APIs. An API's own answers are beside its endpoints.

The OpenAPI page shows these models, and tests check every answer against them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, RootModel
from starlette.responses import Response

from ...runtime.web.json_response import json_response


class AnswerBody(BaseModel):
    """Base of all: no field that is not declared, and no other type than the one that is."""

    # Built at the first use: most servers never answer in most of these shapes.
    model_config = ConfigDict(strict=True, extra="forbid", defer_build=True)


def respond(answer: AnswerBody) -> Response:
    """Return a 200 JSON response with ``answer``. Fields that were not given to its constructor are left out."""
    return json_response(answer.model_dump(exclude_unset=True))


def respond_large(answer: type[AnswerBody], **fields: Any) -> Response:
    """Return a 200 JSON response with an ``answer`` of these ``fields``, which are neither checked nor copied.

    Making the model would take 10 ms for 100,000 token ids, while no other request is served.
    """
    assert fields.keys() <= answer.model_fields.keys(), answer
    return json_response(fields)


class ErrorDetail(AnswerBody):
    """The ``error`` object of a failed request: a message for people, and what clients dispatch on."""

    message: str
    type: str
    param: str | None
    code: str | None
    status: int


class ErrorAnswer(AnswerBody):
    """Any status from 400 on."""

    error: ErrorDetail


class PdserveFinish(AnswerBody):
    """How an answer ended where its API has no word for it."""

    type: Literal["abort", "timeout", "declined"]
    message: str


class InstanceAnswer(AnswerBody):
    """What one instance answered to a router that asked all of them."""

    url: str
    status: int
    answer: Any


class MetricsText(RootModel[str]):
    """``GET /metrics``: the text exposition format; docs/metrics.md has what is in it."""
