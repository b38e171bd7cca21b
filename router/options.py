"""The options of the router, declared once; the command line and YAML files read them here."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from ..runtime.cluster_secret import ClusterSecretError, RouterKeys
from ..runtime.options import opt, section
from ..runtime.process_options import LogOptions
from ..runtime.web.keys import KeyFileError, check_keys, read_keys
from ..runtime.web.options import AccessOptions
from ..runtime.web.proxies import TrustedProxies
from ..runtime.web.responses.options import ResponseOptions
from .policies.options import PolicyOptions

DEFAULT_PORTS = {"http": 80, "https": 443}
HOST_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
"""A host name in lower case. Names in containers may have underscores."""
IPV4_LIKE = re.compile(r"(.*\.)?([0-9]+|0x[0-9a-f]*)")
"""A host that resolvers take for an IPv4 address: its last label is a number."""
ZONE = re.compile(r"[A-Za-z0-9._-]+")
"""The zone of a link-local IPv6 address: an interface's name."""


class RouterOptionsError(ValueError):
    """An option that can't work; the message says what to write instead."""


@section("Instances", order=5)
@dataclass(frozen=True, kw_only=True)
class RouterTargets:
    """The instances that a router starts with. More can be added later (``POST /workers``)."""

    prefill: list[str] = opt(
        default_factory=list,
        help="Prefill instance: URL [BOOTSTRAP_PORT]; may be repeated. Default port: from the instance's /health.",
    )
    decode: list[str] = opt(default_factory=list, help="URL of a decode instance; may be repeated.")
    worker: list[str] = opt(
        default_factory=list,
        help=(
            "URL of a unified instance, which serves whole requests; may be repeated. Requests go to the side with "
            "fewer pending prompt tokens, then with fewer running requests."
        ),
    )
    members_file: str | None = opt(
        default=None,
        help=(
            'File with a JSON list of instances: [{"url": "http://10.0.0.5:30000"}, …], with "role" and '
            '"bootstrap_port" if they are to be given. It is read every second. New instances are added, and those '
            "that vanish are drained. Only its owner, this user or root, may be able to write to the file."
        ),
    )
    allow_no_instances: bool = opt(
        default=False,
        help=(
            "Start without instances that can serve, because an admin adds them by POST /workers. Until then, requests "
            "are answered with 503."
        ),
    )


@section("Routing", order=6)
@dataclass(frozen=True, kw_only=True)
class RoutingOptions(PolicyOptions):
    """How a router treats requests and instances: options of ``pdserve router`` and of ``pdserve up``."""

    health_check_interval: float = opt(
        default=1.0,
        help=(
            "Seconds between health checks of a healthy instance. An instance that is down is checked four times as "
            "often."
        ),
    )
    health_check_timeout: float = opt(default=3.0, help="Seconds that an instance may take to answer a health check.")
    hang_timeout: float = opt(
        default=15.0,
        help=(
            "Seconds after which requests of an instance that does not answer health checks, or reports that it "
            "hangs, are retried elsewhere or fail."
        ),
    )
    connect_timeout: float = opt(default=1.0, help="Seconds that an instance may take to accept a connection.")
    first_byte_timeout: float = opt(
        default=600.0,
        help=(
            "Seconds that a stream may wait for its first event; keep-alive comments do not count. For other "
            "answers: seconds since a health check last found the instance alive."
        ),
    )
    idle_timeout: float = opt(
        default=120.0,
        help=(
            "Seconds without data, or with keep-alive comments only, after which an answer that has begun counts as "
            "lost."
        ),
    )
    retries: int = opt(
        default=2,
        help=(
            "Maximum retries of a request at other instances if an attempt fails before the answer has begun. "
            "Failed connections do not count."
        ),
    )
    retries_after_crash: int = opt(
        default=1,
        help=(
            "Maximum retries after an instance died with the request, which may have caused it. A request during "
            "which two instances died within a minute is refused with 502 for the rest of that minute."
        ),
    )
    retry_window: float = opt(
        default=1.5,
        help="Seconds after its first failure in which a request is retried, or waits for an instance to come back.",
    )
    member_drain_timeout: float = opt(
        default=600.0,
        help=(
            "Seconds for the running requests of an instance that DELETE /workers drains, or that vanishes from "
            "a router's --members-file. Then it is removed, and those left are retried elsewhere or fail."
        ),
    )
    max_body_bytes: int = opt(
        default=32 * 2**20, help="Maximum size of a request body; a larger one is answered with 413."
    )
    max_held_body_bytes: int = opt(
        default=2**30,
        help=(
            "Maximum bytes of the bodies of running requests, all together; more are answered with 503. Bodies of "
            "up to 64 KiB may take an eighth more. An API key may hold as much as it leaves free."
        ),
    )
    max_held_event_bytes: int = opt(
        default=256 * 2**20,
        help=(
            "Maximum bytes of events of more than 64 KiB, as of many log-probabilities, that streams hold for their "
            "clients, all together. Others are passed on in parts, as they arrive. An API key may hold as much as it "
            "leaves free."
        ),
    )

    def check_routing(self) -> None:
        """Raise ``RouterOptionsError`` for a number that is out of range."""
        for name in ("retries", "retries_after_crash", "retry_window", "balance_abs_threshold", "max_held_event_bytes"):
            if not getattr(self, name) >= 0:
                raise RouterOptionsError(f"--{name.replace('_', '-')} must be 0 or more")
        if not 0 <= self.cache_threshold <= 1:
            raise RouterOptionsError(f"--cache-threshold is {self.cache_threshold}: it must be from 0 to 1")
        if not self.balance_rel_threshold >= 1:
            raise RouterOptionsError(f"--balance-rel-threshold is {self.balance_rel_threshold}: it must be 1 or more")
        require_above_zero(
            self,
            "health_check_interval",
            "health_check_timeout",
            "hang_timeout",
            "connect_timeout",
            "first_byte_timeout",
            "idle_timeout",
            "member_drain_timeout",
            "max_body_bytes",
            "cache_table_blocks",
        )
        if self.max_held_body_bytes < self.max_body_bytes:
            raise RouterOptionsError("--max-held-body-bytes must be at least --max-body-bytes")


