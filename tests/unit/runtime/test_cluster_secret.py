"""The cluster secret's file, what is derived from it, and what a router's signature confirms."""

from __future__ import annotations

import pytest
from support.fake_engine import FakeEngine, with_engine

from pdserve.runtime import cluster_secret
from pdserve.runtime.cluster_secret import (
    FRESH_SECONDS,
    SET_BACK_SECONDS,
    ClusterSecret,
    ClusterSecretError,
    OnceOnly,
    RouterKeys,
    TooManySignatures,
    addresses,
)
from pdserve.runtime.options import OptionError, check_options
from pdserve.server.http.bodies.request_fields import RequestFields
from pdserve.server.http.engine.bootstrap_gate import BootstrapGate
from pdserve.server.options import ServerOptions

OLD, NEW = "o" * 32, "n" * 40
NOW = 1_000_000.0


def written(tmp_path, *lines) -> ClusterSecret:
    path = tmp_path / "secret"
    path.write_text("\n".join(lines))
    return ClusterSecret.read(str(path))


def test_a_file_has_one_secret_or_two(tmp_path):
    assert ClusterSecret.read(None) is None
    old, both = written(tmp_path, "# ours", OLD, ""), written(tmp_path, NEW, OLD)
    assert old.keys("a") == both.keys("a")[1:]
    assert len({*both.keys("a"), *both.keys("b")}) == 4
    for lines, said in (((), "has 0 secrets"), ((OLD, NEW, OLD), "has 3 secrets"), (("short",), "32 characters")):
        with pytest.raises(ClusterSecretError, match=said) as raised:
            written(tmp_path, *lines)
        assert "--cluster-secret-file" in str(raised.value)
    with pytest.raises(ClusterSecretError, match="No such file"):
        ClusterSecret.read(str(tmp_path / "nowhere"))
    assert OLD not in repr(old)


def test_a_routers_key_file_is_for_routers_alone(tmp_path):
    both = written(tmp_path, NEW, OLD)
    path = tmp_path / "router-key"
    path.write_text("# of routers\n" + both.for_routers().text())
    keys = RouterKeys.read(str(path))
    assert keys.keys("a") == RouterKeys.read(str(tmp_path / "secret")).keys("a") == both.for_routers().keys("a")
    assert not {*keys.keys("a")} & {*both.keys("a")}
    assert RouterKeys.read(None) is None
    with pytest.raises(OptionError, match="router's key"):
        check_options(ServerOptions(cluster_secret_file=str(path)))
    for lines in (f"router-key-{'0' * 63}", f"{both.for_routers().text().splitlines()[0]}\n{OLD}"):
        path.write_text(lines)
        with pytest.raises(ClusterSecretError, match="pdserve router-key"):
            RouterKeys.read(str(path))
    path.write_text("short")
    with pytest.raises(ClusterSecretError, match="32 characters"):
        RouterKeys.read(str(path))


