"""The HTTP app in front of an engine that is a few lines long: output token ``i`` is id ``i`` and reads "w<i> "."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import msgspec
import numpy as np
import orjson
from starlette.types import ASGIApp

from pdserve.messages.base import Message
from pdserve.messages.control import (
    FlushCacheReq,
    FlushCacheResult,
    Ping,
    Pong,
    ServerInfo,
    ServerInfoReq,
    Transfers,
    TransfersReq,
)
from pdserve.messages.kv_debug import KVHashes, KVHashesReq
from pdserve.messages.outputs import (
    FinishReason,
    FinishType,
    NamedLogprob,
    Phase,
    PhaseTime,
    PromptText,
    ReqError,
    ReqMeta,
    ReqText,
    TextBatch,
    Timing,
)
from pdserve.messages.profiling import ProfileResult, StartProfileReq, StopProfileReq
from pdserve.messages.question import RefusedAnswer
from pdserve.messages.requests import AbortReq, GenerateReq, TokenizeReq, forked
from pdserve.messages.sessions import ResumeReq, SnapshotReq, SnapshotResult
from pdserve.messages.text import Decoded, DecodeReq, Encoded, EncodeReq, Limits, LimitsReq
from pdserve.runtime.web.keys import caches_by_key
from pdserve.server.http.app import make_app
from pdserve.server.http.engine.engine_client import EngineClient
from pdserve.server.http.served_model import ServedModel
from pdserve.server.options import ServerOptions
from pdserve.server.output_parsers.choice import choose_formats
from support.admin_key import ADMIN_KEY, as_admin
from support.answer_keys import AnyAnswerKey
from support.machine import limit
from support.sim import Sent

T = TypeVar("T")
PROMPT_TOKENS, CACHED_TOKENS, MAX_OUTPUT = 7, 4, 16
CONTEXT_LENGTH, VOCAB_SIZE = 512, 100


class FakeEngine:
    """An engine that answers at once.

    A prompt is "p0 p1 ", ids 50 and 51; a text has a token a word, with its length as id.

    It records what HTTP sends, and answers one step in each iteration of the event loop. ``sent`` has one entry for
    each prompt, ``requests`` one for each answer to it.

    ``hold``: answer no request by itself. ``mute``: answer no question. ``errors``: what the next requests end in.
    ``end_aborted``: end aborted requests, as an engine does sooner or later. ``template``: the model's chat template.
    """

    def __init__(self, *, hold: bool = False, mute: bool = False, template: str = "", **options: Any) -> None:
        self.options = ServerOptions(**options)
        self.to_supervisor = Sent()
        self.client = EngineClient(
            self,
            self.to_supervisor,
            answer_keys=AnyAnswerKey(),
            mode=self.options.disaggregation_mode,
            cache_by_key=caches_by_key(self.options),
            max_logprobs=self.options.max_logprobs_per_request,
            max_requests=self.options.max_queued_requests + self.options.max_running_requests,
        )
        own = self.options
        formats = choose_formats(
            own.tool_call_parser, own.reasoning_parser, template, streams_arguments=own.stream_tool_arguments
        )
        model = ServedModel(own.model_names, own.model_path, formats=formats)
        self.app: ASGIApp = make_app(own, self.client, "e1", model, own_admin_key=ADMIN_KEY)
        self.hold = hold
        self.mute = mute
        self.pong = Pong(True)
        self.end_aborted = True
        self.flush_result: FlushCacheResult | RefusedAnswer = FlushCacheResult(5)
        self.transfers: list[dict] = []
        self.snapshot: SnapshotResult | RefusedAnswer = RefusedAnswer(404, "unknown")
        self.kv_hashes: KVHashes | RefusedAnswer = RefusedAnswer(501, "start it with --kv-debug")
        self.resumed: list[ResumeReq] = []
        self.errors: list[ReqError] = []
        self.sent: list[TokenizeReq] = []
        self.requests: list[TokenizeReq] = []
        self.vectors: list[list[float]] = []
        self.aborts: list[AbortReq] = []
        self.questions: list[Message] = []
        self.arrived = asyncio.Condition()
        self._begun: set[str] = set()

    def send(self, *messages: Message) -> None:
        """Take messages from HTTP, as the tokenizer process would."""
        for message in messages:
            if isinstance(message, TokenizeReq):
                self.sent.append(message)
                for i, rid in enumerate(message.rids):
                    self._take(forked(message, i, rid))
            elif isinstance(message, ResumeReq):
                self.resumed.append(message)
                self.step(message.state.running.request, 0)
            elif isinstance(message, AbortReq):
                self.aborts.append(message)
                named = [r for r in self.requests if message.rid in ("", r.rid)] if self.end_aborted else []
                for request in named:
                    self._soon(TextBatch([self.text(request, "", [], FinishType.ABORT, matched=None)]))
            else:
                self.questions.append(message)
                if not self.mute:
                    self._answer(message)
        asyncio.get_running_loop().create_task(self._notify())

    def _take(self, request: TokenizeReq) -> None:
        self.requests.append(request)
        if self.errors:
            error = self.errors.pop(0)
            self._soon(ReqError(request.rid, error.status, error.message, error.kind, error.field, error.code))
        elif not self.hold:
            self.step(request, 0)

    async def _notify(self) -> None:
        async with self.arrived:
            self.arrived.notify_all()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds; it is looked at when something arrives."""
        async with asyncio.timeout(limit(10)), self.arrived:
            await self.arrived.wait_for(condition)

    def step(self, request: TokenizeReq | GenerateReq, i: int) -> None:
        """Answer token ``i`` and, later, the rest."""
        last = i + 1 == min(request.sampling.max_new_tokens, MAX_OUTPUT)
        item = self.text(request, f"w{i} ", [i], FinishType.LENGTH if last else None)
        self._soon(TextBatch([item]))
        if not last:
            asyncio.get_running_loop().call_soon(self.step, request, i + 1)

    def text(
        self,
        request: TokenizeReq | GenerateReq,
        text: str,
        token_ids: list[int],
        finish: FinishType | None = None,
        matched: int | str | None = None,
    ) -> ReqText:
        """Return one item as the detokenizer would send it."""
        logprobs = prompt_logprobs = prompt = None
        if request.logprobs is not None:
            top = [(90 + k, -1.5 - k, b"t%d" % k) for k in range(request.logprobs.top_num)]
            logprobs = [NamedLogprob(t, -0.5, b"w%d " % t, 3, top) for t in token_ids]
            if request.logprobs.start_len >= 0:
                prompt_logprobs = [NamedLogprob(50, None, b"p0 ", 3), NamedLogprob(51, -2.0, b"p1 ", 3, top)]
        if request.rid not in self._begun and (request.return_prompt or prompt_logprobs):
            prompt = PromptText("p0 p1 ", [50, 51], prompt_logprobs)
        if request.readout.kind != "none" and finish in (FinishType.LENGTH, FinishType.STOP):
            prompt = PromptText("", [], None, self.vector(request).tobytes())
        self._begun.add(request.rid)
        meta = None
        if finish is not None:
            here = self.client.role
            phases = [PhaseTime(Phase.QUEUE, here, 1.23456)]
            timing = Timing(queue_ms=1.23456, first_token_ms=1.23456, transfer_bytes=4096, here=here, phases=phases)
            legs = {"prefill": "outgoing", "decode": "incoming"}
            route = legs.get(self.client.role, "local") if request.bootstrap is not None else "local"
            meta = ReqMeta(PROMPT_TOKENS, 0, CACHED_TOKENS, timing, route=route)
        reason = None if finish is None else FinishReason(finish, matched)
        return ReqText(request.rid, text, token_ids, reason, meta, logprobs, prompt)

    def vector(self, request: TokenizeReq | GenerateReq) -> np.ndarray:
        """Return the readout of a request: one of ``vectors``, in their order, or minus each label, else 3 and 4."""
        if self.vectors:
            return np.array(self.vectors.pop(0), "<f4")
        labels = request.readout.labels
        return np.array([-float(label) for label in labels] if labels else [3.0, 4.0], "<f4")

    def _answer(self, question: Message) -> None:
        if isinstance(question, Ping):
            self._soon(msgspec.structs.replace(self.pong, id=question.id))
        elif isinstance(question, FlushCacheReq):
            self._soon(msgspec.structs.replace(self.flush_result, id=question.id))
        elif isinstance(question, ServerInfoReq):
            self._soon(ServerInfo({"role": "unified", "pool": {"in_use": 0}}, id=question.id))
        elif isinstance(question, SnapshotReq):
            self._soon(msgspec.structs.replace(self.snapshot, id=question.id))
        elif isinstance(question, KVHashesReq):
            self._soon(msgspec.structs.replace(self.kv_hashes, id=question.id))
        elif isinstance(question, StartProfileReq | StopProfileReq):
            self._soon(ProfileResult("", [], [], 0, 0.0, ended_by="request", id=question.id))
        elif isinstance(question, TransfersReq):
            self._soon(Transfers(len(self.transfers), self.transfers, id=question.id))
        elif isinstance(question, LimitsReq):
            self._soon(Limits(CONTEXT_LENGTH, VOCAB_SIZE, id=question.id))
        elif isinstance(question, EncodeReq):
            chat = question.chat.messages if question.chat is not None else []
            texts = question.texts if question.texts is not None else [" ".join(m.content for m in chat)]
            if self.errors:
                refusal = self.errors.pop(0)
                self._soon(Encoded(error=refusal.message, field=refusal.field, code=refusal.code, id=question.id))
                return
            if "bad" in texts:
                self._soon(Encoded(error="not encodable", field="text", id=question.id))
                return
            words = [text.split() for text in texts]
            ids = [[len(word) for word in text] for text in words]
            rendered = texts[0] if question.returns_rendered else None
            self._soon(Encoded(ids, words if question.pieces else None, rendered=rendered, id=question.id))
        elif isinstance(question, DecodeReq):
            self._soon(Decoded([" ".join("x" * i for i in ids) for ids in question.token_ids], id=question.id))

    def _soon(self, message: Any) -> None:
        asyncio.get_running_loop().call_soon(self.client.dispatch, [message])

    def http(self, **headers: str | bytes) -> httpx.AsyncClient:
        """Return a client of the app, without sockets. An error that the app doesn't handle is raised here.

        Without headers of its own it shows the admin key if that is needed.
        """
        transport, auth = httpx.ASGITransport(app=self.app), None if headers else as_admin()
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers, auth=auth)

    async def post(self, path: str, body: Any) -> httpx.Response:
        """POST ``body`` as JSON."""
        async with self.http() as client:
            return await client.post(path, content=orjson.dumps(body))

    async def get(self, path: str) -> httpx.Response:
        """GET ``path``."""
        async with self.http() as client:
            return await client.get(path)


def with_engine(check: Callable[[FakeEngine], Awaitable[T]], **options: Any) -> T:
    """Run ``check`` on a fresh engine and event loop."""

    async def run() -> T:
        return await check(FakeEngine(**options))

    return asyncio.run(run())


def events(response: httpx.Response) -> list[Any]:
    """Return the JSON of a stream's events, without ``[DONE]``, which must be the last."""
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    assert all(part.startswith("data: ") for part in parts[:-1])
    return [orjson.loads(part.removeprefix("data: ")) for part in parts[:-2]]