@dataclass(frozen=True, kw_only=True)
class RouterOptions(RoutingOptions, RouterTargets, AccessOptions, ResponseOptions, LogOptions):
    """Options of ``pdserve router``."""

    port: int = opt(default=8000, help="Port of the router's HTTP API; 0 takes a free one.")
    admin_key_file: str | None = opt(
        default=None,
        help=(
            "File with the admin key, which may flush caches and abort every request. Instances with the same key "
            "recognise it; without it they see the client's own key, and with a cluster secret none. Without this "
            "file, a single API key is also the admin key. Without any key, one is drawn at start if there is a "
            "cluster secret, and the log names its file."
        ),
    )
    send_timeout: float = opt(
        default=60.0,
        help=(
            "Seconds without progress after which a connection to a client that does not read is closed, and its "
            "request ended."
        ),
    )
    cluster_secret_file: str | None = opt(
        default=None,
        help=(
            "File with the router key that `pdserve router-key` derives from the cluster secret, or with the secret "
            "itself. A router key cannot act as an instance. Needed if instances are on other hosts."
        ),
    )
    drain_timeout: float = opt(default=30.0, help="Seconds for running answers to finish after SIGTERM.")
    metrics_without_key: bool = opt(
        default=False,
        help="Answer /metrics and /metrics/targets without an API key. They reveal how much is used, and where.",
    )

    def session_hash_key(self) -> bytes:
        """Derive the key from the cluster secret in use; empty without one. Raises ``ClusterSecretError``."""
        keys = RouterKeys.read(self.cluster_secret_file)
        return keys.keys("session routing")[0] if keys is not None else b""

    def check(self) -> None:
        """Raise ``RouterOptionsError`` if an option is invalid, or if the options leave nothing to route to.

        The files of keys and of the cluster secret are read for it.
        """
        parse_prefill(self.prefill)
        for url in [*self.decode, *self.worker]:
            check_url(url)
        try:
            check_keys(self)
            self._check_instances()
        except KeyFileError as exc:
            raise RouterOptionsError(str(exc)) from None
        try:
            TrustedProxies(self.trusted_proxies)
        except ValueError as exc:
            raise RouterOptionsError(f"--trusted-proxies: {exc}") from None
        try:
            RouterKeys.read(self.cluster_secret_file)
        except ClusterSecretError as exc:
            raise RouterOptionsError(str(exc)) from None
        for problem in ResponseOptions.problems(self):
            raise RouterOptionsError(problem)
        self.check_routing()
        require_above_zero(self, "send_timeout", "keep_alive_timeout", "max_concurrent_requests")

    def _check_instances(self) -> None:
        """Raise ``RouterOptionsError`` if the instances can't serve and need not, or if no admin could add others.

        Also raises ``KeyFileError``.
        """
        if self.members_file is not None:
            return
        if self.allow_no_instances:
            if not (
                self.prefill or self.decode or self.worker or self.cluster_secret_file or read_keys(self).has_admin
            ):
                raise RouterOptionsError(
                    "--allow-no-instances: nobody could add any by POST /workers, which needs an admin key: give "
                    "--admin-key-file or a single API key"
                )
            return
        if bool(self.prefill) != bool(self.decode):
            given, missing = ("--prefill", "--decode") if self.prefill else ("--decode", "--prefill")
            raise RouterOptionsError(f"{given} is of no use without {missing}: give at least one URL of each")
        if not self.prefill and not self.worker:
            raise RouterOptionsError(
                "nothing to route to: give --prefill and --decode, or --worker, or --members-file, or "
                "--allow-no-instances to add instances later"
            )


