"""Every example in README.md and docs/*.md that talks to a server, run against servers of the default model.

A router, a prefill and a decode stand where the examples have them: at ports 8000, 30000 and 30001. Once more, one
unified server stands at all three. The commands are taken from the pages as they are; only addresses change. What each
answers is held to a table, so a new example has to say what it answers.
``tests/unit/repository/test_examples.py`` checks all other kinds of examples.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.admin_key import ADMIN_KEY
from support.doc_examples import Command, Kind, commands, kind_of
from support.machine import limit
from support.processes import ONE_THREAD, Pair, launched, pd_pair

EXAMPLE_SECONDS = 60.0
QUESTION = "What is the capital of France?"
SMALL = ("--kv-debug", "--max-total-tokens", "4096")


def session_args(folder: Path) -> list[str]:
    """Flags for sessions in ``folder``, and for a store that keeps their KV."""
    store = ["--enable-hierarchical-cache", "--hicache-storage-backend", "file"]
    return ["--kv-sessions-dir", str(folder / "sessions"), *store, "--hicache-storage-url", str(folder / "kv")]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The default model. The prefill has what the pages' other examples start it with: sessions, a store, checks."""
    folder = tmp_path_factory.mktemp("examples")
    with pd_pair(folder, "tcp", *SMALL, prefill_args=session_args(folder)) as served:
        yield served


def script(command: Command, pair: Pair) -> str:
    """Return the command with the settings of its block before it, and with this pair's addresses."""
    before = [
        other.text
        for other in commands()
        if other.page == command.page
        and command.line - 3 < other.line < command.line
        and re.match(r"\w+(='|\(\) )", other.text)
    ]
    text = "\n".join([*before, command.text])
    for port, server in ((8000, pair.router), (30000, pair.prefill), (30001, pair.decode)):
        text = re.sub(rf"(http://)?(localhost|127\.0\.0\.1|10\.0\.0\.5):{port}\b", server.url, text)
    if "8998" in text:
        text = text.replace("8998", str(pair.prefill.info()["disaggregation"]["bootstrap_port"]))
    if "--url" not in text:
        text = text.replace("pdserve chat", f"pdserve chat --url {pair.router.url}")
    return f'set -o pipefail\npdserve() {{ "{sys.executable}" -P -m pdserve.server.cli "$@"; }}\n{text}\n'


def run(command: Command, pair: Pair, folder: Path) -> str:
    """Run an example, which must succeed, and return what it prints."""
    (folder / "questions.txt").write_text(f"{QUESTION}\n")
    (folder / "admin-key").write_text(f"{ADMIN_KEY}\n")
    ran = subprocess.run(
        ["bash", "-c", script(command, pair)],
        cwd=folder,
        input=f"{QUESTION}\n",
        capture_output=True,
        text=True,
        timeout=limit(EXAMPLE_SECONDS),
    )
    assert ran.returncode == 0, f"{command.text}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def is_stream_about_paris(out: str, folder: Path) -> None:
    events = [line.removeprefix("data: ") for line in out.splitlines() if line]
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    assert "Paris" in last["text"]
    assert 1 < last["meta_info"]["completion_tokens"] <= 32
    assert last["meta_info"]["timing"]["prefill_ms"] > 0


def is_paris(out: str, folder: Path) -> None:
    answer = json.loads(out)
    (choice,) = answer["choices"]
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] <= 64


def is_said_paris(out: str, folder: Path) -> None:
    said = out or (folder / "answers.txt").read_text()
    assert "Paris" in said
    assert len(said) < 2000


def are_lines_until_done(out: str, folder: Path) -> None:
    *lines, last = map(json.loads, out.splitlines())
    assert "".join(line["message"]["content"] for line in lines).strip()
    assert last["done"]
    assert 1 <= last["eval_count"] <= 16


def are_embeddings(out: str, folder: Path) -> None:
    vectors = [entry["embedding"] for entry in json.loads(out)["data"]]
    assert [len(vector) for vector in vectors] == [8, 8]
    assert [sum(value * value for value in vector) for vector in vectors] == pytest.approx([1, 1], abs=1e-5)


