"""A whole instance in one event loop: the real HTTP app, tokenizer, scheduler and detokenizer over a simulated worker.

What the processes would say to each other is encoded and decoded on the way, as their channels do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from pdserve.detokenizer.detokenizer import Detokenizer
from pdserve.detokenizer.process import deliver as deliver_out
from pdserve.detokenizer.process import route as route_out
from pdserve.detokenizer.request_decoder import make_decoder_factory
from pdserve.messages.base import Message
from pdserve.messages.channel import IPC_FRAME_BYTES, encode
from pdserve.messages.decode import Codec
from pdserve.messages.outputs import TextBatch
from pdserve.messages.requests import AbortReq, ForkedReq, GenerateReq, StopReq
from pdserve.messages.routes import ToDetokenizer, ToHttp, ToScheduler
from pdserve.model_files.model_limits import ModelLimits
from pdserve.model_files.text.byte_table import ByteTable
from pdserve.model_files.text.text_tokenizer import TextTokenizer
from pdserve.server.http.app import make_app
from pdserve.server.http.engine.engine_client import EngineClient
from pdserve.server.prompt_encoder import MissingTemplate
from pdserve.server.request_tokenizer import RequestTokenizer
from pdserve.server.tokenizer_process import deliver as deliver_in
from pdserve.server.tokenizer_process import route as route_in
from support.answer_keys import AnyAnswerKey
from support.machine import limit
from support.rendering import rendered
from support.sim import VOCAB, Sent, SimInstance, make_options

CONTEXT = 512
# Printable characters, and the two halves of "é": a character that no single token completes.
PIECES = [*(bytes([32 + i]) for i in range(VOCAB - 2)), b"\xc3", b"\xa9"]
LOOP_TURNS = 20
"""Turns of the event loop for each of the instance: enough for the app to send an event before the next token."""


class SimTokenizer(TextTokenizer):
    """One token for each byte that has one."""

    def __init__(self) -> None:
        super().__init__((), {}, None)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """See ``TextTokenizer``."""
        return [[PIECES.index(bytes([byte])) for byte in text.encode()] for text in texts]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See ``TextTokenizer``."""
        return b"".join(PIECES[i] for i in token_ids).decode(errors="replace")

    def is_left_out(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """See ``TextTokenizer``."""
        return False

    @property
    def byte_table(self) -> ByteTable:
        """See ``TextTokenizer``."""
        return ByteTable(PIECES, frozenset(), strip_first_space=False)

    @property
    def max_token_bytes(self) -> int:
        """See ``TextTokenizer``."""
        return 1


class SimRing(SimInstance):
    """See the module. ``texts`` counts what the detokenizer sent to HTTP for requests."""

    def __init__(self, **options: Any) -> None:
        super().__init__(make_options(**options))
        tokenizer = SimTokenizer()
        self.tokenizer = RequestTokenizer(tokenizer, MissingTemplate(), ModelLimits(CONTEXT, VOCAB))
        self.detokenizer = Detokenizer(make_decoder_factory(tokenizer))
        self.client = EngineClient(self, Sent(), answer_keys=AnyAnswerKey())
        self.app = make_app(self.options, self.client, epoch="ring")
        self.texts = 0
        self.limits = {"tokenizer": Sent(), "scheduler": Sent(), "detokenizer": self.to_detokenizer, "http": Sent()}
        """The sending ends, by receiver. A message that they refuse ends as it does in an instance."""
        self._to_scheduler: Codec[Any] = Codec(ToScheduler, IPC_FRAME_BYTES)
        self._to_detokenizer: Codec[Any] = Codec(ToDetokenizer, IPC_FRAME_BYTES)
        self._to_http: Codec[Any] = Codec(ToHttp, IPC_FRAME_BYTES)

    def send(self, *messages: Message) -> None:
        """Send messages from HTTP through the tokenizer."""
        self.limits["tokenizer"].send(*messages)
        scheduler, http = self.limits["scheduler"], self.limits["http"]
        deliver_in(route_in(self.tokenizer, list(messages), rendered(self.tokenizer, messages)), scheduler, http)
        self._answer()
        sent = list(scheduler.messages)
        scheduler.messages.clear()
        for message in self._to_scheduler.decode(encode(sent)):
            if isinstance(message, GenerateReq | ForkedReq):
                for request in message.requests() if isinstance(message, ForkedReq) else [message]:
                    self.scheduler.arrivals.admit(request, self.now)
            elif isinstance(message, StopReq):
                self.scheduler.stop(message)
            else:
                assert isinstance(message, AbortReq)
                self.scheduler.abort(message)

    def _read(self) -> None:
        messages = self._to_detokenizer.decode(encode(list(self.to_detokenizer.messages)))
        super()._read()
        stops = Sent()
        deliver_out(self.detokenizer, route_out(self.detokenizer, messages), stops, self.limits["http"])
        for stop in stops.messages:
            assert isinstance(stop, StopReq)
            self.scheduler.stop(stop)
        self._answer()

    def _answer(self) -> None:
        sent = list(self.limits["http"].messages)
        self.limits["http"].messages.clear()
        answers = self._to_http.decode(encode(sent))
        self.texts += sum(len(m.items) for m in answers if isinstance(m, TextBatch))
        if answers:
            # As over a channel: no answer comes before the request's own turn has ended.
            asyncio.get_running_loop().call_soon(self.client.dispatch, answers)

    async def _drive(self) -> None:
        while True:
            self.plan()
            self.work()
            for _ in range(LOOP_TURNS):
                await asyncio.sleep(0)

    def post(self, *bodies: dict[str, Any], path: str = "/generate") -> list[httpx.Response]:
        """Return the answers to ``bodies``, sent together, on a fresh event loop."""

        async def run() -> list[httpx.Response]:
            driver = asyncio.create_task(self._drive())
            transport = httpx.ASGITransport(app=self.app)
            try:
                async with (
                    httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
                    asyncio.timeout(limit(60)),
                ):
                    return list(await asyncio.gather(*(client.post(path, json=body) for body in bodies)))
            finally:
                driver.cancel()

        return asyncio.run(run())
