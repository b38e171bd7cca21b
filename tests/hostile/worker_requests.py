"""Seeded requests for ``/workers``, to be sent by clients that are not the admin: sound ones and broken ones."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from .bodies import ODD_VALUES

Header = tuple[str, str]
Credentials = Callable[[str, str, bytes], list[Header]]
"""Makes the headers by which an attacker names itself in a request of this method, target and body."""
PATH = "/workers"
PATHS = (
    *(f"{PATH}/", f"{PATH}//", f"/{PATH}", "/%77orkers", "/%2577orkers", f"{PATH}%2f", f"/.{PATH}", f"/livez/..{PATH}"),
    *(f"/livez/%2e%2e{PATH}", PATH.upper(), f"{PATH};x", f"http://localhost{PATH}", f"{PATH}%00", f"{PATH}.json"),
    *(f"{PATH}/0", f"/v1{PATH}"),
)
"""Other spellings of the path. None of them may be open to a client that the path refuses."""
METHODS = ("GET", "POST", "PATCH", "DELETE", "PUT", "HEAD", "OPTIONS", "TRACE", "get", "PROPFIND")
TRICKS: tuple[tuple[Header, ...], ...] = (
    (("x-pdserve-key-name", "(admin)"),),
    (("x-pdserve-key-name", "admin"), ("x-pdserve-follow", "1")),
    (("x-pdserve-signature", f"{1 << 40}.{'0' * 16}.{'0' * 64}.{'0' * 64}"),),
    (("x-pdserve-signature", ""), ("x-pdserve-key-name", "(admin)")),
    (("x-http-method-override", "DELETE"), ("x-method-override", "DELETE")),
    (("x-original-url", PATH), ("x-rewrite-url", PATH)),
    (("x-forwarded-for", "127.0.0.1"), ("x-real-ip", "127.0.0.1"), ("forwarded", "for=127.0.0.1")),
    (("x-forwarded-prefix", "/livez"), ("x-script-name", "/livez")),
    (("connection", "authorization"), ("connection", "x-api-key")),
    (("authorization", "Bearer admin"),),
    (("authorization", "Bearer"), ("x-api-key", "")),
    (("authorization", "Basic YWRtaW46YWRtaW4="),),
    (("authorization", "Bearer \u00e9\u00ff"),),
    (("x_api_key", "admin"), ("cookie", "authorization=Bearer admin")),
    (("origin", "http://localhost"), ("access-control-request-method", "DELETE")),
    (("host", "127.0.0.1"), ("host", "localhost")),
    (("expect", "100-continue"),),
    (("upgrade", "h2c"), ("connection", "upgrade")),
    (("content-type", "text/plain"),),
    (("content-encoding", "gzip"),),
)
"""Headers that must not make an admin of a client."""
OTHER_URLS = (
    *("http://169.254.169.254/latest/meta-data", "http://169.254.169.254", "http://[fd00:ec2::254]"),
    *("http://metadata.google.internal", "file:///etc/passwd", "file://localhost/etc/shadow", "unix:///tmp/x.sock"),
    *("unix:/run/x.sock", "http+unix://%2Ftmp%2Fx.sock", "gopher://127.0.0.1:1/_x", "ftp://127.0.0.1", "data:,x"),
    *(
        "javascript:1",
        "http://xn--80ak6aa92e.test",
        "http://xn--\u00e9.test",
        "http://\u4f60\u597d.test",
        "http://[",
        "http://[::1",
    ),
    *("http://[fe80::1%25lo]:1", "http://[::1%lo]:1", "http://[::]:1", "http://0:1", "http://a:99999", "http://a:-1"),
    *("http://", "//a", "", " ", "\x00", "http://a\x00b", "http://a\r\nx: y", "x" * 2049, "http://" + "a" * 70_000),
    *("http://" + "a." * 1000 + "b:1", "http://" + "%41" * 600, "http://a/" + "b/" * 900, "http://a?" + "x" * 3000),
)

LARGE_BODIES = (
    *(b"[" * 100_000, b'{"url":' * 20_000 + b"1" + b"}" * 20_000, b'{"url": "' + b"x" * (4 << 20) + b'"}'),
    gzip.compress(bytes(8 << 20)),
)


class WorkerRequest(NamedTuple):
    """A request as its bytes will say it. ``target``: path and query."""

    method: str
    target: str
    headers: list[Header]
    body: bytes

    def data(self) -> bytes:
        """Return the request's bytes. Its connection ends with the answer."""
        own: list[Header] = [("host", "localhost"), ("connection", "close"), ("content-type", "application/json")]
        if not any(name in ("content-length", "transfer-encoding") for name, _ in self.headers):
            own.append(("content-length", str(len(self.body))))
        lines = [f"{self.method} {self.target} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in (*own, *self.headers)]
        return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogatepass") + self.body


class WorkerRequests:
    """Draws requests. ``port``: that of a listener of the attacker's. ``instances`` and ``routers``: URLs."""

    def __init__(self, rng: random.Random, port: int, instances: Sequence[str], routers: Sequence[str]) -> None:
        self._rng, self._port = rng, port
        self._instances, self._routers = tuple(instances), tuple(routers)

    def draw(self, credentials: Credentials) -> WorkerRequest:
        """Return a request that would change the members if an admin sent it; as often, one with something wrong."""
        method, target, body = self._order()
        headers: list[Header] = []
        if self._rng.random() < 0.5:
            method, target, headers, body = self._spoiled(method, target, body)
        if self._rng.random() < 0.03:
            return self._second_in_body(target, credentials)
        return WorkerRequest(method, target, [*credentials(method, target, body), *headers], body)

    def url(self) -> str:
        """Return a URL of the attacker's listener, of a server of the cluster in some spelling, or another one."""
        rng = self._rng
        kind = rng.random()
        if kind < 0.3:
            return rng.choice(OTHER_URLS)
        servers = (*self._instances, *self._routers)
        port = self._port if kind < 0.7 else int(rng.choice(servers).rpartition(":")[2])
        return rng.choice(spellings(port))

    def _order(self) -> tuple[str, str, bytes]:
        """Return method, target and body of an order that the admin could give, and that would have an effect."""
        rng, named = self._rng, PATH + "?url=" + quote(self._rng.choice(self._instances), safe=":/")
        own = {"url": f"http://{rng.choice(('127.0.0.1', '[::1]', 'localhost'))}:{self._port}"}
        own |= rng.choice(({}, {"role": "decode"}, {"role": "prefill", "bootstrap_port": self._port}))
        orders: tuple[tuple[str, str, Any], ...] = (
            ("GET", PATH, None),
            ("POST", PATH, own),
            ("PATCH", named, {"state": rng.choice(("cordoned", "ready"))}),
            ("DELETE", named + rng.choice(("", "&drain=false")), None),
        )
        method, target, content = rng.choice(orders)
        return method, target, b"" if content is None else json.dumps(content).encode()

    def _spoiled(self, method: str, target: str, body: bytes) -> tuple[str, str, list[Header], bytes]:
        """Return an order with one or more things replaced."""
        rng, headers = self._rng, []
        if rng.random() < 0.3:
            method = rng.choice(METHODS)
        if rng.random() < 0.3:
            target = target.replace(PATH, rng.choice(PATHS), 1)
        if rng.random() < 0.4:
            target = target.partition("?")[0] + self._query()
        if rng.random() < 0.5:
            body = self._body()
        if rng.random() < 0.5:
            headers += rng.choice(TRICKS)
        return method, target, headers, body

    def _query(self) -> str:
        rng = self._rng
        names = ("url", "url", "url", "URL", "url[]", "drain", "key", "api_key", "x")
        pairs = [(rng.choice(names), self.url()) for _ in range(rng.choice((1, 1, 2, 3)))]
        pairs += rng.choice(([], [("drain", "false")], [("drain", "\u202e")]))
        return "?" + "&".join(f"{name}={quote(value, safe=rng.choice(('', ':/')))}" for name, value in pairs)

    def _body(self) -> bytes:
        rng = self._rng
        sound: dict[str, Any] = {"url": self.url(), "role": "decode", "bootstrap_port": 1, "state": "cordoned"}
        wrong = sound | {rng.choice(sorted(sound)): rng.choice(ODD_VALUES)}
        shaped = rng.choice((sound, wrong, [wrong], {"workers": [sound]}, rng.choice(ODD_VALUES)))
        text = json.dumps(shaped).encode()
        odd = (
            *(b"", b"\x00", b"\xff\xfe" + text, b"NaN", b"1" * 5000, text[:-1], text + b"x"),
            *(b'{"url": "a", ' + text[1:], b"[" + b",".join([text] * 1000) + b"]", text.decode().encode("utf-16")),
        )
        return rng.choice((text, rng.choice(odd), rng.choice(LARGE_BODIES)))

    def _second_in_body(self, target: str, credentials: Credentials) -> WorkerRequest:
        """Return a request with an order in its body that is a second request for a server that frames it wrongly."""
        method, order, body = self._order()
        second = WorkerRequest(method, order, credentials(method, order, body), body).data()
        framing = self._rng.choice(
            (
                *([("content-length", "0")], [("content-length", "0"), ("transfer-encoding", "identity")]),
                *([("transfer-encoding", "chunked")], [("content-length", "0"), ("content-length", str(len(second)))]),
            )
        )
        if framing == [("transfer-encoding", "chunked")]:
            second = b"0\r\n\r\n" + second
        headers: list[Header] = [("connection", "keep-alive"), *framing]
        return WorkerRequest("GET", target, [*credentials("GET", target, b""), *headers], second)


def spellings(port: int) -> list[str]:
    """Return URLs of a server on this host, in spellings that some parser accepts."""
    hosts = ("127.0.0.1", "localhost", "[::1]", "127.0.0.1.", "LOCALHOST", "127.1", "2130706433", "0x7f000001")
    hosts += (
        "0177.0.0.1",
        "[::ffff:127.0.0.1]",
        "[0:0:0:0:0:0:0:1]",
        "\u2460\u2461\u2466.0.0.1",
        "0",
        "%31%32%37.0.0.1",
    )
    hosts += ("admin:secret@127.0.0.1", "a@127.0.0.1", "127.0.0.1\\@a", "a#@127.0.0.1", "127.0.0.1%2f@a")
    found = [f"http://{host}:{port}" for host in hosts]
    here = f"127.0.0.1:{port}"
    found += [
        f"HTTP://{here}",
        f"https://{here}",
        f"http:{here}",
        f"//{here}",
        here,
        f"http:\\\\{here}",
        f" http://{here}",
    ]
    return [*found, *(f"http://{here}{end}" for end in ("/", "//", "/x", "?", "?x=1", "#x", "/../", "\t", "\n", "%00"))]
