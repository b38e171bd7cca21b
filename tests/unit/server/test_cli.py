"""The command line: what it accepts, what it refuses and what it says then."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from pdserve.runtime.options import OptionError, check_options
from pdserve.server.cli import app
from pdserve.server.options import ServerOptions

RUNNERS = {
    "server": ("pdserve.server.instance", "run_instance"),
    "router": ("pdserve.router.process", "run_router"),
    "up": ("pdserve.server.cluster", "run_cluster"),
    "chat": ("pdserve.terminal.chat.run", "run_chat"),
    "check": ("pdserve.terminal.check.run", "run_check"),
}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options that a command would have run with."""
    options: list[Any] = []
    for module, function in RUNNERS.values():
        fake = ModuleType(module)
        setattr(fake, function, lambda given: options.append(given) or 7)
        monkeypatch.setitem(sys.modules, module, fake)
    return options


def call(*argv: str) -> Any:
    return app(list(argv), result_action="return_value")


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the message of a refused command line, on one line."""
    try:
        code = call(*argv)
    except SystemExit as e:
        code = e.code
    assert code == 2
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_flags_become_options(seen: list[Any]) -> None:
    argv = ["--model-path", "m.gguf", "--disaggregation-mode", "prefill", "--chunked-prefill-size", "-1"]
    assert call("server", *argv, "--disable-radix-cache") == 7
    assert seen == [
        ServerOptions(
            model_path="m.gguf", disaggregation_mode="prefill", chunked_prefill_size=-1, disable_radix_cache=True
        )
    ]


def test_router_urls_are_consumed_greedily(seen: list[Any]) -> None:
    urls = ["--prefill", "http://a:1", "9000", "--prefill", "http://b:1", "--decode", "http://c:1", "http://d:1"]
    assert call("router", *urls) == 7
    assert seen[0].prefill == ["http://a:1", "9000", "http://b:1"]
    assert seen[0].decode == ["http://c:1", "http://d:1"]


def test_config_file_lies_under_the_command_line(seen: list[Any], tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("page_size: 32\ndisable-radix-cache: true\nport: 5\nthreads: null\nchunked-prefill-size: -1\n")
    call("server", "--port", "6", "--config", str(config))
    assert seen == [ServerOptions(page_size=32, disable_radix_cache=True, port=6, chunked_prefill_size=-1)]
    config.write_text("prefill: ['http://a:1', 9000]\ndecode: 'http://b:1'\npolicy: random\n")
    call("router", "--config", str(config))
    call("router", "--config", str(config), "--prefill", "http://z:1")
    assert [(o.prefill, o.decode, o.policy) for o in seen[1:]] == [
        (["http://a:1", "9000"], ["http://b:1"], "random"),
        (["http://z:1"], ["http://b:1"], "random"),
    ]


def test_a_key_can_come_from_a_variable(
    seen: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("api-key: from-file\n")
    call("server", "--config", str(config))
    monkeypatch.setenv("PDSERVE_API_KEY", "from-variable")
    call("server", "--config", str(config))
    call("router", "--worker", "http://a:1")
    call("up")
    call("server", "--api-key", "from-flag")
    expected = ["from-file", "from-variable", "from-variable", "from-variable", "from-flag"]
    assert [options.api_key for options in seen] == expected
    # A secret that went missing opens no server.
    monkeypatch.setenv("PDSERVE_API_KEY", "")
    assert "--api-key" in refusal(capsys, "server")
    assert "--api-key" in refusal(capsys, "router", "--worker", "http://a:1")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("pagesize: 3", 'no option "pagesize". Did you mean "page-size"?'),
        ("config: x", 'no option "config"'),
        ("page-size: 1\npage_size: 2", '"page-size" is given twice'),
        ("page-size: many", 'unable to convert "many" into int'),
        ("- 1", "flag-name: value"),
        ("a: [", "while parsing"),
    ],
)
def test_a_bad_config_file_is_refused(
    content: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(content)
    assert says in refusal(capsys, "server", "--config", str(config))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["server", "--prot", "1"], "Unknown option: --prot. Did you mean --port?"),
        (["server", "smollm2"], "smollm2"),
        (["server", "--page-size", "x"], "--page-size"),
        (["server", "--dtype", "int3"], "float32"),
        (["server", "--config", "/nowhere.yaml"], "No such file"),
        (["serve"], 'Did you mean "server"?'),
        (["router"], "nothing to route to"),
        (["router", "--prefill", "http://a:1"], "--decode"),
        (["up", "--prefill", "0"], "--prefill 0"),
        (["up", "--page-size", "3"], "power of two"),
        (["up", "--disaggregation-mode", "prefill"], "--disaggregation-mode"),
        (["chat", "--url", "127.0.0.1:8000"], "--url: '127.0.0.1:8000' is not"),
        (["chat", "--max-tokens", "0"], "--max-tokens is 0"),
        (["chat", "--temperature", "nan"], "--temperature is nan"),
        (["check", "--url", "ftp://a"], "write it like"),
        (["check", "--api-key-file", "key"], "name it with --url"),
        (["check", "--ports", "8000", "70000"], "70000 is not a port"),
    ],
)
def test_a_bad_command_line_is_refused(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refusal(capsys, *argv)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"chunked_prefill_size": 8}, "like 16, or -1"),
        ({"chunked_prefill_size": 100}, "like 96, or -1"),
        ({"chunked_prefill_size": 0}, "--chunked-prefill-size"),
        ({"chunked_prefill_size": -1, "itl_budget_ms": 40.0}, "--itl-budget-ms cuts prompts"),
        ({"itl_budget_ms": -1.0}, "--itl-budget-ms is -1"),
        ({"ttft_target_ms": math.nan}, "--ttft-target-ms is nan"),
        ({"ttft_target_ms": 500.0, "itl_budget_ms": 0.0}, "--ttft-target-ms raises what"),
        ({"page_size": 0}, "power of two"),
        ({"page_size": 24, "chunked_prefill_size": 48}, "power of two"),
        ({"port": 8998, "disaggregation_mode": "prefill"}, "give them different ones"),
        ({"port": 70000}, "--port"),
        ({"disaggregation_bootstrap_port": 0, "disaggregation_mode": "decode"}, "--disaggregation-bootstrap-port is 0"),
        ({"max_running_requests": 0}, "--max-running-requests is 0"),
        ({"max_total_tokens": -5}, "at least one page"),
        ({"mem_fraction_static": 1.0}, "between 0 and 1"),
        ({"max_total_tokens": 64, "max_total_tokens_limit": 48}, "no less than what it begins with"),
        ({"max_total_tokens_limit": 2**31 - 8}, "has at most 2147483632 tokens"),
        (
            {"max_total_tokens_limit": 64, "handover": "on", "disaggregation_transfer_backend": "nixl"},
            "nixl registers the whole pool's memory",
        ),
        ({"mem_fraction_static": float("nan")}, "between 0 and 1"),
        ({"watchdog_timeout": float("inf")}, "--watchdog-timeout"),
        ({"drain_timeout": -1.0}, "--drain-timeout"),
        ({"disaggregation_heartbeat_timeout": 0.1}, "longer than"),
        ({"schedule_policy": "lpm", "disable_radix_cache": True}, "drop one of the two"),
        ({"cpus": "3-1"}, "backwards"),
        ({"cpus": "0,x"}, "like 0,2-3"),
        ({"compute_nice": 20}, "--compute-nice is 20"),
        ({"compute_nice": -1}, "0 to 19"),
        ({"api_key": "ключ"}, "ASCII"),
        ({"api_key": ""}, "--api-key is empty"),
        ({"chat_template": "/nowhere.jinja"}, "no such file"),
        ({"random_seed": -1}, "--random-seed"),
        ({"base_gpu_id": -1}, "--base-gpu-id is -1"),
        (
            {"disaggregation_transfer_backend": "cuda_ipc", "disaggregation_mode": "decode", "device": "cpu"},
            "--device cpu has none: use shm",
        ),
        (
            {"disaggregation_transfer_backend": "cuda_ipc", "disaggregation_mode": "decode", "kv_staging_size": 1.0},
            "drop one of the two",
        ),
        ({"tp_size": 0}, "--tp-size is 0"),
        ({"tp_size": 2, "threads": 3}, "--threads 3 does not divide among the 2 ranks"),
        ({"tp_size": 3, "nnodes": 2, "dist_init_addr": "a:1"}, "--tp-size 3 does not divide among --nnodes 2"),
        ({"tp_size": 2, "nnodes": 2}, "needs --dist-init-addr"),
        (
            {"tp_size": 2, "device": "cuda", "disaggregation_mode": "decode"},
            "give an instance that exchanges KV one GPU",
        ),
        ({"tp_size": 2, "nnodes": 2, "node_rank": 2, "dist_init_addr": "a:1"}, "it must be 0 to 1"),
        ({"dist_init_addr": "a"}, "--dist-init-addr a: give HOST:PORT"),
        (
            {"tp_size": 2, "nnodes": 2, "dist_init_addr": "a:1", "disaggregation_mode": "decode"},
            "leaves each host a part of the KV",
        ),
        ({"pp_size": 2}, "no pipeline parallelism"),
    ],
)
def test_options_that_cannot_work_are_refused_with_what_to_do(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_options(replace(ServerOptions(), **changes))
    assert says in str(caught.value)


def test_defaults_and_usual_combinations_pass() -> None:
    check_options(ServerOptions())
    check_options(ServerOptions(port=8998, cpus="0,2-3", mem_fraction_static=0.5, max_total_tokens=16))
    for size in (None, 0.0):
        check_options(
            ServerOptions(
                disaggregation_mode="prefill", disaggregation_transfer_backend="cuda_ipc", kv_staging_size=size
            )
        )
    check_options(ServerOptions(tp_size=4, nnodes=2, node_rank=1, dist_init_addr="[::1]:29500", threads=4))


@pytest.mark.parametrize("command", RUNNERS)
def test_help_explains_every_flag_in_100_columns(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    # A console keeps the width that it was made with, and another test may have made the command line's.
    app([command, "--help"], console=Console(width=100), result_action="return_value")
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert set(re.findall(r"--no-[\w-]+", text)) <= {"--no-keys"}  # no flag has a negative
    if command == "server":
        # A long flag goes on in the next line of its column.
        cells = [line[2:37].strip() for line in text.splitlines()]
        column = "".join(cell if len(cell) == 35 else f"{cell} " for cell in cells)
        for item in fields(ServerOptions):
            assert f"--{item.name.replace('_', '-')} " in text + column


def test_help_loads_neither_messages_nor_benchmarks() -> None:
    """``test_light_processes.py`` has the libraries that the command line does not load."""
    unwanted = ("zmq", "pdserve.benchmark")
    code = f"import sys, pdserve.server.cli; sys.exit(any(m in sys.modules for m in {unwanted}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
