"""The admin key of servers that tests start, and clients that show it where it is needed."""

from __future__ import annotations

from collections.abc import Callable

import httpx

from pdserve.runtime.web.apis import PATHS
from pdserve.runtime.web.paths import Access

ADMIN_KEY = "the-admin-key-of-tests"
NEEDS_ADMIN = {
    *(facts.path for facts in PATHS if facts.access.is_admins or facts.access is Access.CACHE),
    *("/server_info", "/get_server_info", "/abort_request"),
}
"""Paths that do more for an admin, or nothing for others."""


def as_admin(key: str = ADMIN_KEY) -> Callable[[httpx.Request], httpx.Request]:
    """Return an ``auth`` for httpx that adds the admin key to requests for paths that need it, unless they
    show a key.
    """

    def add_key(request: httpx.Request) -> httpx.Request:
        if request.url.path in NEEDS_ADMIN and not {"authorization", "x-api-key"} & request.headers.keys():
            request.headers["authorization"] = f"Bearer {key}"
        return request

    return add_key
