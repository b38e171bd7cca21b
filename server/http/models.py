"""``GET /v1/models``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .errors import json_response
from .openai_common import check_model
from .state import HttpState


async def list_models(request: Request) -> Response:
    """The one model served, in OpenAI's list."""
    return json_response({"object": "list", "data": [_card(HttpState.of(request))]})


async def get_model(request: Request) -> Response:
    """The model of that name; 404 when it is not the one served."""
    state = HttpState.of(request)
    check_model(request.path_params["name"], state.options)
    return json_response(_card(state))


def _card(state: HttpState) -> dict[str, Any]:
    return {
        "id": state.options.model_name,
        "object": "model",
        "created": state.started,
        "owned_by": "pdserve",
        "root": state.options.model_path,
        "parent": None,
        "max_model_len": state.options.context_length,
    }
