"""``POST /start_profile`` and ``/stop_profile``, SGLang's names: traces of what the model workers compute.

Both are an admin's.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from ....messages.profiling import (
    ALL_ACTIVITIES,
    MAX_STACK_STEPS,
    MAX_STEPS,
    ProfileActivity,
    ProfileResult,
    StartProfileReq,
    StopProfileReq,
)
from ....messages.question import Question
from ....runtime.web.json_response import json_response
from ..answers import AnswerBody, respond
from ..bodies.fields import Body, FieldError
from ..bodies.unserved import Unserved, neutral
from ..endpoint import endpoint
from ..engine.question_client import NoAnswer
from ..errors import ApiError
from ..parsing import parse_body
from ..state import HttpState

PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
START_SECONDS = 60.0
"""Maximum time until the worker records: it may be in a long step, and a GPU's first profile loads CUPTI."""
STOP_SECONDS = 300.0
"""Maximum time until the files are written."""


def _check_name(name: str) -> str:
    if not PLAIN_NAME.fullmatch(name):
        raise ValueError(
            "must be a plain name (letters, digits, '.', '_' and '-', 64 at most): it is made in the folder of "
            "--profile-dir"
        )
    return name


START_PROFILE: Unserved = {
    **neutral(False, names="profile_by_stage merge_profiles"),
    **neutral([], names="profile_stages"),
    **neutral("", names="profile_prefix"),
    **neutral(names="start_step"),
}


class StartProfileBody(Body):
    """``POST /start_profile``: what is recorded of the next ``num_steps`` steps, and in which folder.

    ``activities``: none means all that the device has. ``num_steps``: by default, as many as there may be.
    """

    may_be_left_out: ClassVar[bool] = True
    refuses_unknown: ClassVar[bool] = True
    unserved: ClassVar[Unserved] = START_PROFILE

    output_dir: Annotated[str, AfterValidator(_check_name)] | None = None
    num_steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] | None = None
    activities: Annotated[list[ProfileActivity], Field(max_length=len(ALL_ACTIVITIES))] = Field(default_factory=list)
    with_stack: bool = False
    record_shapes: bool = False

    @model_validator(mode="after")
    def _check_steps(self) -> StartProfileBody:
        if self.with_stack and self.num_steps is not None and self.num_steps > MAX_STACK_STEPS:
            raise FieldError("num_steps", f"must be at most {MAX_STACK_STEPS} with with_stack, not {self.num_steps}")
        return self


class StopProfileBody(Body):
    """``POST /stop_profile``: nothing."""

    may_be_left_out: ClassVar[bool] = True
    refuses_unknown: ClassVar[bool] = True


class ProfileStartedAnswer(AnswerBody):
    """``POST /start_profile``: ``files`` will be there after ``num_steps`` steps, or ``seconds``, or a stop."""

    folder: str
    files: list[str]
    activities: list[Literal["CPU", "GPU"]]
    num_steps: int
    seconds: float


class ProfileStoppedAnswer(AnswerBody):
    """``POST /stop_profile``: the files of the profile that ended now or was the last, and their size in all."""

    folder: str
    files: list[str]
    bytes: int
    activities: list[Literal["CPU", "GPU"]]
    steps: int
    seconds: float
    ended_by: Literal["num_steps", "time limit", "request"]


@endpoint(ProfileStartedAnswer, body=StartProfileBody)
async def start_profile(request: Request) -> Response:
    """Start a profile of the model workers' next ``num_steps`` steps; answers when they record, with the files to come.

    Answers 409 while a profile runs, and if the folder's name is taken.
    """
    body = await parse_body(request, StartProfileBody)
    steps = body.num_steps or (MAX_STACK_STEPS if body.with_stack else MAX_STEPS)
    name = body.output_dir or f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
    result = await _ask(
        request,
        StartProfileReq(name, steps, body.activities, body.with_stack, body.record_shapes),
        START_SECONDS,
    )
    return respond(
        ProfileStartedAnswer(
            folder=result.folder,
            files=result.files,
            activities=result.activities,
            num_steps=result.steps,
            seconds=result.seconds,
        )
    )


@endpoint(ProfileStoppedAnswer, body=StopProfileBody)
async def stop_profile(request: Request) -> Response:
    """End the running profile, and answer with its files once they are written.

    If none runs, answers with the files of the last one, or 409 if there has been none.
    """
    await parse_body(request, StopProfileBody)
    result = await _ask(request, StopProfileReq(), STOP_SECONDS)
    return json_response(
        {
            "folder": result.folder,
            "files": result.files,
            "bytes": result.nbytes,
            "activities": result.activities,
            "steps": result.steps,
            "seconds": result.seconds,
            "ended_by": result.ended_by,
        }
    )


async def _ask(request: Request, question: Question[ProfileResult], seconds: float) -> ProfileResult:
    """Ask the scheduler about a profile, and return its result after at most ``seconds``.

    Raises ``ApiError``: 503 without an answer in time, otherwise the status of a refusal.
    """
    try:
        return await HttpState.of(request).engine.questions.ask(question, seconds)
    except NoAnswer:
        text = f"the model worker did not answer within {seconds:g} s; /server_info tells the profile's state"
        raise ApiError(503, text) from None
