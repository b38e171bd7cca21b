"""What every request passes before an endpoint reads it: the same at routers and instances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from starlette.types import ASGIApp

from ..cluster_secret import ClusterSecret
from .access_log import AccessCounts, AccessLog, AccessRecord
from .apis import path_table
from .auth import ApiKeyAuth
from .cluster_auth import OPEN_SERVER, ClusterServer
from .keys import KeyOptions, read_keys
from .origin_check import OriginOptions, check_origins
from .path_guard import PathGuard
from .paths import Server
from .proxies import TrustedProxies
from .request_limit import RequestLimit


class GuardOptions(KeyOptions, OriginOptions, Protocol):
    """The options of a server about access to it, and about its access log."""

    @property
    def max_concurrent_requests(self) -> int: ...
    @property
    def metrics_without_key(self) -> bool: ...
    @property
    def trusted_proxies(self) -> str | None: ...
    @property
    def disable_access_log(self) -> bool: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def cluster_secret_file(self) -> str | None: ...


def guard(
    app: ASGIApp,
    options: GuardOptions,
    server: Server,
    counts: AccessCounts,
    on_end: Callable[[AccessRecord, float], None] | None = None,
    epoch: str = "",
    own_admin_key: str | None = None,
) -> ASGIApp:
    """Return ``app`` behind the access log and every check that comes before a request is read.

    ``on_end`` is called after each request with its duration in seconds. ``epoch``: id of this start of an instance, ""
    for a router. ``own_admin_key``: admin key that the server drew at its start, which counts only if ``options`` have
    none. Raises ``KeyFileError``, ``ClusterSecretError``, and ``ValueError`` for an invalid address of a proxy.
    """
    is_router, secret = server is Server.ROUTER, None
    if not is_router:
        secret = ClusterSecret.read(options.cluster_secret_file)
    cluster = ClusterServer(secret, epoch, options.host, options.port) if secret is not None else OPEN_SERVER
    keys, table = read_keys(options), path_table(server)
    if own_admin_key is not None:
        keys = keys.with_own_admin(own_admin_key)
    limited = RequestLimit(app, table, options.max_concurrent_requests)
    checked = ApiKeyAuth(
        PathGuard(limited, table),
        keys,
        table,
        metrics_are_open=options.metrics_without_key,
        is_router=is_router,
        signs=is_router and options.cluster_secret_file is not None,
        cluster=cluster,
    )
    return AccessLog(
        check_origins(checked, options, table, has_keys=keys.has_users),
        table,
        counts,
        access_log=not options.disable_access_log,
        proxies=TrustedProxies(options.trusted_proxies),
        on_end=on_end,
    )
