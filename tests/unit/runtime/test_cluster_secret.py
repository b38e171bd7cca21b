"""The cluster secret's file, what is derived from it, and what a router's signature confirms."""

from __future__ import annotations

import time

import pytest
from support.fake_engine import FakeEngine, with_engine

from pdserve.runtime import cluster_secret
from pdserve.runtime.cluster_secret import (
    FRESH_SECONDS,
    SET_BACK_SECONDS,
    BootstrapSignature,
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
from pdserve.server.http.errors import ApiError
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


def test_a_signature_counts_once_for_what_it_signed(tmp_path):
    router, instance = (BootstrapSignature(written(tmp_path, OLD).for_routers()) for _ in range(2))
    said = ("10.0.0.1", 8998, 7)
    signature = router.sign(*said, NOW)
    for other in (("10.0.0.2", 8998, 7), ("10.0.0.1", 8999, 7), ("10.0.0.1", 8998, 8), (["10.0.0.1"], 8998, 7)):
        assert "not that of a router" in instance.problem(signature, *other, NOW)
    assert "not that of a router" in instance.problem("1" + signature, *said, NOW)
    assert instance.problem(signature, *said, NOW) is None
    for again in (0, 1, FRESH_SECONDS):
        assert "used before" in instance.problem(signature, *said, NOW + again)
    assert instance.problem(router.sign("h", 1, 2, NOW), "h", 1, 2, NOW + FRESH_SECONDS) is None
    late = router.sign(*said, NOW - FRESH_SECONDS - 1)
    assert "clocks" in instance.problem(late, *said, NOW)
    assert "clocks" in instance.problem(router.sign(*said, NOW + FRESH_SECONDS + 1), *said, NOW)


class Clock:
    """A monotonic clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_what_was_used_is_forgotten_when_it_is_too_old_anyway(tmp_path):
    clock = Clock()
    router, instance = (BootstrapSignature(written(tmp_path, OLD).for_routers(), clock) for _ in range(2))
    for i in range(10):
        assert instance.problem(router.sign("h", 1, i, NOW), "h", 1, i, NOW) is None
    assert len(instance._used) == 10
    later = NOW + FRESH_SECONDS + SET_BACK_SECONDS + 1
    clock.now += FRESH_SECONDS + SET_BACK_SECONDS + 1
    assert instance.problem(router.sign("h", 1, 99, later), "h", 1, 99, later) is None
    assert len(instance._used) == 1


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


@pytest.mark.parametrize("seconds", [1, 100_000])
def test_after_a_jump_of_the_clock_and_back_requests_pass_and_none_does_twice(tmp_path, seconds):
    """The clocks of router and instance jump together, as they do on one host."""
    clock, jump = Clock(), 86_400
    router, instance = (BootstrapSignature(written(tmp_path, OLD).for_routers(), clock) for _ in range(2))

    def ask(wall: float, signature: str = "") -> str | None:
        return instance.problem(signature or router.sign("h", 1, 2, wall), "h", 1, 2, wall)

    before = router.sign("h", 1, 2, NOW)
    assert ask(NOW, before) is None
    clock.now += seconds
    ahead = NOW + jump + seconds
    during = router.sign("h", 1, 2, ahead)
    assert ask(ahead, during) is None
    assert ask(ahead, during) == "the signature was used before"
    clock.now += 1
    back = NOW + seconds + 1
    assert ask(back) is None
    assert ask(back, before) is not None
    assert ask(back, during) is not None
    clock.now += 1
    assert ask(back + 1) is None


def test_without_memory_for_more_signatures_a_request_is_told_to_come_again(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster_secret, "MAX_REMEMBERED", 0)
    (tmp_path / "secret").write_text(OLD)
    (tmp_path / "secret").chmod(0o600)
    gate = BootstrapGate(ServerOptions(cluster_secret_file=str(tmp_path / "secret")))
    signature = BootstrapSignature(written(tmp_path, OLD).for_routers()).sign("h", 8998, 7, time.time())
    with pytest.raises(ApiError) as refused:
        gate.refusal(fields("h", signature=signature))
    assert (refused.value.status, refused.value.code) == (503, "overloaded")


def test_a_secret_can_be_changed_while_requests_come(tmp_path):
    old, both, turned, new = (written(tmp_path, *lines) for lines in ((OLD,), (OLD, NEW), (NEW, OLD), (NEW,)))
    for i, (router, instance) in enumerate(((old, both), (both, old), (both, turned), (turned, both), (turned, new))):
        signature = BootstrapSignature(router.for_routers()).sign("h", 1, i, NOW)
        assert BootstrapSignature(instance.for_routers()).problem(signature, "h", 1, i, NOW) is None
    assert BootstrapSignature(new.for_routers()).problem(
        BootstrapSignature(old.for_routers()).sign("h", 1, 1, NOW), "h", 1, 1, NOW
    )


def fields(host, port=8998, signature=None) -> RequestFields:
    return RequestFields(bootstrap_host=host, bootstrap_port=port, bootstrap_room=7, bootstrap_signature=signature)


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
    assert "not that of a router" in guarded.refusal(fields("127.0.0.1", signature=f"5.{'0' * 64}"))


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
