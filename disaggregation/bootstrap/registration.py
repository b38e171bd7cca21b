"""What an instance tells others through its bootstrap server: how to reach it, and what it serves."""

from __future__ import annotations

import contextlib
import ipaddress
from typing import Annotated, Literal, NamedTuple

import httpx
import msgspec
from msgspec import Meta

from ...messages.decode import UndeclaredMessage, decode, shown
from ...messages.handover import PROTOCOL_VERSION
from ...messages.worker import KVLayout
from ..errors import InvalidRegistration

MAX_REGISTRATION_BYTES = 64 << 10


class Registration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The current start (``epoch``) of the instance of a bootstrap server, with a lease of ``ttl`` seconds.

    Its scheduler listens on ``control_port`` of ``host``. If ``host`` is "", that is the address at which the bootstrap
    server was reached. ``pool`` is the digest of the transfer backend's metadata. Only this instance can show the
    metadata. ``fingerprint``, ``layout`` and ``backend`` tell peers early whether they can exchange pages.
    """

    epoch: Annotated[str, Meta(min_length=1, max_length=128)]
    control_port: Annotated[int, Meta(ge=1, le=65535)]
    fingerprint: Annotated[str, Meta(max_length=128)]
    layout: KVLayout
    backend: Annotated[str, Meta(max_length=32)]
    pool: Annotated[str, Meta(max_length=128)]
    ttl: Annotated[float, Meta(gt=0, le=3600)]
    role: Literal["unified", "prefill", "decode"] = "prefill"
    host: Annotated[str, Meta(max_length=255)] = ""
    version: int = PROTOCOL_VERSION


class Reached(NamedTuple):
    """An answer of a bootstrap server, and the IP address that the control port is at.

    The name is not looked up a second time. The reader must not wait for a name server, and a name with several
    addresses could lead to another instance.
    """

    registration: Registration
    address: str


class BootstrapError(msgspec.Struct, frozen=True):
    """The bootstrap server's answer where it has no registration, or refuses one."""

    error: str


_REGISTRATION = msgspec.json.Decoder(Registration)
_ERROR = msgspec.json.Decoder(BootstrapError)


def decode_registration(body: bytes) -> Registration:
    """Decode a registration (JSON); raises ``InvalidRegistration``, which names the wrong field."""
    try:
        return decode(_REGISTRATION, body, MAX_REGISTRATION_BYTES)
    except UndeclaredMessage as e:
        raise InvalidRegistration(f"not a registration: {e}") from e


def error_text(body: bytes, status: int) -> str:
    """Return the reason in a bootstrap server's error answer, fit for a log line, or the HTTP status if it has none."""
    try:
        return shown(decode(_ERROR, body, MAX_REGISTRATION_BYTES).error)
    except UndeclaredMessage:
        return f"HTTP status {status}"


def registration_url(host: str, port: int) -> httpx.URL:
    """Return the URL of the registration at ``host``:``port``; raises ``httpx.InvalidURL``.

    ``host`` may come from a request, so it is never more than a host. "Any address", which is for listening, means
    this host.
    """
    with contextlib.suppress(ValueError):  # a name, not an address
        address = ipaddress.ip_address(host)
        if address.is_unspecified:
            host = "::1" if address.version == 6 else "127.0.0.1"
    return httpx.URL(scheme="http", host=host, port=port, path="/registration")