class Clock:
    """A monotonic clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_what_was_used_is_forgotten_when_it_is_too_old_anyway():
    clock = Clock()
    used = OnceOnly(clock)
    assert all(used.is_first(f"{i}", NOW, NOW) for i in range(10))
    assert len(used) == 10
    later = NOW + FRESH_SECONDS + SET_BACK_SECONDS + 1
    clock.now += FRESH_SECONDS + SET_BACK_SECONDS + 1
    assert used.is_first("99", later, later)
    assert len(used) == 1


def test_no_signature_is_forgotten_while_it_is_fresh_however_many_there_are(monkeypatch):
    monkeypatch.setattr(cluster_secret, "MAX_REMEMBERED", 3)
    clock = Clock()
    used = OnceOnly(clock)
    assert [used.is_first(f"{i}", NOW + i, NOW) for i in range(3)] == [True, True, True]
    for _ in range(2):
        with pytest.raises(TooManySignatures, match="remembers 3 signed requests of the last 120 s"):
            used.is_first("another", NOW, NOW)
    clock.now += FRESH_SECONDS
    assert not any(used.is_first(f"{i}", NOW + i, NOW + FRESH_SECONDS) for i in range(3))
    # The one that is no longer fresh makes room for one.
    later = NOW + FRESH_SECONDS + 1
    clock.now += SET_BACK_SECONDS + 1
    assert used.is_first("another", later, later)
    with pytest.raises(TooManySignatures):
        used.is_first("one more", later, later)
    assert len(used) == 3


def test_a_signature_counts_once_although_the_clock_goes_back():
    used = OnceOnly()
    assert used.is_first("a", NOW, NOW)
    assert used.is_first("b", NOW + 500, NOW + 500)
    assert not used.is_first("a", NOW, NOW)
    assert used.is_first("c", NOW + 490, NOW + 400)


def test_a_clock_that_is_set_back_a_little_makes_no_signature_valid_again():
    clock = Clock()
    used = OnceOnly(clock)
    assert used.is_first("a", NOW, NOW)
    clock.now += FRESH_SECONDS + SET_BACK_SECONDS
    assert not used.is_first("a", NOW, NOW + FRESH_SECONDS)


def fields(host, port=8998) -> RequestFields:
    return RequestFields(bootstrap_host=host, bootstrap_port=port, bootstrap_room=7)


def gate(**options) -> BootstrapGate:
    return BootstrapGate(ServerOptions(**options))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "0.0.0.0", "127.9.9.9"])
def test_without_a_secret_loopback_is_followed(host):
    assert gate().refusal(fields(host)) == ""


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "example.org", "localhost.example.org", ["127.0.0.1", "10.0.0.1"], "2130706433"]
)
def test_without_a_secret_nothing_else_is_followed(host):
    refusal = gate().refusal(fields(host))
    assert "--cluster-secret-file" in refusal
    assert "--allow-bootstrap" in refusal


def test_what_is_allowed_by_name_is_followed_for_any_client(tmp_path):
    (tmp_path / "secret").write_text(OLD)
    for options in ({}, {"cluster_secret_file": str(tmp_path / "secret")}):
        allowing = gate(allow_bootstrap="10.0.0.1:8998, [fd00::1]:9000", **options)
        assert allowing.refusal(fields("10.0.0.1")) == ""
        assert allowing.refusal(fields(["10.0.0.1", "10.0.0.1"], None)) == ""  # the default port
        assert allowing.refusal(fields("fd00::1", 9000)) == ""
        assert allowing.refusal(fields("10.0.0.1", 9000))
        assert allowing.refusal(fields(["10.0.0.1", "10.0.0.2"]))


def test_with_a_secret_only_what_a_router_signed_is_followed(tmp_path):
    (tmp_path / "secret").write_text(OLD)
    guarded = gate(cluster_secret_file=str(tmp_path / "secret"))
    assert "only a router" in guarded.refusal(fields("127.0.0.1"))
    signed = fields("127.0.0.1")
    signed.mark_signed()
    assert guarded.refusal(signed) == ""
    assert gate().refusal(signed.model_copy(update={"bootstrap_host": "10.0.0.1"})), "no secret, no signature"


def test_an_instance_without_a_secret_follows_any_address(tmp_path):
    (tmp_path / "secret").write_text(OLD)
    assert gate(insecure_cluster=True).refusal(fields("10.0.0.1")) == ""
    assert gate(insecure_cluster=True, cluster_secret_file=str(tmp_path / "secret")).refusal(fields("10.0.0.1"))


@pytest.mark.parametrize("with_secret", [False, True])
def test_requests_are_moved_to_this_host_and_to_those_that_options_name(tmp_path, with_secret):
    (tmp_path / "secret").write_text(NEW)
    secret = {"cluster_secret_file": str(tmp_path / "secret")} if with_secret else {}
    orders = gate(**secret, allow_bootstrap="10.0.0.1:8998", drain_to="10.0.0.2:8998")
    for host in ("127.0.0.1", "localhost", "::1"):
        assert orders.move_refusal([(host, 1)]) == ""
    assert orders.move_refusal([("10.0.0.1", 8998), ("10.0.0.2", 8998)]) == ""
    for target in (("10.0.0.1", 8999), ("10.0.0.3", 8998), ("169.254.169.254", 80)):
        assert "--allow-bootstrap" in orders.move_refusal([("127.0.0.1", 1), target])
    assert gate(insecure_cluster=True).move_refusal([("10.0.0.3", 1)]) == ""


def test_an_order_to_move_requests_to_a_stranger_is_refused_without_contacting_it():
    async def run(engine: FakeEngine) -> None:
        for path, body in (
            ("/migrate", {"rid": "x", "bootstrap_host": "169.254.169.254", "bootstrap_port": 80}),
            ("/drain", {"to": ["127.0.0.1:8998", "169.254.169.254:80"]}),
        ):
            answer = await engine.post(path, body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
            assert "169.254.169.254:80" in answer.json()["error"]["message"]
        assert engine.questions == []

    with_engine(run, handover="on")


@pytest.mark.parametrize("text", ["10.0.0.1", ":8998", "h:0", "h:x", "h:70000", "h:1 h:2"])
def test_what_is_no_address_is_not_allowed(text):
    with pytest.raises(ValueError, match="give HOST:PORT"):
        addresses("--allow-bootstrap", text)
    with pytest.raises(OptionError, match="--allow-bootstrap"):
        check_options(ServerOptions(allow_bootstrap=text))


def test_who_lets_others_reach_its_ports_needs_a_secret_or_says_that_it_wants_none(tmp_path):
    (tmp_path / "secret").write_text(OLD)
    open_to_all = {"disaggregation_mode": "decode", "host": "0.0.0.0", "no_keys": True}
    with pytest.raises(OptionError, match="--insecure-cluster"):
        check_options(ServerOptions(**open_to_all))
    check_options(ServerOptions(**open_to_all, insecure_cluster=True))
    check_options(ServerOptions(**open_to_all, cluster_secret_file=str(tmp_path / "secret")))
    check_options(ServerOptions(disaggregation_mode="decode", host="localhost"))
    check_options(ServerOptions(host="0.0.0.0", no_keys=True))  # it exchanges no KV
    with pytest.raises(OptionError, match="--insecure-cluster"):
        check_options(ServerOptions(host="10.0.0.1", handover="on"))
    with pytest.raises(OptionError, match="nothing to do"):
        check_options(ServerOptions(disaggregation_mode="prefill", handover="off"))
