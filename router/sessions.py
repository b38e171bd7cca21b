"""Sessions over the router, which finds the instance that has a session by asking one after the other.

Instances that share a folder and a store have all sessions. Otherwise each has its own. A request is saved by the
instance that answers it. The router refuses to restore an answer as a stream.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..runtime.web.access_log import CLIENT_GONE
from ..runtime.web.json_response import json_response
from ..runtime.web.keys import Caller
from .client_bodies import ClientBodies
from .endpoints import ControlAnswer, ControlEndpoints, answer_of, until_disconnect
from .errors import BadRequestError, InstanceSilentError, NoInstanceError
from .fleet import Fleet
from .tasks import drop

SESSION_SECONDS = 600.0
"""Seconds that an instance may take to compute a prompt or the rest of an answer."""
ACTION = re.compile(r"action=(save|restore|erase)")
NOT_HERE = (404, 501)
"""Statuses of an instance that has no such session or request, or no sessions at all."""
ELSEWHERE = (*NOT_HERE, 409, 429, 502, 503)
"""Statuses after which another instance may have a better answer."""
NO_STREAM = (
    "stream: a restored answer comes whole over the router; leave it out, or ask an instance itself (GET /server_info "
    "has their addresses)"
)


class SessionEndpoints:
    """Endpoints ``/kv/…`` and ``/slots/…``."""

    def __init__(self, control: ControlEndpoints, fleet: Fleet, bodies: ClientBodies) -> None:
        self._control = control
        self._fleet = fleet
        self._bodies = bodies

    async def snapshot(self, request: Request) -> Response:
        """POST /kv/snapshot: save a request at the instance that answers it, or a prompt at the first that takes it."""
        return await self._first(request, await self._bodies.read(request))

    async def restore(self, request: Request) -> Response:
        """POST /kv/restore: restore a session at the first instance that has it.

        Raises ``BadRequestError`` if the rest of the answer is to be a stream.
        """
        body = await self._bodies.read(request)
        with self._bodies.hold(len(body), Caller.of(request.scope).name):
            streams = (await self._bodies.parse(body)).stream
        if streams:
            raise BadRequestError(NO_STREAM)
        return await self._first(request, body)

    async def slots(self, request: Request) -> Response:
        """POST /slots/{id}: save, restore or erase a session, as the action in the query says."""
        query = request.url.query
        if not ACTION.fullmatch(query):
            raise BadRequestError("action: is save, restore or erase: POST /slots/ID?action=save")
        body = await self._bodies.read(request)
        if query.endswith("erase"):
            return await self._everywhere(request, body, f"?{query}")
        return await self._first(request, body, f"?{query}")

    async def listed(self, request: Request) -> Response:
        """GET /kv/sessions: list the sessions of all instances, each once, with the instances that have it."""
        answers = [answer for answer in await self._control.ask_all(request) if answer.status]
        good = [answer for answer in answers if answer.ok and isinstance(answer.body, dict)]
        if not good:
            if not answers:
                raise NoInstanceError("no instance can be reached")
            return answer_of(answers[0])
        merged: dict[tuple[str, str], dict[str, Any]] = {}
        for answer in good:
            for session in answer.entries("sessions"):
                key = (str(session.get("owner", "")), str(session.get("name", "")))
                known = merged.setdefault(key, session | {"instances": []})
                known["instances"].append(answer.instance.url)
        return json_response({"sessions": [merged[key] for key in sorted(merged)]})

    async def delete(self, request: Request) -> Response:
        """DELETE /kv/sessions/{name}: delete a session on every instance that has it."""
        query = f"?{request.url.query}" if request.url.query else ""
        return await self._everywhere(request, b"", query)

    async def _everywhere(self, request: Request, body: bytes, query: str) -> Response:
        asked = (self._control.ask(instance, request, body, query=query) for instance in self._fleet.instances)
        answers = [answer for answer in await asyncio.gather(*asked) if answer.status]
        # Instances with one folder delete one file: the first of them has it.
        done = (
            [answer for answer in answers if answer.ok]
            or [answer for answer in answers if answer.status not in NOT_HERE]
            or answers
        )
        if not done:
            raise NoInstanceError("no instance can be reached")
        return answer_of(done[0])

    async def _first(self, request: Request, body: bytes, query: str = "") -> Response:
        """Ask healthy instances one after the other, and return the first answer with a status outside ``ELSEWHERE``.

        If there is none, return a refusal, best one of an instance that has the session or request. If the client
        leaves, return an empty response with status 499. Raises ``NoInstanceError`` and ``InstanceSilentError``.
        """
        work = asyncio.create_task(self._ask_in_turn(request, body, query))
        left = asyncio.create_task(until_disconnect(request.receive))
        try:
            with self._bodies.hold(len(body), Caller.of(request.scope).name):
                await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
            return await work if work.done() else Response(status_code=CLIENT_GONE)
        finally:
            work.cancel()
            await drop(left)

    async def _ask_in_turn(self, request: Request, body: bytes, query: str) -> Response:
        refused: ControlAnswer | None = None
        for instance in self._fleet.answer_order():
            answer = await self._control.ask(instance, request, body, seconds=SESSION_SECONDS, query=query)
            if answer.is_late:
                raise InstanceSilentError(answer.body)
            if answer.status and answer.status not in ELSEWHERE:
                return answer_of(answer)
            if answer.status and (refused is None or refused.status in NOT_HERE):
                refused = answer
        if refused is None:
            raise NoInstanceError(self._fleet.shortage("no instance is healthy"))
        return answer_of(refused)
