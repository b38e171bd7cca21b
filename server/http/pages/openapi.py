"""The OpenAPI page. Endpoints parse their bodies and write their answers themselves, so FastAPI knows neither.

The page is made at the first request for it, which imports FastAPI. So neither adds to the start time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, TypeVar

import orjson
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from ....runtime.web.paths import PathFacts
from ....runtime.web.sse import DATA_PREFIX, SSE_TYPE, StreamFormat
from ..answers import MetricsText
from ..endpoint import HttpEndpoint, QueryParameter, endpoint
from ..state import HttpState

T = TypeVar("T")

PARAMETER = re.compile(r"\{(\w+)\}")
REF = "#/components/schemas/{model}"
STREAMED = "{when}, each event{but} holds one of these."
ASKED, UNLESS = 'With "stream": true', 'Unless "stream" is false'


@endpoint()
async def openapi_page(request: Request) -> Response:
    """Answer with the OpenAPI document of this instance, in JSON."""
    content = await beside_the_loop(request, orjson.dumps)
    return Response(content, media_type="application/json")


async def beside_the_loop(request: Request, write: Callable[[dict[str, Any]], T]) -> T:
    """Return what ``write`` makes of this instance's OpenAPI document.

    Both are made on a thread, since the first call takes half a second: it imports FastAPI.
    """
    openapi = request.app.state.openapi
    return await HttpState.of(request).aside.run(True, lambda: write(openapi()))


def make_openapi(version: str, endpoints: Mapping[PathFacts, HttpEndpoint]) -> Callable[[], dict[str, Any]]:
    """Return a function that makes the OpenAPI document of ``endpoints`` at its first call, and returns it at each.

    ``version``: the server's. Endpoints without an answer model are left out.
    """
    described = {facts: known for facts, known in endpoints.items() if known.answer is not None}

    @cache
    def openapi() -> dict[str, Any]:
        page = _list_paths(version, described)
        models: list[type[BaseModel]] = []
        for known in described.values():
            used = (known.error, known.body, known.answer, known.event)
            models += [model for model in used if model is not None and model not in models]
        wanted: list[tuple[Any, Literal["validation", "serialization"]]] = [(m, "validation") for m in models]
        refs, schemas = models_json_schema(wanted, ref_template=REF)
        page["components"] = {"schemas": schemas["$defs"]}
        ref_of: dict[Any, dict[str, Any]] = {model: ref for (model, _), ref in refs.items()}
        # The page names a path parameter without its converter.
        named = {
            (facts.label, method.lower()): (facts, known)
            for facts, known in described.items()
            for method in facts.methods
        }
        for path, operations in page["paths"].items():
            for method, operation in operations.items():
                facts, known = named[path, method]
                operation["parameters"] = [
                    *(_path_parameter(name) for name in PARAMETER.findall(path)),
                    *map(_query_parameter, known.query),
                ]
                _describe(operation, known, facts.stream_format, ref_of)
        return page

    return openapi


def _list_paths(version: str, endpoints: Mapping[PathFacts, HttpEndpoint]) -> dict[str, Any]:
    """Return an OpenAPI document of the paths, with what FastAPI reads off the handlers: names and descriptions."""
    # Imported here: it takes longer than all else that this process imports.
    from fastapi import FastAPI

    app = FastAPI(title="pdserve", version=version, openapi_url=None)
    for facts, known in endpoints.items():
        for method in facts.methods:
            app.add_api_route(facts.path, known.handler, methods=[method])
    return app.openapi()


def _describe(
    operation: dict[str, Any], path: HttpEndpoint, stream_format: StreamFormat, ref_of: Mapping[Any, dict[str, Any]]
) -> None:
    if path.body is not None:
        operation["requestBody"] = {"required": not path.body.may_be_left_out, "content": _json(ref_of[path.body])}
    good: dict[str, Any] = {"description": "done", "content": _json(ref_of[path.answer])}
    if path.answer is MetricsText:
        good["content"] = {"text/plain": {"schema": {"type": "string"}}}
    if path.event is not None:
        last = stream_format.last_event.removeprefix(DATA_PREFIX).strip().decode()
        when, but = UNLESS if stream_format.is_default else ASKED, f" but the last, {last}," if last else ""
        good["description"] = STREAMED.format(when=when, but=but)
        media_type, schema = stream_format.media_type.decode(), ref_of[path.event]
        good["content"][media_type] = {"schema": _event(schema, last) if media_type == SSE_TYPE else schema}
    error = {"description": "docs/http-api.md lists the statuses", "content": _json(ref_of[path.error])}
    operation["responses"] = {"200": good, "4XX": error, "5XX": error}


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _query_parameter(parameter: QueryParameter) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if parameter.values:
        schema["enum"] = list(parameter.values)
    return {"name": parameter.name, "in": "query", "required": parameter.required, "schema": schema}


def _event(schema: dict[str, Any], last: str) -> dict[str, Any]:
    """Return the JSON schema of a stream's event. Its data is JSON of ``schema`` as text, or equals ``last``.

    ``last``: data of the event that ends a stream, "" if there is none.
    """
    chunk = {"contentMediaType": "application/json", "contentSchema": schema}
    data = {"type": "string", "anyOf": [*([{"const": last}] if last else []), chunk]}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
