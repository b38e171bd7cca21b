"""Access: which requests need a key, and which keys may use a path."""

from __future__ import annotations

import asyncio
import hmac
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...messages.error_codes import OVERLOADED
from ..cluster_secret import TooManySignatures
from .access_log import AccessRecord
from .cluster_auth import OPEN_SERVER, PROOF_HEADER, PROOF_PATH, OpenServer, body_hash
from .keys import ADMIN, ANYBODY, KEY_NAME_HEADER, SCOPE_KEY, Caller, Keys
from .path_guard import error_answer
from .paths import Access, PathTable

SIGNED = "pdserve.signed"
"""Where a request's scope says that it is signed."""
KEY_HEADERS = (b"authorization", b"x-api-key")
NO_KEY = 'this server needs a key; send the header "Authorization: Bearer KEY"'
NO_ADMIN = "this key may not use this path, which shows or changes what is others': it needs the --admin-key-file's"
NO_ADMIN_KEY = (
    'this needs the admin\'s key: send the header "Authorization: Bearer KEY" with the key of --admin-key-file, or of '
    "the file that the server's log names at its start"
)


class ApiKeyAuth:
    """ASGI middleware that refuses requests without a key for their path.

    A request that passes has its ``Caller`` in the scope. A path that is not in ``table`` passes with any key: the
    application behind must not serve it (``PathGuard``). ``metrics_are_open`` is ``--metrics-without-key``.

    A router (``is_router``) adds the caller's name to the requests that it passes on. It replaces the client's key by
    the admin key, if there is one. With ``signs`` it sends no key, because it signs its requests. ``cluster`` checks
    signed requests and answers challenges with a proof, if the cluster has a secret.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        table: PathTable,
        *,
        metrics_are_open: bool = False,
        is_router: bool = False,
        signs: bool = False,
        cluster: OpenServer = OPEN_SERVER,
    ) -> None:
        self._app = app
        self._keys = keys
        self._table = table
        self._open = {Access.OPEN, Access.METRICS} if metrics_are_open else {Access.OPEN}
        self._is_router = is_router
        self._signs = signs
        self._cluster = cluster
        self._namer = ThreadPoolExecutor(1, thread_name_prefix="key names")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that its key permits. Others get 401 or 403 before anything of the body is read.

        Raises ``NotImplementedError`` for a protocol that nothing here checks, so that adding an endpoint of one can't
        bypass the keys.
        """
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise NotImplementedError(f"no access rules for {scope['type']!r}")
        send = self._proving(scope, send)
        facts = self._table.find(scope["path"], scope["method"])
        caller = await self._caller(scope["headers"])
        if (signature := self._cluster.signature(scope["headers"])) is not None:
            try:
                signed = self._cluster.check(
                    signature,
                    scope["method"],
                    _target(scope),
                    scope["headers"],
                    time.time(),
                    only_reads=facts is not None and facts.only_reads,
                )
            except TooManySignatures as e:
                await error_answer(scope, 503, str(e), OVERLOADED)(scope, receive, send)
                return
            if isinstance(signed, str):
                await error_answer(scope, 401, signed)(scope, receive, send)
                return
            receive = _with_digest(receive, signed.digest)
            scope[SIGNED] = True
            if signed.caller:
                caller = self._named(signed.caller.decode("ascii", "replace"))
        access = facts.access if facts is not None else Access.USER
        if caller is None:
            if access not in self._open:
                await error_answer(scope, 401, NO_KEY)(scope, receive, send)
                return
            caller = ANYBODY
        elif self._needs_admin(access, scope["headers"]) and not caller.is_admin:
            AccessRecord.of(scope).is_known = bool(caller.name)
            refusal = error_answer(scope, 403, NO_ADMIN) if caller.name else error_answer(scope, 401, NO_ADMIN_KEY)
            await refusal(scope, receive, send)
            return
        else:
            AccessRecord.of(scope).is_known = True
        if caller.name:
            AccessRecord.of(scope).details["key"] = caller.name
        scope[SCOPE_KEY] = caller
        scope["headers"] = self._headers(scope["headers"], caller)
        await self._app(scope, receive, send)

    async def _caller(self, headers: list[tuple[bytes, bytes]]) -> Caller | None:
        routers_sign = self._cluster.requires_signatures
        if self._keys.takes_long(headers):
            # In a thread, since the event loop has streams to serve. One at a time, since each takes 16 MiB.
            find = partial(self._keys.caller, headers, routers_sign=routers_sign)
            return await asyncio.get_running_loop().run_in_executor(self._namer, find)
        return self._keys.caller(headers, routers_sign=routers_sign)

    def _needs_admin(self, access: Access, headers: list[tuple[bytes, bytes]]) -> bool:
        """Return whether a request needs the admin key of this server. ``access``: what its path is for.

        A router without keys of its own leaves the client's key to the instances. There, only a request for admins
        without any key needs it here, since every instance would refuse that.
        """
        if access is Access.ROUTER_ADMIN:
            return True
        if self._is_router and not self._keys:
            return access is Access.ADMIN and not any(name in KEY_HEADERS for name, _ in headers)
        return access is Access.ADMIN or (access is Access.CACHE and bool(self._keys))

    def _proving(self, scope: Scope, send: Send) -> Send:
        if scope["path"] != PROOF_PATH:
            return send
        proof = self._cluster.proof(scope["headers"])
        return send if proof is None else _with_header(send, (PROOF_HEADER, proof))

    def _named(self, name: str) -> Caller:
        """Return the caller for the key name in a request that a router has signed. The router has checked the key."""
        return Caller(ADMIN, is_admin=True) if name == ADMIN else Caller(name, is_admin=False)

    def _headers(self, headers: list[tuple[bytes, bytes]], caller: Caller) -> list[tuple[bytes, bytes]]:
        """Return the request's headers for the application: without a key's name that the client has set itself.

        An instance changes nothing else. A router with keys adds the name of every caller but the admin. It replaces
        the client's key by the admin key. A router that signs its requests leaves out the key instead, and names the
        admin, too.
        """
        headers = [header for header in headers if header[0] != KEY_NAME_HEADER]
        if not self._is_router:
            return headers
        if self._keys and not caller.is_admin:
            headers.append((KEY_NAME_HEADER, caller.name.encode()))
        if self._signs:
            # A router that was given no keys leaves it to the instances, but for the admin key that it drew.
            if self._keys or caller.is_admin:
                headers = [header for header in headers if header[0] not in KEY_HEADERS]
                if caller.is_admin:
                    headers.append((KEY_NAME_HEADER, ADMIN.encode()))
        elif self._keys.admin is not None:
            headers = [header for header in headers if header[0] not in KEY_HEADERS]
            headers.append((b"authorization", b"Bearer " + self._keys.admin.encode()))
        return headers


def is_signed(scope: Scope) -> bool:
    """Return whether a router or an instance of this cluster has signed the request, its body included."""
    return SIGNED in scope


def _target(scope: Scope) -> bytes:
    """Return the path and query of the request as they were sent, undecoded."""
    path: bytes = scope["raw_path"]
    return path + b"?" + scope["query_string"] if scope["query_string"] else path


def _with_header(send: Send, header: tuple[bytes, bytes]) -> Send:
    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), header]}
        await send(message)

    return send_more


def _with_digest(receive: Receive, digest: bytes) -> Receive:
    """Make a ``receive`` that compares the body with its signed ``digest``.

    If they differ, the client seems to disconnect before the last part of the body.
    """
    seen = body_hash()

    async def receive_checked() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            seen.update(message.get("body", b""))
            if not message.get("more_body", False) and not hmac.compare_digest(seen.digest(), digest):
                return {"type": "http.disconnect"}
        return message

    return receive_checked
