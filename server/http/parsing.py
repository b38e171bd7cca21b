"""Parses the bytes of a request to a checked body, or refuses them with a 400 that names the field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from ...messages.error_codes import OVERLOADED
from ...runtime.web.access_log import AccessRecord
from ...runtime.web.auth import is_signed
from ...runtime.web.body import MAX_PROMPTS, MAX_VALUES, BodyEncoded, BodyTooLarge, TooManyValues, UploadDropped
from .bodies.field_names import IGNORED_HEADER
from .bodies.fields import TAG, Body, FieldError
from .bodies.large_bodies import LARGE_BYTES, check_amount, parse_in_pieces
from .bodies.request_fields import RequestFields
from .bodies.tool_fields import ArgumentBudget
from .errors import ApiError, bad_request
from .state import HttpState

B = TypeVar("B", bound=Body)
MAX_BODY_BYTES = 33 * 2**20
"""Maximum body: 32 MiB, as at a router, and 1 MiB for what a router adds for 4,096 prompts (rooms, hosts, a name)."""
MAX_BODY_VALUES = MAX_VALUES + 4 * MAX_PROMPTS
"""Maximum number of values in a body, including those that a router adds."""
MAX_SHOWN = 60

WANTED = {
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "missing": "is required",
}


def parse_json(data: bytes, is_large: bool = False) -> dict[str, Any]:
    """Parse ``data`` to a JSON object; no data is an empty object.

    ``is_large``: parse in pieces, so that the event loop can run in between, and limit token ids and message parts.
    Raises ``ApiError``: 400 for anything but a valid JSON object, 413 for too many of these.
    """
    if not data:
        return {}
    try:
        # NaN, Infinity, lone surrogates and absurd nesting are refused here.
        content = parse_in_pieces(data) if is_large else orjson.loads(data)
    except orjson.JSONDecodeError as e:
        raise bad_request(None, f"the body is not valid JSON: {e}") from None
    if not isinstance(content, dict):
        raise bad_request(None, "the body must be a JSON object")
    if is_large:
        check_amount(content)
    return content


def validate(schema: type[B], content: dict[str, Any]) -> B:
    """Check types and ranges of a body's ``content``, and return it as a ``schema``.

    The names of its fields must have been checked: unknown ones are dropped here. Raises ``ApiError`` 400 that names
    the first offending field.
    """
    try:
        return schema.model_validate(content, context=ArgumentBudget())
    except ValidationError as e:
        raise _explain(e.errors(include_url=False)[0]) from None


async def parse_body(request: Request, schema: type[B]) -> B:
    """Read the body of ``request``, check names and values of its fields, and return it as a ``schema``.

    A header of the answer will name the fields that are ignored. The content type is not checked, so that a plain
    ``curl -d`` works. Raises ``ApiError`` (400, 413, 415, 503) and ``ClientDisconnect``.
    """
    return await parse_bytes(request, schema, await read_bytes(request))


async def read_bytes(request: Request) -> bytes:
    """Read the body of ``request``. Raises ``ApiError`` (413, 415, 503) and ``ClientDisconnect``."""
    try:
        return await HttpState.of(request).uploads.read(request, MAX_BODY_BYTES)
    except BodyEncoded as e:
        raise ApiError(415, str(e)) from None
    except BodyTooLarge as e:
        raise ApiError(413, f"{e}; split the batch") from None
    except TooManyValues as e:
        raise ApiError(413, str(e)) from None
    except UploadDropped as e:
        raise ApiError(503, str(e), code=OVERLOADED) from None


async def parse_bytes(request: Request, schema: type[B], body: bytes) -> B:
    """Do for the bytes of a body what ``parse_body`` does for that of ``request``, which was read."""
    state, record = HttpState.of(request), AccessRecord.of(request.scope)

    def read(data: bytes, is_large: bool) -> B:
        content = parse_json(data, is_large)
        if ignored := state.field_names.check(schema, content):
            record.headers.append((IGNORED_HEADER, ignored))
        fields = validate(schema, content)
        if isinstance(fields, RequestFields) and is_signed(request.scope):
            fields.mark_signed()
        return fields

    try:
        is_large = len(body) > LARGE_BYTES
        with state.uploads.wait(len(body)):
            return await state.aside.run(is_large, lambda: read(body, is_large))
    except UploadDropped as e:
        raise ApiError(503, str(e), code=OVERLOADED) from None


def _explain(error: ErrorDetails) -> ApiError:
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        return bad_request(_path([*error["loc"], cause.field]), str(cause))
    path = _path(error["loc"])
    if error["type"] in ("int_type", "int_from_float") and _is_beyond_64_bits(error["input"]):
        return bad_request(path or None, "is outside the range of 64-bit integers")
    wanted = WANTED.get(error["type"]) or error["msg"].removeprefix("Input ").removeprefix("Value error, ")
    if error["type"] == "too_long":
        wanted = f"holds too many entries, the limit is {error['ctx']['max_length']}"
    says_all = error["type"] in ("missing", "string_too_short", "too_short", "too_long") or (
        cause is not None and isinstance(error["input"], dict | list)
    )
    return bad_request(path or None, wanted if says_all else f"{wanted}{_show(error['input'])}")


def _is_beyond_64_bits(value: Any) -> bool:
    """Return whether ``value`` is a large integer, which the parser of JSON makes a float."""
    return isinstance(value, float) and value.is_integer() and abs(value) >= 2**63


def _path(parts: Sequence[int | str]) -> str:
    """Join the location of an error to the field's full name, such as ``messages[2].content``; skip tags of unions."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith(TAG):
            path += f".{part}" if path else part
    return path


def _show(value: Any) -> str:
    if isinstance(value, dict | list):
        return f", not a{'n object' if isinstance(value, dict) else ' list'}"
    shown = orjson.dumps(value[: MAX_SHOWN + 1] if isinstance(value, str) else value).decode()
    return f", not {shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + '…'}"
