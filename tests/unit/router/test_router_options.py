"""Router options: what is understood, what is refused."""

from pathlib import Path

import pytest

from pdserve.router.options import RouterOptions, RouterOptionsError, check_url, parse_prefill


def test_bootstrap_ports_follow_their_urls():
    tokens = ["http://a:30000/", "9000", "http://b:30000", "http://[::1]:30000", "9001"]
    assert parse_prefill(tokens) == [("http://a:30000", 9000), ("http://b:30000", None), ("http://[::1]:30000", 9001)]


@pytest.mark.parametrize(
    ("url", "spelling"),
    [
        *((url, url) for url in ("http://127.0.0.1:30000", "https://h", "http://decode-0.decode_2.ns.svc:30000")),
        *((f"http://{host}:30001", "http://localhost:30001") for host in ("localhost", "LOCALHOST", "localhost.")),
        ("HTTP://localhost:030001/", "http://localhost:30001"),
        *((url, "http://h") for url in ("http://h", "http://h/", "http://h:", "http://h:80", "http://h:0080/")),
        ("https://h:443", "https://h"),
        ("https://h:80", "https://h:80"),
        ("http://[0:0::1]:1", "http://[::1]:1"),
        ("http://[FE80::1%eth0]:1", "http://[fe80::1%eth0]:1"),
        ("http://0.0.0.0:1", "http://0.0.0.0:1"),
    ],
)
def test_a_url_has_one_spelling(url: str, spelling: str) -> None:
    assert check_url(url) == spelling
    assert check_url(spelling) == spelling


@pytest.mark.parametrize(
    "url",
    [
        *(
            f"http://{host}:1"
            for host in ("<script>", '"x', "a,b", "h;x", "h\\x", "h|a", "h%41", "a..b", ".", "..", "")
        ),
        *(f"http://{host}:1" for host in ("127.1", "0x7f000001", "127.0.0.01", "127.0.0.256", "2130706433", "a.1")),
        *(f"http://[{host}]:1" for host in ("", "x", "::1::", "::1%", '::1%"x', "127.0.0.1", "v1.x")),
        *(
            f"http://h{rest}"
            for rest in ("?", "#", "/?", "/#", "?a", "/v1", "//", ":0", ":-1", ":+1", ":1_0", ":99999")
        ),
        *(
            "ftp://h:1",
            "h:1",
            "",
            "http://",
            "//h:1",
            "http:h:1",
            "http://[::1",
            "http://h:1\n",
            " http://h:1",
            "http://h:٣",
        ),
    ],
)
def test_what_is_no_url_of_an_instance_is_refused(url: str) -> None:
    with pytest.raises(RouterOptionsError, match="is not an instance's URL: write it like"):
        check_url(url)


@pytest.mark.parametrize(
    "url", ["http://user:secret7@h:1", "http://secret7@h", "user:secret7@h:1", "http://h:1/@secret7"]
)
def test_a_url_with_a_password_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(RouterOptionsError, match="has no user name or password before an @") as refused:
        check_url(url)
    assert "secret7" not in str(refused.value)


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
        {"worker": ["http://a"], "max_held_event_bytes": -1},
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
