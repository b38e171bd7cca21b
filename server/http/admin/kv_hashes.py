"""``POST /kv/hashes``, for admins: what the KV pool holds of a prompt, as hashes of each layer's keys and values."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from ....messages.base import pack_i32
from ....messages.kv_debug import HashedGroup, KVHashesReq
from ....messages.text import EncodeReq
from ....runtime.web.json_response import json_response
from ..answers import AnswerBody
from ..bodies.fields import Body, FieldError, PromptIds
from ..endpoint import endpoint
from ..errors import bad_request
from ..parsing import parse_body
from ..state import HttpState
from ..text.schemas import MAX_CHARACTERS

SECONDS = 30.0
"""Timeout for the tokenizer, and for the worker, which answers after the steps under way."""


class KVHashesBody(Body):
    """``POST /kv/hashes``: a prompt. ``extra_key``: the namespace of its KV; without it, that which has most of it."""

    text: Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)] | None = None
    input_ids: PromptIds | None = None
    extra_key: Annotated[str, Field(max_length=2048)] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> KVHashesBody:
        if (self.text is None) == (self.input_ids is None):
            raise FieldError("text", 'give exactly one of "text" and "input_ids"')
        return self


class HashedLayer(AnswerBody):
    """Hashes of one layer: one for each page's ``K`` and ``V``. null: the page is not there.

    Latent attention has ``latent`` instead. Labelled keys add ``labels``.
    """

    layer: int
    K: list[str | None] = Field(default=[])
    V: list[str | None] = Field(default=[])
    latent: list[str | None] = Field(default=[])
    labels: list[str | None] = Field(default=[])


class KVHashesAnswer(AnswerBody):
    """``POST /kv/hashes``: what is cached of the prompt, whole pages. ``order``: in which the elements were read."""

    tokens: int
    cached_tokens: int
    page_size: int
    order: Literal["tokens", "blocks"]
    extra_key: str
    layers: list[HashedLayer]


@endpoint(KVHashesAnswer, body=KVHashesBody)
async def kv_hashes(request: Request) -> Response:
    """Answer with hashes of the cached keys and values of a prompt: for each layer, one for each whole page.

    Nothing is computed: a page that is not cached has null. Answers 501 without ``--kv-debug``.
    """
    state, body = HttpState.of(request), await parse_body(request, KVHashesBody)
    questions = state.engine.questions
    token_ids = body.input_ids
    if token_ids is None:
        text = body.text or ""
        ask = lambda: questions.ask(EncodeReq([text]), SECONDS)  # noqa: E731
        read = await state.questions.ask(request, len(text), ask)
        if read.error is not None:
            raise bad_request(read.field, read.error)
        [token_ids] = read.token_ids
    packed = pack_i32(token_ids)
    found = await questions.ask(KVHashesReq(packed, body.extra_key), SECONDS)
    layers = [layer for group in found.groups if group.layers for layer in _layers(group)]
    return json_response(
        {
            "tokens": len(token_ids),
            "cached_tokens": found.cached_tokens,
            "page_size": found.page_size,
            "order": found.order,
            "extra_key": found.extra_key,
            "layers": sorted(layers, key=lambda layer: layer["layer"]),
        }
    )


def _layers(group: HashedGroup) -> list[dict[str, Any]]:
    """Decode ``group`` to an object for each layer: hexadecimal hashes of its pages by part, such as ``K`` and ``V``.

    A page that is not in the pool has None.
    """
    hashes = np.frombuffer(group.hashes, dtype="<u8").reshape(-1, len(group.layers), len(group.parts))
    return [
        {"layer": layer}
        | {part: [f"{h:016x}" if h else None for h in hashes[:, i, j].tolist()] for j, part in enumerate(group.parts)}
        for i, layer in enumerate(group.layers)
    ]
