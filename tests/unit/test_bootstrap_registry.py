"""Leases of the bootstrap server, on a clock of our own; what counts as a route."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.disaggregation.bootstrap import Route, decode_route, route_url
from pdserve.disaggregation.errors import RouteConflict, RouteInvalid, RouteUnavailable
from pdserve.disaggregation.route_registry import RouteRegistry
from pdserve.messages.worker import KVLayout

LAYOUT = KVLayout(page_size=16, num_layers=2, kv_heads=1, head_dim=8, dtype="float32", page_bytes=4096)


def make_route(epoch, ttl=6.0):
    return Route(epoch=epoch, control_port=4000, fingerprint="f", layout=LAYOUT, backend="tcp", ttl=ttl)


class Clock:
    """Seconds that pass when the test says so."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def registry(clock):
    return RouteRegistry(clock)


def test_a_lease_runs_out_unless_renewed(registry, clock):
    with pytest.raises(RouteUnavailable, match="not registered yet"):
        registry.current()
    registry.register(make_route("a"))
    clock.now += 5
    registry.register(make_route("a"))
    clock.now += 5
    assert registry.current().epoch == "a"
    clock.now += 2
    with pytest.raises(RouteUnavailable, match=r"ran out 1\.0 s ago"):
        registry.current()
    registry.register(make_route("a"))
    assert registry.current().epoch == "a"


def test_the_newest_epoch_wins_and_the_older_cannot_come_back(registry):
    registry.register(make_route("a"))
    registry.register(make_route("b"))
    with pytest.raises(RouteConflict, match="epoch a"):
        registry.register(make_route("a"))
    assert registry.current().epoch == "b"


def test_only_the_current_epoch_withdraws_and_stays_away(registry):
    registry.register(make_route("a"))
    with pytest.raises(RouteConflict):
        registry.withdraw("b")
    assert registry.current().epoch == "a"
    registry.withdraw("a")
    registry.withdraw("a")
    with pytest.raises(RouteUnavailable, match="draining"):
        registry.current()
    with pytest.raises(RouteConflict):
        registry.register(make_route("a"))  # a renewal that was under way
    registry.register(make_route("b"))
    registry.withdraw("a")
    assert registry.current().epoch == "b"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"epoch": ""}, "epoch"),
        ({"control_port": 0}, "control_port"),
        ({"control_port": "4000"}, "control_port"),
        ({"ttl": -1}, "ttl"),
        ({"ttl": 1e9}, "ttl"),
        ({"role": "boss"}, "role"),
        ({"layout": {}}, "layout"),
        ({"shoe_size": 43}, "shoe_size"),
    ],
)
def test_what_is_not_a_route_is_refused_by_field(change, field):
    route = msgspec.to_builtins(make_route("a"))
    assert decode_route(msgspec.json.encode(route)) == make_route("a")
    with pytest.raises(RouteInvalid, match=field):
        decode_route(msgspec.json.encode(route | change))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'"route"'])
def test_noise_is_not_a_route(body):
    with pytest.raises(RouteInvalid):
        decode_route(body)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8998/route"),
        ("0.0.0.0", "http://127.0.0.1:8998/route"),
        ("::", "http://[::1]:8998/route"),
        ("::1", "http://[::1]:8998/route"),
        ("prefill-0", "http://prefill-0:8998/route"),
        ("evil/path?", "http://evil%2Fpath%3F:8998/route"),
    ],
)
def test_hosts_become_addresses_and_nothing_else(host, url):
    assert str(route_url(host, 8998)) == url
