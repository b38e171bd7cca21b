"""The router's HTTP endpoints. Some pass a request on to one pair or worker, some to every instance, some to none."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, NamedTuple
from urllib.parse import quote

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from ..runtime.web.access_log import AccessRecord, error_shape, stream_format
from ..runtime.web.apis import NATIVE, OLLAMA_RUNS
from ..runtime.web.client.client import HttpClient
from ..runtime.web.client.errors import BadAnswer, ClientError
from ..runtime.web.errors import error_body, without_frames
from ..runtime.web.json_response import json_response
from ..runtime.web.keys import Caller
from .client_answer import ClientAnswer, ReadyAnswer
from .client_bodies import ClientBodies
from .dispatcher import Dispatcher
from .errors import SUCCESS, InstanceSilentError, NoInstanceError, RouterError
from .facts import Facts
from .fleet import Fleet
from .headers import Headers, passed_back, passed_on, without_type
from .instance import HealthState, Instance
from .membership import MemberState
from .options import RouterOptions
from .routed_request import RoutedRequest
from .tasks import drop

QUESTION_TIMEOUT = 7.5
"""Seconds that an instance may take to answer most questions. An instance itself gives up after 5 s with a reason."""
TEXT_TIMEOUT = 65.0
"""Seconds for ``/tokenize``, ``/v1/models`` and the like. An instance itself gives up after 30 s, twice at most."""
NOT_ALLOWED = (401, 403)
"""Statuses of an instance's answer to a client without the key for a question."""
READS = ("GET", "HEAD")
"""Methods of questions for which no drain waits. They may be polls, and change nothing."""
WRITTEN_LEVELS = 200
"""Levels of nested JSON that orjson certainly writes, even inside an answer of the router's own. It reads 1,024."""
HEALTH_PROMPT = {"text": "Hi", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}


class ControlAnswer(NamedTuple):
    """An instance's answer to a question."""

    instance: Instance
    status: int
    """HTTP status; 0: no answer."""
    body: Any
    headers: Headers = ()
    is_late: bool = False
    """Whether there is no answer because the time ran out."""

    @property
    def ok(self) -> bool:
        """Whether the answer is a success."""
        return 200 <= self.status < 300

    def count(self, name: str) -> int:
        """Return the integer of field ``name`` in the answer's JSON, 0 if there is none."""
        value = self.body.get(name) if isinstance(self.body, dict) else None
        return value if isinstance(value, int) else 0

    def entries(self, name: str) -> list[dict[str, Any]]:
        """Return the objects in the list of field ``name`` in the answer's JSON, an empty list if there is none."""
        values = self.body.get(name) if isinstance(self.body, dict) else None
        return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []

    def report(self) -> dict[str, Any]:
        """Return the answer with its instance's URL and its status, ready for JSON."""
        return {"url": self.instance.url, "status": self.status, "answer": self.body}


class GenerationEndpoint:
    """An ASGI endpoint for requests that a pair or a worker serves.

    It is bare ASGI on purpose. Chunks go from the instance's connection to the client's without a response object. The
    router also notices at any moment that the client has left, even before the first byte.
    """

    def __init__(
        self, dispatcher: Dispatcher, bodies: ClientBodies, fixed_body: bytes | None = None, *, has_keys: bool = False
    ) -> None:
        """Serve ``fixed_body`` instead of the client's, if given. ``has_keys``: whether the router checks keys."""
        self._dispatcher = dispatcher
        self._bodies = bodies
        self._has_keys = has_keys
        self._fixed_body = fixed_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = ClientAnswer if self._fixed_body is None else ReadyAnswer
        answer = kind(send, error_shape(scope), stream_format(scope))
        try:
            raw = await self._bodies.read(Request(scope, receive))
            with self._bodies.hold(len(raw), Caller.of(scope).name):
                request = await self._request(scope, raw)
                del raw  # a request that had bootstrap fields has bytes of its own
                await self._serve(request, answer, receive)
        except RouterError as exc:
            await answer.fail(without_frames(exc))
        except ClientDisconnect:
            return

    async def _request(self, scope: Scope, raw: bytes) -> RoutedRequest:
        record, headers = AccessRecord.of(scope), passed_on(scope["headers"])
        if self._fixed_body is not None:
            body = await self._bodies.parse(self._fixed_body, record.request_id)
            return RoutedRequest(NATIVE.path, headers, Facts(body), is_probe=True)
        body = await self._bodies.parse(raw, record.request_id, record.facts)
        facts = Facts(body, scope["headers"], Caller.of(scope).name, is_checked=self._has_keys)
        return RoutedRequest(scope["path"], headers, facts, record.stream_format)

    async def _serve(self, request: RoutedRequest, answer: ClientAnswer, receive: Receive) -> None:
        work = asyncio.create_task(self._dispatcher.serve(request, answer))
        left = asyncio.create_task(until_disconnect(receive))
        try:
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
            # The server also reports a disconnect once the answer is complete. Then only cleaning up is left.
            if work.done() or answer.finished:
                await work
        finally:
            await drop(work, left)


