"""Options of an HTTP port: where it listens, which clients may use it, and its limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..options import opt, section
from .proxies import TrustedProxies


@section("HTTP and access", order=20)
@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """Options of the HTTP port of an instance. A router's are the same, with texts of its own for a few."""

    host: str = opt(
        default="127.0.0.1",
        help="Address to listen on.",
        not_empty=True,
    )
    port: int = opt(default=30000, help="Port of the HTTP API; 0 takes a free one.")
    api_key: str | None = opt(
        default=None,
        help=(
            'API key that requests must send as "Authorization: Bearer KEY", except for /health. Other users of the '
            "host can read arguments: prefer the variable PDSERVE_API_KEY or --api-key-file."
        ),
        not_empty=True,
    )
    api_key_file: str | None = opt(
        default=None,
        help="File with one API key per line, or a name and a key. A key cannot abort requests of another key.",
    )
    admin_key_file: str | None = opt(
        default=None,
        help=(
            "File with the admin key, which may end or change this server, flush the cache, and abort every "
            "request. Without it, a single API key is also the admin key; without any key, one is drawn at start, "
            "and the log names its file."
        ),
    )
    no_keys: bool = opt(
        default=False,
        help="Do not ask for keys although --host is not a loopback address. Keys that are given are still required.",
    )
    cluster_secret_file: str | None = opt(
        default=None,
        help="File with the secret of this cluster, the same for all instances. Two lines while the secret changes.",
    )
    allowed_hosts: str | None = opt(
        default=None,
        help=(
            "Comma-separated names that clients may use in the Host header if the server listens on a loopback "
            "address without keys; * for any. Default: localhost and loopback addresses."
        ),
    )
    allowed_origins: str | None = opt(
        default=None,
        help=(
            "Comma-separated origins of web pages that may use this server from a browser, such as "
            "https://chat.example.org; * for any. Default: only its own."
        ),
    )
    trusted_proxies: str | None = opt(
        default=None,
        help=(
            "Comma-separated addresses and networks of reverse proxies with a trusted X-Forwarded-For, such as "
            "10.0.0.7,192.168.0.0/16. Used for logs only. Default: none."
        ),
    )
    send_timeout: float = opt(
        default=120.0,
        help=(
            "Seconds without progress after which a connection to a client that does not read is closed, and its "
            "request ended. Set it higher than the router's --send-timeout."
        ),
        above=0,
    )
    keep_alive_timeout: float = opt(
        default=75.0,
        help=(
            "Seconds to keep an idle client connection open. Set it higher than the same timeout of a proxy in front."
        ),
        above=0,
    )
    max_concurrent_requests: int = opt(
        default=8192,
        help=(
            "Maximum requests served at a time; more are answered with 503. Health checks, metrics and admin "
            "requests do not count. /abort_request and /health_generate have a separate count with the same limit."
        ),
        at_least=1,
    )
    metrics_without_key: bool = opt(
        default=False,
        help="Answer /metrics without an API key. It reveals how much is used.",
    )
    disable_access_log: bool = opt(default=False, help="Do not log a line for each response.")

    def problems(self) -> Iterator[str]:
        """Yield a complaint for each wrong option."""
        if not 0 <= self.port <= 65535:
            yield f"--port is {self.port}: it must be 1 to 65535 (0 takes a free one)"
        try:
            TrustedProxies(self.trusted_proxies)
        except ValueError as e:
            yield f"--trusted-proxies: {e}"
