"""The examples in README.md and docs/*.md: command lines parse, targets exist, JSON and YAML fit their schemas.

Those that talk to a server are run by ``tests/e2e/test_examples.py``. Every example belongs to exactly one kind.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import orjson
import pytest
from support.doc_examples import (
    NOT_RUN,
    PAGES,
    ROOT,
    Block,
    Command,
    Kind,
    blocks,
    commands,
    inline_commands,
    kind_of,
    words,
)
from support.fake_engine import FakeEngine, with_engine

from pdserve.server.cli import app
from pdserve.server.http.answers import ErrorAnswer
from pdserve.server.http.anthropic.answers import MessageAnswer
from pdserve.server.http.native.answers import GenerateAnswer
from pdserve.server.http.ollama.answers import OllamaError
from pdserve.server.http.openai.answers import ChatAnswer, CompletionAnswer
from tools.gpu_check import __main__ as gpu_check_main

RUNNERS = {
    "pdserve.server.instance": "run_instance",
    "pdserve.router.process": "run_router",
    "pdserve.server.cluster": "run_cluster",
    "pdserve.terminal.chat.run": "run_chat",
    "pdserve.terminal.check.run": "run_check",
    "pdserve.model_runner.calibration.calibrate": "run_calibrate",
    "pdserve.benchmark.serve": "run_bench",
    "pdserve.benchmark.transfer.run": "run_transfer_bench",
    "pdserve.benchmark.schedule.run": "run_schedule_bench",
    "pdserve.benchmark.cache.run": "run_cache_bench",
    "pdserve.benchmark.kernel.run": "run_kernel_bench",
}
COMMANDS = commands()
INLINE = list(dict.fromkeys(command.text for command in inline_commands()))
ANSWERS = {
    "error": ErrorAnswer,
    "text": GenerateAnswer,
    "text_completion": CompletionAnswer,
    "chat.completion": ChatAnswer,
    "type": MessageAnswer,
}
"""What a JSON example of docs/http-api.md is, by its ``object`` or else its first key."""
CALLS = {
    ".completions.create": "/v1/completions",
    ".chat.completions.create": "/v1/chat/completions",
    ".messages.create": "/v1/messages",
    ".responses.create": "/v1/responses",
    ".post": "/generate",
}
"""The path that an expression in a Python example calls, by the end of the expression."""


@pytest.fixture
def dry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The options that commands would have run with, in a folder that has the files which examples name."""
    options: list[Any] = []
    for module, function in RUNNERS.items():
        fake = ModuleType(module)
        setattr(fake, function, lambda given: options.append(given) or 0)
        monkeypatch.setitem(sys.modules, module, fake)
    (tmp_path / "cluster-secret").write_text("0123456789abcdef0123456789abcdef\n")
    (tmp_path / "cluster-secret").chmod(0o600)
    (tmp_path / "keys").write_text("alice a-key\n")
    monkeypatch.chdir(tmp_path)
    return options


def named(command: Command) -> str:
    return f"{command.page}:{command.line}"


def of_kind(kind: Kind) -> list[Command]:
    return [command for command in COMMANDS if kind_of(command) is kind]


def test_no_page_lost_its_examples() -> None:
    """The table of what is not run has nothing that is no more there, and there is something to check of each kind."""
    assert {command.text for command in of_kind(Kind.NOT_RUN)} == set(NOT_RUN)
    for kind in Kind:
        assert of_kind(kind) or kind is Kind.NOT_RUN, kind
    assert len(PAGES) > 15


def test_a_block_without_a_language_holds_no_command() -> None:
    """Otherwise no test would run it."""
    lost = [
        f"{block.page}:{block.line}: {line}"
        for block in blocks()
        if not block.language
        for line in block.text.splitlines()
        if line.startswith(("pdserve ", "curl ", "make ", "python", "docker ", "pip ", "$ "))
    ]
    assert not lost, "name the language of these blocks (console)"
    languages = {"", "console", "bash", "ini", "json", "python", "yaml"}
    assert {block.language for block in blocks()} <= languages, "say how it is checked"


SHOWN = [*PAGES, ROOT / "server" / "cluster.py", *(f for f in (ROOT / "docker").rglob("*") if f.is_file())]
"""Files that show commands to users."""
KEY_ARGUMENT = re.compile(
    r"""(-H|--header)[ =]?["']?(authorization|x-api-key):|--oauth2-bearer|--api-key[ =][^`,]*\$""", re.IGNORECASE
)