class ControlEndpoints:
    """Endpoints that the router answers itself, or after asking every instance."""

    def __init__(self, fleet: Fleet, client: HttpClient, bodies: ClientBodies, options: RouterOptions) -> None:
        self._fleet = fleet
        self._client = client
        self._bodies = bodies
        self._options = options

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while a pair or a worker can serve. Raises ``NoInstanceError`` otherwise."""
        if self._fleet.can_serve():
            return json_response({"status": "ready"})
        raise NoInstanceError(self._fleet.shortage("no healthy prefill-decode pair and no healthy worker"))

    async def livez(self, request: Request) -> Response:
        """GET /livez: 200 while the router answers at all."""
        return json_response({"status": "alive"})

    async def running(self, request: Request) -> Response:
        """GET /: answer that the router runs, in the words that Ollama's clients look for."""
        return PlainTextResponse(OLLAMA_RUNS)

    async def ask_one(self, request: Request) -> Response:
        """Answer /v1/models, /tokenize and similar with one healthy instance's answer: all serve the same model.

        Workers are asked first, then decodes, then prefills, and cordoned ones last. The next one is asked only if an
        instance can't be reached or is taken out meanwhile. Raises ``NoInstanceError``, and ``InstanceSilentError`` if
        one takes too long.
        """
        body = await self._bodies.read(request) if request.method == "POST" else b""
        key = Caller.of(request.scope).name
        with contextlib.ExitStack() as held:
            held.enter_context(self._bodies.hold(len(body), key))
            response = await self._ask_one(request, body)
            # The client may read it slowly.
            held.enter_context(self._bodies.hold(len(response.body), key))
            return HeldResponse(response, held.pop_all())

    async def _ask_one(self, request: Request, body: bytes) -> Response:
        for instance in self._fleet.answer_order():
            answer = await self._ask_while_up(instance, request, body)
            if answer is not None and answer.status:
                return answer_of(answer)
            if answer is not None and answer.is_late:
                # The same question would take as long at the next one.
                raise InstanceSilentError(answer.body)
        raise NoInstanceError(self._fleet.shortage("no instance is healthy"))

    async def _ask_while_up(self, instance: Instance, request: Request, body: bytes) -> ControlAnswer | None:
        """Pass the client's request on to ``instance``, and return the answer; see ``ask``.

        Return None if health checks find the instance down before it answers.
        """
        asking = asyncio.create_task(self.ask(instance, request, body, seconds=TEXT_TIMEOUT))
        try:
            while not asking.done() and instance.state is not HealthState.UNHEALTHY:
                changed = asyncio.create_task(self._fleet.wait_change())
                await asyncio.wait((asking, changed), return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
            return asking.result() if asking.done() else None
        finally:
            asking.cancel()

    async def server_info(self, request: Request) -> Response:
        """GET /server_info: the router's view of every instance, and each instance's own."""
        answers = await self.ask_all(request)
        instances = [{**answer.instance.summary(), "info" if answer.ok else "error": answer.body} for answer in answers]
        options = self._options
        router = {"policy": options.policy, "can_serve": self._fleet.can_serve(), "retries": options.retries}
        return json_response({"role": "router", "router": router, "instances": instances})

    async def transfers(self, request: Request) -> Response:
        """GET /transfers: the hand-overs of all instances that answer.

        If none does, pass on the first 401 or 403, or raise ``NoInstanceError``.
        """
        asked = await self.ask_all(request)
        answers = [answer for answer in asked if answer.ok and isinstance(answer.body, dict)]
        if not answers:
            for answer in asked:
                if answer.status in NOT_ALLOWED:
                    return answer_of(answer)
            raise NoInstanceError("no instance tells of its hand-overs")
        rooms = [room | {"instance": answer.instance.url} for answer in answers for room in answer.entries("transfers")]
        return json_response({"open": sum(answer.count("open") for answer in answers), "transfers": rooms})

    async def abort_request(self, request: Request) -> Response:
        """POST /abort_request: abort at all instances that answer health checks, draining ones included.

        A request of a pair runs on both of its legs and counts once. If an instance refuses, the answer is the first
        refusal; the others have aborted all the same.
        """
        answers = await self.ask_all(request, await self._bodies.read(request))
        if refused := refusal(answers):
            return refused
        # A prefill serves whole requests as well. Legs are requests that another instance answers.
        aborted = sum(answer.count("aborted") - answer.count("legs") for answer in answers)
        return json_response({"aborted": aborted, "instances": [answer.report() for answer in answers]})

    async def flush_cache(self, request: Request) -> Response:
        """POST /flush_cache: flush the caches of all instances that answer health checks, draining ones included.

        If an instance refuses, the answer is the first refusal; the others have flushed all the same.
        """
        answers = await self.ask_all(request)
        if refused := refusal(answers):
            return refused
        flushed = sum(answer.count("flushed") for answer in answers)
        return json_response(
            {"success": True, "flushed": flushed, "instances": [answer.report() for answer in answers]}
        )

    async def ask_all(self, request: Request, body: bytes = b"") -> list[ControlAnswer]:
        """Pass the client's request on to all instances at once, and return their answers in the order of the fleet.

        Never raises: an instance that gave no answer has one with status 0 and the reason.
        """
        return await asyncio.gather(*(self.ask(i, request, body) for i in self._fleet.instances))

    async def ask(
        self,
        instance: Instance,
        request: Request,
        body: bytes = b"",
        *,
        seconds: float = QUESTION_TIMEOUT,
        query: str = "",
    ) -> ControlAnswer:
        """Pass the client's request on to ``instance``, and return its answer.

        Never raises. Status 0 means no answer, and 502 one that can't be passed on; the body has the reason. An
        instance that is down, hangs or was removed is not asked. One that can't be reached is reported to the fleet.
        ``seconds`` limits the time. ``query`` is appended to the path, with its question mark.
        """
        if instance.withheld is MemberState.GONE:  # since the caller listed the instances
            return ControlAnswer(instance, 0, f"{instance} was removed from this router")
        if instance.state is HealthState.UNHEALTHY and not instance.answers_questions:
            return ControlAnswer(instance, 0, instance.reason)
        scope = request.scope
        # The server leaves out the body of an answer to HEAD by itself.
        method = "GET" if request.method == "HEAD" else request.method
        counted = 0 if request.method in READS else 1
        instance.asked += counted
        try:
            async with asyncio.timeout(seconds):
                path, headers = quote(scope["path"]) + query, passed_on(scope["headers"])
                answer = await self._client.fetch(method, instance.url, path, body, headers)
        except TimeoutError:
            return ControlAnswer(instance, 0, f"no answer within {seconds:g} s", is_late=True)
        except BadAnswer as exc:
            # It answers, so it is alive, but the answer is useless.
            return ControlAnswer(instance, 502, error_body(502, f"{instance} answered what can't be passed on: {exc}"))
        except ClientError as exc:
            self._fleet.report_failure(instance, f"can't be reached ({exc})")
            return ControlAnswer(instance, 0, instance.reason)
        finally:
            instance.asked -= counted
        if answer.status not in SUCCESS and answer.status < 400:
            text = f"{instance} answered with status {answer.status}, which answers no question"
            return ControlAnswer(instance, 502, error_body(502, text))
        return ControlAnswer(instance, answer.status, content_of(answer.body), passed_back(answer.headers))


def content_of(body: bytes) -> Any:
    """Return the content of a response's ``body``: JSON that can be written again, or else its text; None if empty."""
    try:
        content = orjson.loads(body) if body else None
        # orjson reads more levels than it writes. A body with fewer brackets cannot have too many.
        if body.count(b"[") + body.count(b"{") > WRITTEN_LEVELS:
            orjson.dumps(content)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return body.decode(errors="replace")
    return content


async def until_disconnect(receive: Receive) -> None:
    """Wait until the client has left, or its answer is complete. Messages with parts of the request are dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass


def refusal(answers: list[ControlAnswer]) -> Response | None:
    """Return the response with the first refusal of a control request, such as a flush; None if none refused.

    ``answers``: those of all instances. One that gave no answer has not refused. Raises ``NoInstanceError`` if none
    gave an answer.
    """
    reached = [answer for answer in answers if answer.status]
    if not reached:
        raise NoInstanceError("no instance can be reached")
    for answer in reached:
        if not answer.ok:
            return answer_of(answer)
    return None


class HeldResponse(Response):
    """A response that counts as held until it is sent: then ``held`` is closed."""

    def __init__(self, response: Response, held: contextlib.ExitStack) -> None:
        self._response = response
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await self._response(scope, receive, send)


def answer_of(answer: ControlAnswer) -> Response:
    """Make the response to the client from an instance's answer: its status, its content as JSON, its other headers."""
    response = json_response(answer.body, answer.status)
    response.raw_headers.extend(without_type(answer.headers))
    return response
