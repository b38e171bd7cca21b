"""The router passes on llama-server's streams, which end without ``[DONE]``, and errors in its shape."""

from __future__ import annotations

import json

import pytest
from support.router_rig import Rig, scenario

from pdserve.messages.error_codes import OVERLOADED
from pdserve.runtime.web.errors import error_fields, llama_error
from pdserve.server.http.llama.answers import LlamaError

PATH = "/completion"
PIECE = b'data: {"index":0,"content":"a","tokens":[7],"stop":false}\n\n'
END = b'data: {"index":0,"content":"","tokens":[],"stop":true}\n\n'
FULL = llama_error(error_fields(503, "full", code=OVERLOADED))
BODY = {"prompt": "a", "stream": True}


def test_a_stream_passes_through() -> None:
    @scenario(retries=0)
    async def run(rig: Rig) -> None:
        worker = await rig.instance("pieces")
        worker.pieces, worker.last_piece = [PIECE, PIECE[:9], PIECE[9:] + END], b""
        worker.go_on.set()
        client = await rig.route(worker=[worker])
        assert (await client.post(PATH, json=BODY)).content == PIECE + PIECE + END

    run()


@pytest.mark.parametrize("stream", [False, True])
def test_an_instances_error_keeps_its_fields_and_says_that_it_is_full(stream: bool) -> None:
    @scenario(retries=0)
    async def run(rig: Rig) -> None:
        worker = await rig.instance("error")
        worker.error = FULL["error"]
        client = await rig.route(worker=[worker])
        answer = await client.post(PATH, json={**BODY, "stream": stream})
        assert (answer.status_code, answer.json()) == (503, FULL)
        assert int(answer.headers["retry-after"]) >= 1

    run()


def test_the_first_error_of_a_stream_becomes_the_status() -> None:
    @scenario(retries=0)
    async def run(rig: Rig) -> None:
        worker = await rig.instance("pieces")
        worker.pieces, worker.last_piece = [b"data: " + json.dumps(FULL).encode() + b"\n\n"], b""
        worker.go_on.set()
        client = await rig.route(worker=[worker])
        answer = await client.post(PATH, json=BODY)
        assert (answer.status_code, answer.json()) == (503, FULL)

    run()


def test_a_stream_that_breaks_off_ends_with_an_error_in_this_shape() -> None:
    @scenario(retries=0)
    async def run(rig: Rig) -> None:
        worker = await rig.instance("say_and_leave")
        worker.pieces, worker.last_piece = [PIECE], b""
        worker.go_on.set()
        client = await rig.route(worker=[worker])
        answer = await client.post(PATH, json=BODY)
        first, last, end = answer.text.split("\n\n")
        assert (answer.status_code, end) == (200, "")
        assert first.startswith("data: ")
        error = LlamaError.model_validate_json(last.removeprefix("data: "), strict=True).error
        assert (error.code, error.status, error.type) == (502, 502, "server_error")

    run()


def test_a_path_that_refuses_a_method_answers_in_this_shape() -> None:
    @scenario(retries=0)
    async def run(rig: Rig) -> None:
        client = await rig.route(worker=[await rig.instance("ok")])
        answer = await client.get(PATH)
        error = LlamaError.model_validate_json(answer.content, strict=True).error
        assert (answer.status_code, error.code) == (405, 405)

    run()
