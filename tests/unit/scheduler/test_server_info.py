"""``/server_info`` checks the memory's invariants while no request waits, and never else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.scrape import parts_of
from support.sim import SimInstance, make_options
from support.sim_tiers import TieredSim

from pdserve.mem_cache.errors import InvariantViolation
from pdserve.messages.control import ServerInfoReq
from pdserve.scheduler.features.idle_check import IdleCheck, InvariantResult
from pdserve.scheduler.features.server_info import ServerInfoFeature, server_info


def test_the_books_are_looked_at_while_the_instance_is_idle_only(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = SimInstance()
    verdict = InvariantResult.of(sim.scheduler, InvariantResult())
    assert verdict == InvariantResult("ok", 0)
    sim.submit("a", range(10), max_new_tokens=4)
    sim.plan()

    def check() -> None:
        raise InvariantViolation("page 3 is lost")

    monkeypatch.setattr(sim.scheduler, "check_invariants", check)
    assert InvariantResult.of(sim.scheduler, verdict) is verdict
    shown = server_info(sim.scheduler, "epoch", verdict)
    assert (shown["invariants"], shown["invariants_steps_ago"]) == ("ok", sim.scheduler.counters.steps)
    monkeypatch.undo()
    sim.run_until_idle()
    monkeypatch.setattr(sim.scheduler, "check_invariants", check)
    broken = InvariantResult.of(sim.scheduler, verdict)
    assert server_info(sim.scheduler, "epoch", broken)["invariants"] == "page 3 is lost"
    assert server_info(sim.scheduler, "epoch", broken)["invariants_steps_ago"] == 0


def test_before_the_first_idle_moment_it_says_so() -> None:
    sim = SimInstance()
    sim.submit("a", range(10), max_new_tokens=4)
    shown = server_info(sim.scheduler, "epoch", InvariantResult.of(sim.scheduler, InvariantResult()))
    assert (shown["invariants"], shown["invariants_steps_ago"]) == (None, None)


def test_it_shows_no_tag_that_messages_bear_between_processes() -> None:
    scheduler = TieredSim().scheduler
    info = ServerInfoFeature(scheduler, "epoch", IdleCheck(scheduler), parts_of(scheduler))
    shown = info.report(ServerInfoReq(), 0.0).info
    assert shown["tiers"]["store"]["breaker"] == "closed"
    assert not {path for path in paths(shown) if path.endswith(".type")}


def paths(value: object, path: str = "") -> Iterator[str]:
    """Yield the path of every entry of an object, at any depth."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield f"{path}.{name}"
        yield from paths(inner, f"{path}.{name}")


def test_no_option_tells_a_password() -> None:
    url = "redis://pd:S3cret@10.0.0.9:6379/0"
    sim = SimInstance(make_options(api_key="a-key", hicache_storage_url=url, kv_events_endpoint="tcp://127.0.0.1:5557"))
    options = server_info(sim.scheduler, "epoch", InvariantResult())["options"]
    assert options["hicache_storage_url"] == "redis://***@10.0.0.9:6379/0"
    assert (options["api_key"], options["kv_events_endpoint"]) == ("***", "tcp://127.0.0.1:5557")
    assert not any(secret in str(options) for secret in ("S3cret", "a-key"))


def test_the_url_of_a_store_may_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text("redis://pd:S3cret@10.0.0.9:6379/0\n")
    options = make_options(hicache_storage_url_file=str(file))
    assert options.storage_url == "redis://pd:S3cret@10.0.0.9:6379/0"
    assert make_options(hicache_storage_url="/data/kv").storage_url == "/data/kv"
