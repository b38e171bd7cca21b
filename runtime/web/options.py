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
        help="Address to listen on. Other than a loopback address only when you say so.",
        not_empty=True,
    )
    port: int = opt(default=30000, help="Port of the HTTP API.")
    api_key: str | None = opt(
        default=None,
        help=(
            'When set, every request but /health needs "Authorization: Bearer KEY". Every user of the host can read '
            "arguments: better in the variable PDSERVE_API_KEY, or in a file."
        ),
        not_empty=True,
    )
    api_key_file: str | None = opt(
        default=None,
        help=(
            "File with a key a line, or a name and a key: one for each user, who can't abort what another asked for."
        ),
    )
    admin_key_file: str | None = opt(
        default=None,
        help=(
            "File with the key that it takes to end or change this server, to flush the cache and to abort what "
            "others asked for. Without it the only key is the admin's; without one, a key is drawn at the start, "
            "and the log says where."
        ),
    )
    no_keys: bool = opt(
        default=False,
        help=(
            "Ask nobody for a key although --host is no loopback address: whoever reaches it may use this server. "
            "Where keys are given, they are asked for all the same."
        ),
    )
    cluster_secret_file: str | None = opt(
        default=None,
        help=(
            "File with the secret that this cluster's instances and routers know each other by; two lines while it "
            "changes."
        ),
    )
    allowed_hosts: str | None = opt(
        default=None,
        help=(
            "Names, with commas in between, that clients may call this server by in their Host header where it "
            "listens on a loopback address and asks for no key; * for any. Without it: localhost and loopback "
            "addresses."
        ),
    )
    allowed_origins: str | None = opt(
        default=None,
        help=(
            "Origins, with commas in between, whose web pages may use this server from a browser, like "
            "https://chat.example.org; * for any. Without it: none but its own."
        ),
    )
    trusted_proxies: str | None = opt(
        default=None,
        help=(
            "Addresses and networks, with commas in between, of the reverse proxies whose X-Forwarded-For says who "
            "a client is, like 10.0.0.7,192.168.0.0/16. It is for logs alone. Without it: none."
        ),
    )
    send_timeout: float = opt(
        default=120.0,
        help=(
            "Seconds in which a client has to take some of what it is sent; else its connection is closed and its "
            "request ended. An instance's is to be longer than its router's, whose clients are the slow ones."
        ),
        above=0,
    )
    keep_alive_timeout: float = opt(
        default=75.0,
        help=(
            "Seconds that a client's connection is kept open between requests; longer than a proxy in front keeps "
            "its own."
        ),
        above=0,
    )
    max_concurrent_requests: int = opt(
        default=8192,
        help=(
            "Most requests that are served at once; one more is answered with 503. Health checks, metrics and the "
            "admin's orders don't count. /abort_request and /health_generate have a count of their own, with the "
            "same limit."
        ),
        at_least=1,
    )
    metrics_without_key: bool = opt(
        default=False,
        help="Answer /metrics without the API key; it tells how much is used.",
    )
    disable_access_log: bool = opt(default=False, help="Log no line for each request that was answered.")

    def problems(self) -> Iterator[str]:
        """Yield a complaint for each wrong option."""
        if not 0 <= self.port <= 65535:
            yield f"--port is {self.port}: it must be 1 to 65535 (0 takes a free one)"
        try:
            TrustedProxies(self.trusted_proxies)
        except ValueError as e:
            yield f"--trusted-proxies: {e}"