def require_above_zero(options: RoutingOptions, *names: str) -> None:
    """Raise ``RouterOptionsError`` unless each of the named options is above 0."""
    for name in names:
        if not getattr(options, name) > 0:
            raise RouterOptionsError(f"--{name.replace('_', '-')} must be above 0")


def parse_prefill(tokens: list[str]) -> list[tuple[str, int | None]]:
    """Parse the flattened values of ``--prefill URL [BOOTSTRAP_PORT]`` into pairs; a missing port is None.

    Raises ``RouterOptionsError`` if a port comes without its URL, twice, or out of range.
    """
    pairs: list[tuple[str, int | None]] = []
    port_allowed = False
    for token in tokens:
        if not token.isdigit():
            pairs.append((check_url(token), None))
            port_allowed = True
            continue
        if not port_allowed:
            raise RouterOptionsError(f"--prefill {token}: a bootstrap port follows its URL, one port a URL")
        if not 0 < int(token) < 65536:
            raise RouterOptionsError(f"--prefill: {token} is not a port (1 to 65535)")
        pairs[-1] = (pairs[-1][0], int(token))
        port_allowed = False
    return pairs


def check_url(url: str) -> str:
    """Return the one spelling of an instance's URL, such as ``http://127.0.0.1:30000``, by which URLs are compared.

    It has no default port and no trailing slash. Raises ``RouterOptionsError`` unless the URL is
    ``http://HOST[:PORT]``, or the same with ``https``.
    """
    example = "write it like http://127.0.0.1:30000"
    if "@" in url:  # what comes before it may be a password, so it is not repeated
        raise RouterOptionsError(f"an instance's URL has no user name or password before an @: {example}")
    try:
        parts = urlsplit(url)
        port, host = parts.port, _one_host(parts.hostname or "", is_literal="[" in parts.netloc)
    except ValueError:
        host, port = "", None
    is_text = url.isascii() and url.isprintable() and not set(" ?#") & set(url)
    if not is_text or not host or port == 0 or parts.scheme not in DEFAULT_PORTS or parts.path not in ("", "/"):
        raise RouterOptionsError(f"{url!r} is not an instance's URL: {example}")
    own_port = "" if port in (None, DEFAULT_PORTS[parts.scheme]) else f":{port}"
    return f"{parts.scheme}://{host}{own_port}"


def _one_host(host: str, *, is_literal: bool) -> str:
    """Return the one spelling of a host of a URL. Raises ``ValueError`` if it is neither a name nor an address.

    ``host``: in lower case and without brackets, as ``urlsplit`` gives it. ``is_literal``: whether it had brackets.
    """
    if is_literal:
        address = ipaddress.IPv6Address(host)
        if address.scope_id is not None and not ZONE.fullmatch(address.scope_id):
            raise ValueError("a zone that no interface has")
        return f"[{address}]"
    host = host.removesuffix(".")
    if IPV4_LIKE.fullmatch(host):
        return str(ipaddress.IPv4Address(host))
    if not HOST_NAME.fullmatch(host):
        raise ValueError("no name of a host")
    return host
