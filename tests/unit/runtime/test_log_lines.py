"""What strangers and clients send can't write a log line, whatever they put into a request."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.fake_engine import FakeEngine, with_engine

from pdserve.router.options import RouterOptions
from pdserve.runtime.logs import JsonFormatter, TextFormatter
from pdserve.runtime.refusal_log import LINES
from pdserve.runtime.web import proxies
from pdserve.runtime.web.moved_answer import TICKET, read_ticket
from pdserve.runtime.web.proxies import TrustedProxies, parse_address
from pdserve.runtime.web.server import server_config
from pdserve.server.options import ServerOptions

FORGED = "x\n23:59:59 I [http:1] FORGED \x1b[2J\r\u202e\u2028"
TICKET_OF = {
    "epoch": "e1", "host": "127.0.0.1", "port": 1, "key": "k" * 32, "chars": 0, "tokens": 0, "opened": False,
    "rid": "x", "created": 0,
}  # fmt: skip
HEADERS = ("x-request-id", "x-forwarded-for", "traceparent", "x-request-timeout", "host", "origin", "user-agent")
OTHER_HEADERS = ("content-type", "authorization", "x-api-key", "x-pdserve-key-name", "accept", "referer")


@contextmanager
def printed(formatter: logging.Formatter) -> Iterator[io.StringIO]:
    """Collect what a process would print meanwhile."""
    out, root = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield out
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


async def send(engine: FakeEngine, method: str, path: str, query: bytes, headers: dict[str, str], body: bytes) -> int:
    """Send a request as a server would make it of any bytes, and return its status."""
    scope = {"type": "http", "http_version": "1.1", "method": method, "path": path, "query_string": query}
    raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
    scope |= {"headers": raw, "client": ("127.0.0.1", 5), "scheme": "http", "raw_path": b"", "server": ("a", 1)}
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])
    statuses: list[int] = []

    async def receive() -> Any:
        return next(messages, None) or await asyncio.Event().wait()

    async def on_send(message: Any) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    await engine.app(scope, receive, on_send)  # type: ignore[arg-type]
    return statuses[0]


class Guarded(NamedTuple):
    """One server for all examples, with every option that looks at headers."""

    engine: FakeEngine
    runner: asyncio.Runner


@pytest.fixture(scope="module")
def guarded() -> Iterator[Guarded]:
    async def make() -> FakeEngine:
        return FakeEngine(api_key="secret", trusted_proxies="127.0.0.0/8", allowed_origins="http://a")

    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdserve.server.http.engine.moved_answers.ARRIVAL_SECONDS", 0.0)
        yield Guarded(runner.run(make()), runner)


hostile = st.one_of(
    st.just(FORGED), st.text(max_size=40), st.text(alphabet="\n\r\x1b\x00\x9b\u2028 aB:[]%1.,", max_size=40)
)
fields = st.sampled_from(["rid", "text", "user", "extra_key", "model", "bootstrap_host", "stop", "nonsense"])
bodies = st.dictionaries(st.one_of(fields, hostile), st.one_of(hostile, st.integers(), st.none()), max_size=3)
tickets = st.dictionaries(st.sampled_from(sorted(TICKET_OF)), st.one_of(hostile, st.integers(-1, 70000)), max_size=3)


@settings(max_examples=examples(150), deadline=None)
@given(
    path=st.one_of(st.sampled_from(["/generate", "/moved", "/v1/completions", "/tokenize"]), hostile.map("/{}".format)),
    method=st.sampled_from(["GET", "POST", "OPTIONS", "DELETE", "BREW"]),
    query=hostile.map(str.encode),
    headers=st.dictionaries(st.sampled_from(HEADERS + OTHER_HEADERS), hostile, max_size=4),
    ticket=st.one_of(st.none(), tickets),
    body=bodies,
    has_key=st.booleans(),
)
@example("/moved", "POST", b"", {}, {"rid": FORGED}, {}, False)
@example("/moved", "POST", b"", {}, {"epoch": FORGED, "key": FORGED}, {}, True)
@example("/generate", "POST", b"", {"x-forwarded-for": FORGED}, None, {"text": "a", "rid": FORGED}, True)
@example(f"/{FORGED}", "GET", FORGED.encode(), {"host": FORGED, "origin": FORGED}, None, {}, True)
def test_no_request_writes_a_line(
    guarded: Guarded,
    path: str,
    method: str,
    query: bytes,
    headers: dict[str, str],
    ticket: dict | None,
    body: dict,
    has_key: bool,
) -> None:
    sent = {"host": "localhost"} | headers
    if has_key:
        sent["authorization"] = "Bearer secret"
    if ticket is not None:
        sent[TICKET.decode()] = json.dumps(TICKET_OF | ticket)
    with printed(TextFormatter("http")) as text, printed(JsonFormatter("http")) as lines:
        answer = send(guarded.engine, method, path, query, sent, json.dumps(body).encode())
        assert guarded.runner.run(answer) < 500
    for line in text.getvalue().split("\n"):
        assert line.isprintable()
        assert not line or line[2::3][:2] == "::", line  # a time begins each
    assert all(isinstance(json.loads(line), dict) for line in lines.getvalue().splitlines())


@pytest.mark.parametrize("field", ["rid", "epoch", "host", "key"])
def test_a_ticket_holds_no_more_than_a_line(field: str) -> None:
    assert read_ticket(json.dumps(TICKET_OF).encode()).rid == "x"
    for value in (FORGED, "a\nb", "\x1b[2J", "a" * 1000):
        with pytest.raises(ValueError, match="a ticket's"):
            read_ticket(json.dumps(TICKET_OF | {field: value}).encode())


def test_a_strangers_ticket_names_nothing_and_fills_no_log() -> None:
    async def run(engine: FakeEngine) -> None:
        ticket = json.dumps(TICKET_OF | {"rid": "NAMED"})
        for _ in range(3 * LINES):
            assert await send(engine, "POST", "/moved", b"", {"host": "localhost", TICKET.decode(): ticket}, b"") == 404

    with printed(TextFormatter("http")) as text, pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdserve.server.http.engine.moved_answers.ARRIVAL_SECONDS", 0.0)
        with_engine(run, api_key="secret")
    assert text.getvalue().count("POST /moved") == LINES
    assert "NAMED" not in text.getvalue()


def client_of(forwarded: list[bytes], trusted: str | None, peer: str = "10.0.0.1") -> str:
    headers = [(b"x-forwarded-for", value) for value in forwarded]
    return TrustedProxies(trusted).client({"client": (peer, 5), "headers": headers})


@pytest.mark.parametrize(
    ("forwarded", "trusted", "client"),
    [
        ([b"9.9.9.9"], None, "10.0.0.1:5"),
        ([b"9.9.9.9"], "10.0.0.2", "10.0.0.1:5"),
        ([b"9.9.9.9"], "10.0.0.0/24", "9.9.9.9"),
        ([], "10.0.0.0/24", "10.0.0.1"),
        # What stands further left is the client's own word.
        ([b"1.1.1.1, 9.9.9.9"], "10.0.0.1", "9.9.9.9"),
        ([b"1.1.1.1", b"9.9.9.9, 10.0.0.7"], "10.0.0.0/24", "9.9.9.9"),
        ([b"10.0.0.9, 10.0.0.8"], "10.0.0.0/24", "10.0.0.9"),
        ([b"9.9.9.9:443"], "10.0.0.1", "9.9.9.9"),
        ([b"[2001:db8::1]:443"], "10.0.0.1", "2001:db8::1"),
        ([b"::ffff:9.9.9.9"], "10.0.0.1", "9.9.9.9"),
        # No address: its reporter is the last that is known.
        ([b"9.9.9.9, unknown"], "10.0.0.1", "10.0.0.1"),
        ([b'9.9.9.9:1 "POST /admin" 200 key=alice'], "10.0.0.1", "10.0.0.1"),
        ([b"fe80::1%\x1b[2J"], "10.0.0.1", "10.0.0.1"),
        ([b"9.9.9.9, " + b"10.0.0.2, " * 100 + b"10.0.0.2"], "10.0.0.0/24", "10.0.0.2"),
        ([b""], "10.0.0.1", "10.0.0.1"),
        ([b"[]"], "10.0.0.1", "10.0.0.1"),
        ([b"9.9.9.9, []:5"], "10.0.0.1", "10.0.0.1"),
    ],
)
def test_the_client_is_the_rightmost_address_that_is_no_proxy(
    forwarded: list[bytes], trusted: str | None, client: str
) -> None:
    assert client_of(forwarded, trusted) == client


def test_proxies_may_be_reached_by_ipv6_and_as_ipv4_within_it() -> None:
    assert client_of([b"9.9.9.9"], "::1", "::1") == "9.9.9.9"
    assert client_of([b"9.9.9.9"], "10.0.0.1", "::ffff:10.0.0.1") == "9.9.9.9"
    assert client_of([b"9.9.9.9"], "::1", "::2") == "::2:5"


@settings(deadline=None)
@example("fe80::1%\x1b[2J")
@given(st.one_of(hostile, st.from_regex(r"[0-9a-f:.%\[\]\n]{0,20}")))
def test_what_passes_for_an_address_is_printed_as_one(text: str) -> None:
    address = parse_address(text)
    assert address is None or set(str(address)) <= set("0123456789abcdef:.")


@pytest.mark.parametrize("wrong", ["x", "10.0.0.1/8", "1.2.3.4,,y", "fe80::/200"])
def test_proxies_that_are_none_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="write addresses and networks like"):
        TrustedProxies(wrong)


def test_no_server_lets_uvicorn_believe_headers() -> None:
    for file in ("server/http_process.py", "router/process.py"):
        text = (Path(proxies.__file__).parents[2] / file).read_text()
        assert "server_config(" in text
        assert "uvicorn.Config" not in text
    for options in (ServerOptions(), RouterOptions()):
        assert not server_config(FakeEngine().app, options).proxy_headers
