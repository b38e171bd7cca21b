"""The examples in README.md and docs/*.md: fenced blocks, and their shell commands one by one."""

from __future__ import annotations

import re
import shlex
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELL = ("console", "bash")
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\s*$")
INLINE = re.compile(r"`(pdserve [a-z][^`]*)`")
SEPARATORS = {"|", "&", ";", "&&", "||"}
ASSIGNMENT = re.compile(r"^\w+=")


class Block(NamedTuple):
    """A fenced block. ``page``: its path from the repository's root."""

    page: str
    line: int
    language: str
    text: str


class Command(NamedTuple):
    """One line of a shell block, continued lines joined, comments left out."""

    page: str
    line: int
    text: str


def blocks() -> list[Block]:
    """Return every fenced block of every page."""
    found = []
    for path in PAGES:
        lines = path.read_text().splitlines()
        opened: tuple[int, str, str] | None = None
        for number, line in enumerate(lines, 1):
            fence = FENCE.match(line)
            if fence is None:
                continue
            if opened is None:
                opened = number, fence["indent"], fence["language"]
                continue
            begin, indent, language = opened
            content = "\n".join(one.removeprefix(indent) for one in lines[begin : number - 1])
            found.append(Block(str(path.relative_to(ROOT)), begin, language, content))
            opened = None
        assert opened is None, f"{path}: the block of line {opened and opened[0]} is not closed"
    return found


def commands() -> list[Command]:
    """Return every command line of every shell block."""
    found = []
    for block in blocks():
        if block.language not in SHELL:
            continue
        text, begin = "", block.line
        for offset, line in enumerate(block.text.splitlines(), 1):
            begin = begin if text else block.line + offset
            if line.endswith("\\"):
                text += line.removesuffix("\\") + " "
                continue
            whole, text = without_comment(text + line), ""
            if whole:
                found.append(Command(block.page, begin, whole))
    return found


def inline_commands() -> list[Command]:
    """Return each ``pdserve …`` in running text that is a whole command line."""
    return [
        Command(str(path.relative_to(ROOT)), number, found)
        for path in PAGES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for found in INLINE.findall(line)
        if "…" not in found
    ]


def without_comment(line: str) -> str:
    """Return a command line without the comment at its end."""
    quote = ""
    for i, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (i == 0 or line[i - 1].isspace()):
            return line[:i].strip()
    return line.strip()


def words(line: str) -> list[list[str]]:
    """Return the simple commands of a line, as lists of words without assignments and redirections."""
    lexer = shlex.shlex(re.sub(r"\d>&\d", "", line), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    skip = False
    for token in lexer:
        if token in SEPARATORS:
            found.append([])
        elif set(token) <= set("<>"):
            skip = True
        elif skip:
            skip = False
        elif found[-1] or not ASSIGNMENT.match(token):
            found[-1].append(token)
    return [one for one in found if one]


class Kind(Enum):
    """How an example is checked. LIVE: it talks to a server, and is run against one."""

    LIVE = auto()
    OPTIONS = auto()
    GPU_CHECK = auto()
    MAKE = auto()
    PYTHON = auto()
    NOT_RUN = auto()


A_CLUSTER = "it needs a cluster; test_kubernetes.py compares the page with the manifests"
NOT_RUN: dict[str, str] = {
    "docker build -f docker/Dockerfile -t pdserve:local .": A_CLUSTER,
    "kind load docker-image pdserve:local": A_CLUSTER,
    "cd docker/kubernetes/base && umask 077 && mkdir secrets": A_CLUSTER,
    "openssl rand -hex 32 > secrets/cluster": A_CLUSTER,
    'docker run --rm --user "$(id -u)" -v "$PWD/secrets:/secrets:ro" pdserve:local router-key --cluster-secret-file /secrets/cluster > secrets/router': A_CLUSTER,  # noqa: E501
    "openssl rand -hex 32 | tr -d '\\n' > secrets/metrics-key": A_CLUSTER,
    'echo "first-user $(openssl rand -hex 32)" > secrets/api-keys && echo "metrics $(cat secrets/metrics-key)" >> secrets/api-keys': A_CLUSTER,  # noqa: E501
    "openssl rand -hex 32 > secrets/admin-key": A_CLUSTER,
    "kubectl apply -k ../overlays/cpu": A_CLUSTER,
    "kubectl -n pdserve rollout status deployment/pdserve-router": A_CLUSTER,
    "kubectl -n pdserve port-forward service/pdserve 8000:80 &": A_CLUSTER,
    'curl -N http://127.0.0.1:8000/generate -H @<(sed -n \'s/^first-user /Authorization: Bearer /p\' secrets/api-keys) -d \'{"text": "The capital of France is", "stream": true}\'': A_CLUSTER,  # noqa: E501
    "kubectl -n pdserve get pods -o wide": A_CLUSTER,
    "kubectl -n pdserve logs pdserve-prefill-0 --previous": A_CLUSTER,
    "python -m venv /tmp/checks && /tmp/checks/bin/pip install checkov kubernetes-validate": A_CLUSTER,
    "kubectl kustomize docker/kubernetes/overlays/cpu > /tmp/cpu.yaml": A_CLUSTER,
    "/tmp/checks/bin/kubernetes-validate --strict --kubernetes-version 1.30.0 /tmp/cpu.yaml": A_CLUSTER,
    "/tmp/checks/bin/checkov -f /tmp/cpu.yaml --framework kubernetes --compact --quiet --skip-download": A_CLUSTER,
}
"""Command lines that no test runs, and why."""


def kind_of(command: Command) -> Kind:
    """Return the kind of a command. Raises ``AssertionError`` for a command that no test would check."""
    text = command.text
    if text in NOT_RUN:
        return Kind.NOT_RUN
    if re.search(r"\bcurl\b|\bhashes\b|^ask |pdserve chat|pdserve check --url|pdserve completion|^\w+='", text):
        return Kind.LIVE
    if "tools.gpu_check " in text:
        return Kind.GPU_CHECK
    for prefix, kind in (("pdserve ", Kind.OPTIONS), ("nohup pdserve ", Kind.OPTIONS), ("python -c ", Kind.PYTHON)):
        if text.startswith(prefix):
            return kind
    if words(text)[0][0] == "make":
        return Kind.MAKE
    raise AssertionError(f"{command.page}:{command.line}: say how this example is checked: {text}")