@pytest.mark.parametrize("file", SHOWN, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_example_puts_a_key_into_the_arguments_of_a_program(file: Path) -> None:
    """Every user of the host can read them."""
    found = [line for line in file.read_text(encoding="utf-8").splitlines() if KEY_ARGUMENT.search(line)]
    assert not found, "write -H @<(sed 's/^/Authorization: Bearer /' FILE), see docs/security.md"


@pytest.mark.parametrize("command", of_kind(Kind.OPTIONS), ids=named)
def test_options_are_accepted(dry: list[Any], command: Command) -> None:
    (argv,) = [one for one in words(command.text.removeprefix("nohup ")) if one[0] == "pdserve"]
    assert app(argv[1:], result_action="return_value") == 0
    assert len(dry) == 1


@pytest.mark.parametrize("command", of_kind(Kind.GPU_CHECK), ids=named)
def test_options_of_gpu_check_are_accepted(command: Command) -> None:
    (argv,) = [one for one in words(command.text) if "tools.gpu_check" in one]
    begin = argv.index("tools.gpu_check") + 1
    assert gpu_check_main.arguments(argv[begin:]).only


@pytest.mark.parametrize("text", INLINE)
def test_options_in_running_text_are_accepted(dry: list[Any], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = words(text)[0][1:]
    if argv in (["bench"], ["completion"], ["router"], ["router-key"]):
        assert app.parse_args([*argv, "--help"])[0] is not None  # the name of a command that wants more
        return
    assert app(argv, result_action="return_value") in (0, None)
    assert dry or capsys.readouterr().out


@pytest.mark.parametrize("command", of_kind(Kind.MAKE), ids=named)
def test_targets_exist(command: Command) -> None:
    for argv in words(command.text):
        asked = subprocess.run(["make", "-n", *argv[1:]], cwd=ROOT, capture_output=True, text=True)
        assert asked.returncode == 0, asked.stderr


@pytest.mark.parametrize("command", of_kind(Kind.PYTHON), ids=named)
def test_python_examples_run(command: Command, tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"a.weight": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    python = command.text.replace("python ", f"{sys.executable} -P ", 1)
    ran = subprocess.run(["bash", "-c", python], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() or any(path.stat().st_size > 32 for path in tmp_path.iterdir())


@pytest.mark.parametrize("block", [b for b in blocks() if b.language == "json"], ids=lambda b: f"{b.page}:{b.line}")
def test_json_fits_its_schema(block: Block) -> None:
    content = orjson.loads(block.text)
    assert block.page == "docs/http-api.md"
    has_text = isinstance(content.get("error"), str)
    answer = OllamaError if has_text else ANSWERS[content.get("object", next(iter(content)))]
    answer.model_validate(content)


@pytest.mark.parametrize("block", [b for b in blocks() if b.language == "python"], ids=lambda b: f"{b.page}:{b.line}")
def test_a_client_in_python_sends_a_body_that_is_answered(block: Block) -> None:
    """The names that an example assigns are literals, so that they can stand for arguments.

    Arguments that are a part of an earlier answer are left out.
    """
    known: dict[str, Any] = {}
    sent: list[tuple[str, dict[str, Any]]] = []

    def literal(node: ast.expr) -> Any:
        return known[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)

    for node in ast.parse(block.text).body:
        if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call):
            known[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = "." + ast.unparse(node.func).partition(".")[2]
            words = [word for word in node.keywords if not isinstance(word.value, ast.Attribute)]
            body = {word.arg: literal(word.value) for word in words if word.arg and name in CALLS}
            sent += [(CALLS[name], body.get("json", body))] if name in CALLS else []

    async def run(engine: FakeEngine) -> None:
        for path, body in sent:
            assert (await engine.post(path, body)).status_code == 200

    assert sent
    with_engine(run)


# The rules in docs/kubernetes.md are prometheus-adapter's; test_kubernetes.py compares them.
CONFIGS = [b for b in blocks() if b.language == "yaml" and b.page != "docs/kubernetes.md"]


@pytest.mark.parametrize("block", CONFIGS, ids=lambda b: f"{b.page}:{b.line}")
def test_yaml_is_a_config(dry: list[Any], block: Block, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(block.text)
    assert app(["server", "--config", str(tmp_path / "config.yaml")], result_action="return_value") == 0
    assert len(dry) == 1