def has_keys(*names: str) -> Callable[[str, Path], None]:
    def check(out: str, folder: Path) -> None:
        assert set(names) <= set(json.loads(out))

    return check


def are_two_legs(out: str, folder: Path) -> None:
    legs = [json.loads(found) for found in re.findall(r"\{.*?\}(?=\{\"text\"|$)", out.strip(), re.DOTALL)]
    assert sorted(leg["meta_info"]["completion_tokens"] for leg in legs) == [1, 32]


def session(**expected: Any) -> Callable[[str, Path], None]:
    def check(out: str, folder: Path) -> None:
        parsed = json.loads(out)
        assert {name: parsed[name] for name in expected} == expected

    return check


def says(*words: str) -> Callable[[str, Path], None]:
    def check(out: str, folder: Path) -> None:
        assert all(word in out for word in words), out

    return check


def is_empty(out: str, folder: Path) -> None:
    assert out == ""


ANSWERS: dict[str, Callable[[str, Path], None]] = {
    "curl -N http://127.0.0.1:8000/generate": is_stream_about_paris,
    "curl http://127.0.0.1:8000/v1/chat/completions": is_paris,
    "curl http://127.0.0.1:8000/api/chat": are_lines_until_done,
    "curl http://127.0.0.1:8000/v1/embeddings": are_embeddings,
    "curl http://127.0.0.1:8000/generate -d": has_keys("text", "output_ids", "meta_info"),
    "curl http://127.0.0.1:8000/metrics": says("# HELP pdserve_router_", "# TYPE pdserve_router_"),
    "curl http://127.0.0.1:8000/server_info": has_keys("role", "router", "instances"),
    "ask localhost:30000/server_info | jq .kv_debug": has_keys("compared_pages"),
    "diff <(hashes": is_empty,
    'curl http://127.0.0.1:30000/generate -d "$BODY" &': are_two_legs,
    "pdserve chat": is_said_paris,
    "cat questions.txt | pdserve chat": is_said_paris,
    "pdserve check --url": says("router", "no problems"),
    'eval "$(pdserve completion bash)"': is_empty,
    "curl localhost:30000/kv/snapshot": session(name="report", output_tokens=0),
    "curl localhost:30000/kv/restore": session(name="report", resumable=True),
}
"""How each example's output is looked at, by how its command begins."""
UNIFIED_ANSWERS = ANSWERS | {
    "curl http://127.0.0.1:8000/metrics": says("# HELP pdserve_step_", "# TYPE pdserve_step_"),
    "curl http://127.0.0.1:8000/server_info": has_keys("role", "version", "pool"),
    "pdserve check --url": says("unified", "no problems"),
}
EXAMPLES = [command for command in commands() if kind_of(command) is Kind.LIVE]
PAIR_PAGE = "docs/disaggregation.md"
"""Its examples need two instances."""


def answers_as_it_should(
    command: Command, pair: Pair, folder: Path, answers: dict[str, Callable[[str, Path], None]]
) -> None:
    """Run one example, and check what it prints."""
    checks = [check for begin, check in answers.items() if command.text.startswith(begin)]
    if re.match(r"\w+(='|\(\) )", command.text):
        checks = [is_empty]
    assert len(checks) == 1, f"say in ANSWERS what {command.text} answers"
    checks[0](run(command, pair, folder), folder)


@pytest.mark.parametrize("command", EXAMPLES, ids=lambda c: f"{c.page}:{c.line}")
def test_examples_answer_what_they_should(command: Command, pair: Pair, tmp_path: Path) -> None:
    answers_as_it_should(command, pair, tmp_path, ANSWERS)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_examples_answer_what_they_should_through_a_unified_server(tmp_path: Path) -> None:
    """One test of all: an example that restores a session needs the one that saves it."""
    with launched(tmp_path, "unified", "server", *ONE_THREAD, *SMALL, *session_args(tmp_path)) as server:
        server.wait_healthy()
        for command in EXAMPLES:
            if command.page != PAIR_PAGE:
                answers_as_it_should(command, Pair(server, server, server), tmp_path, UNIFIED_ANSWERS)
