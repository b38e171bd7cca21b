"""Router options: what is understood, what is refused."""

from pathlib import Path

import pytest

from pdserve.router.options import RouterOptions, RouterOptionsError, parse_prefill


def test_bootstrap_ports_follow_their_urls():
    tokens = ["http://a:30000/", "9000", "http://b:30000", "http://[::1]:30000", "9001"]
    assert parse_prefill(tokens) == [("http://a:30000", 9000), ("http://b:30000", None), ("http://[::1]:30000", 9001)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill": ["http://a"]},
        {"decode": ["http://a"], "worker": ["http://b"]},
        {"prefill": ["9000", "http://a"], "decode": ["http://b"]},
        {"prefill": ["http://a", "9000", "9001"], "decode": ["http://b"]},
        {"prefill": ["http://a", "70000"], "decode": ["http://b"]},
        {"worker": ["127.0.0.1:30000"]},
        {"worker": ["http://a/v1"]},
        {"worker": ["http://a b"]},
        {"worker": ["http://a\n"]},
        {"worker": ["http://a"], "member_drain_timeout": 0.0},
        {"allow_no_instances": True},
        {"allow_no_instances": True, "api_key": "k", "retries": -1},
        {"worker": ["http://a:99999"]},
        {"worker": ["http://a"], "retries": -1},
        {"worker": ["http://a"], "retries_after_crash": -1},
        {"worker": ["http://a"], "max_held_body_bytes": 2**20},
        {"worker": ["http://a"], "retry_window": -0.1},
        {"worker": ["http://a"], "max_body_bytes": 0},
        {"worker": ["http://a"], "cache_threshold": -0.1},
        {"worker": ["http://a"], "cache_threshold": 1.1},
        {"worker": ["http://a"], "cache_threshold": float("nan")},
        {"worker": ["http://a"], "balance_abs_threshold": -1},
        {"worker": ["http://a"], "balance_rel_threshold": 0.9},
        {"worker": ["http://a"], "cache_table_blocks": 0},
        *(
            {"worker": ["http://a"], name: 0.0}
            for name in ("health_check_interval", "health_check_timeout", "hang_timeout", "connect_timeout")
        ),
        *({"worker": ["http://a"], f"{name}_timeout": 0.0} for name in ("first_byte", "idle", "send", "keep_alive")),
    ],
)
def test_what_cannot_work_is_refused(options):
    with pytest.raises(RouterOptionsError):
        RouterOptions(**options).check()


def test_a_router_may_start_without_instances_if_it_is_asked_to_and_an_admin_can_add_some(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s" * 40)
    for admin in ({"api_key": "k"}, {"cluster_secret_file": str(tmp_path / "secret")}):
        RouterOptions(allow_no_instances=True, **admin).check()
        RouterOptions(allow_no_instances=True, prefill=["http://a"], **admin).check()
        with pytest.raises(RouterOptionsError, match=r"nothing to route to: .* or --allow-no-instances"):
            RouterOptions(**admin).check()
    with pytest.raises(RouterOptionsError, match="--admin-key-file or a single API key"):
        RouterOptions(allow_no_instances=True).check()
