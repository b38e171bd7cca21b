"""Every file in examples/, run as a user runs it, and held to what examples/README.md says that it prints.

``openai_client.py`` needs a package that ``make setup`` does not install: ``tests/clients/test_packages.py`` runs it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.machine import limit
from support.orphans import end_with_this_process
from support.processes import ONE_THREAD, Launched, Pair, free_ports, is_free, launched, pd_pair
from support.scripted_model import scripted_args

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
ROW = re.compile(r"^\| \[`([^`]+)`\]\((\S+)\) \|", re.MULTILINE)
SMALL = (*ONE_THREAD, "--max-total-tokens", "4096")
AGAINST_A_SERVER = {
    *("stream_with_curl.sh", "stream_tokens.py", "call_tools.py", "json_schema.py", "replay_trace.sh"),
}
WITH_OWN_SERVERS = {"prefill_and_decode_by_hand.sh", "sessions_across_restarts.sh"}
BY_CLIENTS = {"openai_client.py"}
PDSERVE = f"""#!/bin/sh
exec "{sys.executable}" -P -c '
import sys
from pdserve.runtime.child import die_with_parent
from pdserve.server.cli import main
die_with_parent(int(sys.argv.pop(1)))
main()
' "$PPID" "$@"
"""
"""The command as examples find it on the PATH. It ends with the example, even if that is killed."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A pair of the default model, as ``make run`` starts it."""
    with pd_pair(tmp_path_factory.mktemp("examples"), "tcp", "--max-total-tokens", "4096") as served:
        yield served
        served.assert_all_returned()


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """A server of a model with tools, which follows a script."""
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    outputs = {"weather in Paris": call, '"sky": "clear"': "It is 18 degrees in Paris, and clear."}
    folder = tmp_path_factory.mktemp("tools")
    with launched(folder, "tools", "server", *SMALL, *scripted_args(folder, outputs)) as server:
        server.wait_healthy()
        yield server


