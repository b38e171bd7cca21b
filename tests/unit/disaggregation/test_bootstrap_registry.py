"""Leases of the bootstrap server, on a clock of our own; what counts as a registration."""

from __future__ import annotations

import msgspec
import pytest
from support.layouts import uniform_layout

from pdserve.disaggregation.bootstrap.registration import Registration, decode_registration, registration_url
from pdserve.disaggregation.bootstrap.registry import Registry
from pdserve.disaggregation.errors import InvalidRegistration, NotRegistered, RegistrationConflict

LAYOUT = uniform_layout(page_size=16, num_layers=2, kv_heads=1, head_dim=8, dtype="float32", page_bytes=4096)


def make_registration(epoch, ttl=6.0):
    return Registration(
        epoch=epoch, control_port=4000, fingerprint="f", layout=LAYOUT, backend="tcp", pool="p", ttl=ttl
    )


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
    return Registry(clock)


def test_a_lease_runs_out_unless_renewed(registry, clock):
    with pytest.raises(NotRegistered, match="not registered yet"):
        registry.current()
    registry.register(make_registration("a"))
    clock.now += 5
    registry.register(make_registration("a"))
    clock.now += 5
    assert registry.current().epoch == "a"
    clock.now += 2
    with pytest.raises(NotRegistered, match=r"ran out 1\.0 s ago"):
        registry.current()
    registry.register(make_registration("a"))
    assert registry.current().epoch == "a"


def test_the_newest_epoch_wins_and_the_older_cannot_come_back(registry):
    registry.register(make_registration("a"))
    registry.register(make_registration("b"))
    with pytest.raises(RegistrationConflict, match="epoch a"):
        registry.register(make_registration("a"))
    assert registry.current().epoch == "b"


def test_only_the_current_epoch_withdraws_and_stays_away(registry):
    registry.register(make_registration("a"))
    with pytest.raises(RegistrationConflict):
        registry.withdraw("b")
    assert registry.current().epoch == "a"
    registry.withdraw("a")
    registry.withdraw("a")
    with pytest.raises(NotRegistered, match="draining"):
        registry.current()
    with pytest.raises(RegistrationConflict):
        registry.register(make_registration("a"))  # a renewal that was under way
    registry.register(make_registration("b"))
    registry.withdraw("a")
    assert registry.current().epoch == "b"


def test_who_withdraws_for_now_comes_back_unless_another_has_come(registry):
    registry.register(make_registration("a"))
    registry.withdraw("a", for_now=True)
    registry.withdraw("a", for_now=True)
    with pytest.raises(NotRegistered, match="memory was given back"):
        registry.current()
    registry.register(make_registration("a"))
    assert registry.current().epoch == "a"
    registry.withdraw("a", for_now=True)
    registry.withdraw("a")
    with pytest.raises(NotRegistered, match="draining"):
        registry.current()
    registry.register(make_registration("b"))
    registry.withdraw("b", for_now=True)
    registry.register(make_registration("c"))
    with pytest.raises(RegistrationConflict):
        registry.register(make_registration("b"))


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
    registration = msgspec.to_builtins(make_registration("a"))
    assert decode_registration(msgspec.json.encode(registration)) == make_registration("a")
    with pytest.raises(InvalidRegistration, match=field):
        decode_registration(msgspec.json.encode(registration | change))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'"registration"'])
def test_noise_is_not_a_registration(body):
    with pytest.raises(InvalidRegistration):
        decode_registration(body)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8998/registration"),
        ("0.0.0.0", "http://127.0.0.1:8998/registration"),
        ("::", "http://[::1]:8998/registration"),
        ("::1", "http://[::1]:8998/registration"),
        ("prefill-0", "http://prefill-0:8998/registration"),
        ("evil/path?", "http://evil%2Fpath%3F:8998/registration"),
    ],
)
def test_hosts_become_addresses_and_nothing_else(host, url):
    assert str(registration_url(host, 8998)) == url
