"""``/workers``: the instances of a router, for admins. The name is that of SGLang's router; all roles are meant."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..runtime.web.json_response import json_response
from .client_bodies import ClientBodies
from .errors import BadRequestError, BodyTooLargeError
from .instance import Instance, Role
from .members import Members
from .membership import MemberState, Source
from .new_member import NewMember, checked_url

T = TypeVar("T")

MAX_BODY_BYTES = 8 << 10
STATES = (MemberState.READY, MemberState.CORDONED)
"""States that a ``PATCH`` can set."""


class WorkerChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``PATCH /workers``."""

    state: str


class WorkerEndpoints:
    """Endpoints ``/workers``. A query ``url=…`` names the instance that is changed or removed."""

    def __init__(self, members: Members, bodies: ClientBodies) -> None:
        self._members = members
        self._bodies = bodies

    async def listed(self, request: Request) -> Response:
        """GET /workers: list the instances, in the order in which they were added."""
        _query(request)
        return json_response({"workers": [described(instance) for instance in self._members.all()]})

    async def add(self, request: Request) -> Response:
        """POST /workers: add an instance, and answer 201 at once. It gets requests when a health check has passed."""
        _query(request)
        body = await self._read(request, NewMember)
        try:
            place = body.place()
        except ValueError as exc:
            raise BadRequestError(str(exc)) from None
        added = self._members.add(*place, Source.API)
        return json_response(described(added), 201)

    async def change(self, request: Request) -> Response:
        """PATCH /workers?url=URL: cordon an instance, or send it requests again, and answer with its new state."""
        url = _url(_query(request, "url"))
        state = (await self._read(request, WorkerChange)).state
        if state not in STATES:
            raise BadRequestError(f"state: is none of {', '.join(STATES)}: {state[:60]!r}")
        instances = self._members.find(url)  # after the body has come, which may take a while
        for instance in instances:
            if state == MemberState.READY:
                self._members.readmit(instance)
            else:
                self._members.cordon(instance)
        return json_response(described(instances[0]))

    async def remove(self, request: Request) -> Response:
        """DELETE /workers?url=URL: drain an instance and remove it then, or at once with ``drain=false``.

        Answers 200 if it is gone, 202 if it drains.
        """
        query = _query(request, "url", "drain")
        drain = query.get("drain", "true")
        if drain not in ("true", "false"):
            raise BadRequestError("drain: is true or false")
        instances = self._members.find(_url(query))
        for instance in instances:
            if drain == "true":
                self._members.drain(instance)
            else:
                self._members.remove(instance)
        is_gone = all(instance.member_state is MemberState.GONE for instance in instances)
        return json_response(described(instances[0]), 200 if is_gone else 202)

    async def _read(self, request: Request, kind: type[T]) -> T:
        raw = await self._bodies.read(request)
        if len(raw) > MAX_BODY_BYTES:
            raise BodyTooLargeError(f"the body has {len(raw)} bytes, the limit here is {MAX_BODY_BYTES}")
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.ValidationError as exc:
            raise BadRequestError(f"the body does not fit: {exc}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise BadRequestError(f"the body is not valid JSON: {exc}") from None


def described(instance: Instance) -> dict[str, Any]:
    """Describe a member for an answer, ready for JSON."""
    return {
        "url": instance.url,
        "role": instance.role,
        "bootstrap_port": instance.bootstrap_address[1] if instance.role is Role.PREFILL else None,
        "state": instance.member_state,
        "health": instance.state,
        "reason": instance.reason,
        "in_flight": instance.under_way,
        "epoch": instance.report.epoch or None,
        "source": instance.source,
    }


def _query(request: Request, *names: str) -> dict[str, str]:
    """Return the query's parameters. Raises ``BadRequestError`` for others than ``names``, and for repeated ones."""
    given = request.query_params.multi_items()
    for name, _ in given:
        if name not in names:
            wanted = f"; there is {' and '.join(names)}" if names else ""
            raise BadRequestError(f"{name[:60]}: there is no such parameter{wanted}")
    found = dict(given)
    if len(found) < len(given):
        raise BadRequestError("a parameter of the query is given twice")
    return found


def _url(query: dict[str, str]) -> str:
    if "url" not in query:
        raise BadRequestError("url: name an instance by its URL, as in /workers?url=http://127.0.0.1:30000")
    try:
        return checked_url(query["url"])
    except ValueError as exc:
        raise BadRequestError(str(exc)) from None