def run(name: str, folder: Path, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Run an example in ``folder``, and return its exit status and what it prints to stdout and stderr.

    Its temporary files must be gone when it has ended, and its servers too.
    """
    commands, scratch = folder / "commands", folder / "scratch"
    commands.mkdir()
    scratch.mkdir()
    (commands / "pdserve").write_text(PDSERVE)
    (commands / "pdserve").chmod(0o700)
    path = f"{commands}:{os.environ['PATH']}"
    argv = [sys.executable, "-P"] if name.endswith(".py") else []
    process = subprocess.Popen(
        [*argv, EXAMPLES / name, *arguments],
        cwd=folder,
        env={**os.environ, "PATH": path, "TMPDIR": str(scratch), **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    end_with_this_process(process.pid)
    try:
        out, err = process.communicate(timeout=limit(60))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    left = [path.name for path in scratch.iterdir() if not path.name.startswith("pdserve-")]
    assert left == [], f"{out}\n{err}"
    return process.returncode, out, err


def printed(name: str, folder: Path, *arguments: str, **variables: str) -> str:
    """Run an example, which must succeed, and return what it prints. It has at most 20,000 characters."""
    status, out, err = run(name, folder, *arguments, **variables)
    assert status == 0, f"{out}\n{err}"
    assert len(out) < 20_000
    return out


def ports() -> dict[str, str]:
    """Return free ports for the examples that start servers, by the variables that choose them."""
    names = ("PORT", "ROUTER_PORT", "PREFILL_PORT", "DECODE_PORT", "BOOTSTRAP_PORT")
    return dict(zip(names, map(str, free_ports(len(names))), strict=True))


def answers(out: str) -> list[dict]:
    """Return the lines of JSON in ``out``."""
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def test_every_example_is_in_the_table_and_has_a_test() -> None:
    there = {path.name for path in EXAMPLES.iterdir() if path.name not in ("README.md", "__pycache__")}
    rows = ROW.findall((EXAMPLES / "README.md").read_text())
    assert sorted(name for _, name in rows) == sorted(there)
    assert there == AGAINST_A_SERVER | WITH_OWN_SERVERS | BY_CLIENTS
    tests = {*Path(__file__).read_text().split('"'), *(ROOT / "tests/clients/test_packages.py").read_text().split('"')}
    assert there <= tests


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.*")), ids=lambda path: path.name)
def test_an_example_is_short_and_begins_with_its_command(path: Path) -> None:
    if path.name == "README.md":
        return
    text = path.read_text()
    [command] = [command for command, name in ROW.findall((EXAMPLES / "README.md").read_text()) if name == path.name]
    assert f"{command} [" in text[:500]
    assert len(text.splitlines()) <= 60
    assert os.access(path, os.X_OK) == (path.suffix == ".sh")


def test_curl_streams_events(pair: Pair, tmp_path: Path) -> None:
    out = printed("stream_with_curl.sh", tmp_path, pair.router.url)
    *events, done = [line.removeprefix("data: ") for line in out.splitlines() if line]
    assert done == "[DONE]"
    parsed = [json.loads(event) for event in events]
    assert "Paris" in "".join(event["text"] for event in parsed)
    assert sum(len(event["output_ids"]) for event in parsed) == 16
    assert parsed[-1]["meta_info"]["completion_tokens"] == 16
    assert parsed[-1]["meta_info"]["timing"]["transfer_bytes"] > 0


def test_a_stream_ends_with_a_table_of_its_phases(pair: Pair, tmp_path: Path) -> None:
    text, _, table = printed("stream_tokens.py", tmp_path, pair.router.url).partition("\n\n")
    assert text == "The capital of France is Paris."
    head, *phases, total, last = [line.split() for line in table.splitlines()]
    assert head == ["phase", "instance", "process", "ms"]
    assert {"prefill", "transfer", "decode"} <= {phase for phase, *_ in phases}
    assert {instance for _, instance, *_ in phases} == {"prefill", "decode"}
    assert sum(float(ms) for *_, ms in phases) == pytest.approx(float(total[1]), abs=0.05 * len(phases) + 0.06)
    assert last[:2] == ["8", "tokens,"]


def test_a_model_calls_a_function_and_answers_with_its_result(with_tools: Launched, tmp_path: Path) -> None:
    assert printed("call_tools.py", tmp_path, with_tools.url).splitlines() == [
        'call: get_weather({"city": "Paris"})',
        'result: {"city": "Paris", "celsius": 18, "sky": "clear"}',
        "answer: It is 18 degrees in Paris, and clear.",
    ]


def test_a_model_without_tools_is_named_as_the_reason(pair: Pair, tmp_path: Path) -> None:
    status, out, err = run("call_tools.py", tmp_path, pair.router.url)
    assert (status, out) == (1, "")
    assert "400" in err
    assert "the model's chat template has no tools" in err


def test_an_answer_matches_a_schema(pair: Pair, tmp_path: Path) -> None:
    out = printed("json_schema.py", tmp_path, pair.router.url)
    assert out.splitlines() == ["name: Maria", "age:  34", "city: Lisbon"]


def test_a_trace_is_replayed(pair: Pair, tmp_path: Path) -> None:
    out = printed("replay_trace.sh", tmp_path, pair.router.url)
    cells = {
        row[1].strip(): [cell.strip() for cell in row[2:-1]]
        for row in map(re.compile("[│]").split, out.splitlines())
        if len(row) > 3
    }
    assert cells["requests complete / failed"] == ["6 / 0"]
    assert cells["input tokens, cached"][0].startswith("1,768, ")
    for name in ("TTFT", "ITL", "TPOT", "E2E"):
        mean, median, p90, p99, most = (float(ms.replace(",", "")) for ms in cells[name])
        assert 0 < median <= p90 <= p99 <= most
        assert 0 < mean <= most


def test_a_trace_of_ones_own_is_replayed(pair: Pair, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 16, "hash_ids": [7]}\n' * 2)
    out = printed("replay_trace.sh", tmp_path, pair.router.url, str(trace))
    assert "2 / 0" in out


def test_prefill_decode_and_router_start_and_stop_one_by_one(tmp_path: Path) -> None:
    chosen = ports()
    out = printed("prefill_and_decode_by_hand.sh", tmp_path, *SMALL, **chosen)
    [answer] = answers(out)
    assert "Paris" in answer["text"]
    assert answer["meta_info"]["timing"]["transfer_bytes"] > 0
    lines = [line for line in out.splitlines() if not line.startswith("{")]
    assert lines == [
        f"The prefill is healthy at port {chosen['PREFILL_PORT']}.",
        f"The decode is healthy at port {chosen['DECODE_PORT']}.",
        f"The router is healthy at port {chosen['ROUTER_PORT']}.",
        "All three have stopped.",
    ]
    assert all(is_free(int(port)) for port in chosen.values())


def test_a_session_is_restored_after_a_kill(tmp_path: Path) -> None:
    chosen = ports()
    out = printed("sessions_across_restarts.sh", tmp_path, *SMALL, **chosen)
    saved, restored = answers(out)
    assert saved["kv"] == "stored"
    assert saved["prompt_tokens"] > saved["kv_tokens"] > 256
    assert restored["meta_info"]["cached_tokens"] == saved["kv_tokens"]
    assert "Paris" in restored["text"]
    assert "The server was killed." in out
    assert out.endswith("The server has stopped.\n")
    assert is_free(int(chosen["PORT"]))


@pytest.mark.parametrize("name", sorted(AGAINST_A_SERVER))
def test_without_a_server_an_example_says_how_to_start_one(name: str, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    status, out, err = run(name, tmp_path, url)
    assert (status, out) == (1, "")
    [line] = err.splitlines()
    assert line.startswith(f"No server is ready at {url}")
    assert line.endswith("Start one with: make run")


@pytest.mark.parametrize("name", sorted(WITH_OWN_SERVERS))
def test_a_server_that_does_not_start_is_shown(name: str, tmp_path: Path) -> None:
    status, _, err = run(name, tmp_path, "--max-total-tokens", "many", **ports())
    assert status == 1
    assert "did not start:" in err
    assert "many" in err


@pytest.mark.parametrize("name", sorted(WITH_OWN_SERVERS))
def test_a_port_in_use_is_named(name: str, pair: Pair, tmp_path: Path) -> None:
    taken = str(pair.router.port)
    status, out, err = run(name, tmp_path, **{**ports(), "PORT": taken, "ROUTER_PORT": taken})
    assert (status, out) == (1, "")
    assert err.startswith(f"Port {taken} is in use.")


def test_without_its_package_an_example_says_how_to_install_it(tmp_path: Path) -> None:
    """An interpreter with no packages at all stands for one without openai."""
    argv = [sys.executable, "-I", "-S", EXAMPLES / "openai_client.py"]
    ran = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr == "The package openai is missing. Install it with: pip install openai\n"
