"""Checks of clients' grammars: what is refused, why, and that a grammar that takes too much ends only its own check."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from pdserve.messages.grammar import Grammar
from pdserve.model_files.grammar.errors import GrammarError
from pdserve.model_files.grammar.frames import CheckLimits
from pdserve.model_files.grammar.limited_check import TRIES, LimitedCheck


@pytest.fixture(scope="module")
def checks() -> Iterator[LimitedCheck]:
    made = LimitedCheck()
    yield made
    made.close()


TAG = {"begin": "<f=x>", "schema": {"type": "object"}, "end": "</f>"}
CALLS: dict[str, Any] = {
    "marks": ["<tool_call>"],
    "prefix": "",
    "suffix": "",
    "separator": "\n",
    "many": True,
    "calls": [{"before": '<tool_call>{"name": "a", "arguments": ', "schema": {"type": "object"}, "after": "}"}],
}
GOOD = [
    Grammar("json_schema", '{"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {}}}'),
    Grammar("json_schema", "true"),
    Grammar("json_schema", json.dumps({"enum": [f"v{i}" for i in range(5000)]})),
    Grammar("regex", "[a-z]+/x\n"),
    Grammar("choice", '["a", "é \\" \\\\", "\\u007f\\ud83d\\ude00"]'),
    Grammar("ebnf", 'root ::= "a" | "b" root'),
    Grammar("lark", 'start: "x" NUM\nNUM: /[0-9]+/'),
    Grammar("structural_tag", json.dumps({"structures": [TAG], "triggers": ["<f="]})),
    Grammar("tool_calls", json.dumps(CALLS)),
    Grammar("json_schema", '{"type": "object"}', reasoning=("<think>", "</think>")),
    Grammar("regex", "a", reasoning=("<think>", "</think>"), is_reasoning_open=True),
]
BAD = [
    (Grammar("json_schema", "{"), "json_schema: "),
    (Grammar("json_schema", "[1]"), "must be a JSON object"),
    (Grammar("json_schema", '{"unevaluatedProperties": false}'), "unevaluatedProperties"),
    (Grammar("json_schema", '{"$ref": "https://example.com/x"}'), "example.com"),
    (Grammar("json_schema", "[" * 300 + "]" * 300), "nested 300 deep"),
    (Grammar("json_schema", r'{"const": "a\u0000b"}'), "control characters"),
    (Grammar("json_schema", r'{"properties": {"x": {"enum": ["a", "\u001f"]}}}'), "control characters"),
    (Grammar("json_schema", '{"type": "object", "minProperties": 2}'), "minProperties is supported for names"),
    (Grammar("json_schema", '{"required": ["a", "a"], "minProperties": 3}'), "minProperties is supported for names"),
    (Grammar("json_schema", '{"allOf": [{"$id": "b/", "$ref": "c.json"}]}'), "$ref 'c.json' beside $id"),
    (Grammar("json_schema", '{"items": {"type": "string"}, "uniqueItems": true}'), "uniqueItems"),
    (Grammar("json_schema", '{"properties": [], "not": {"properties": []}}'), "json_schema"),
    (Grammar("regex", "(a"), "unclosed group"),
    (Grammar("regex", "a(?=b)"), "look-around"),
    (Grammar("choice", "[]"), "list of texts"),
    (Grammar("choice", '["a", 1]'), "list of texts"),
    (Grammar("ebnf", "root = x"), "ebnf"),
    (Grammar("ebnf", "root ::= missing"), "ebnf: Rule 'missing' not found"),
    (Grammar("lark", "start: missing"), "missing"),
    (Grammar("structural_tag", "{}"), "structures"),
    (Grammar("structural_tag", json.dumps({"structures": [TAG], "triggers": ["<g="]})), "no trigger"),
    (Grammar("structural_tag", '{"structures": [{}], "triggers": ["a"]}'), "begin"),
    (Grammar("structural_tag", '{"structures": [{"begin": 1, "end": ""}], "triggers": ["a"]}'), "structures[0].begin"),
    (
        Grammar("structural_tag", json.dumps({"structures": [TAG | {"schema": "[]"}], "triggers": ["<f"]})),
        "JSON object",
    ),
    (Grammar("tool_calls", "{}"), "calls"),
    (
        Grammar("tool_calls", json.dumps(CALLS | {"calls": [CALLS["calls"][0] | {"schema": {"type": "array"}}]})),
        "array",
    ),
    (Grammar("json_schema", "]" * 300 + "[" * 300), "nested 300 deep"),
]


@pytest.mark.parametrize("grammar", GOOD, ids=lambda grammar: grammar.kind)
def test_good_grammars_pass(grammar: Grammar, checks: LimitedCheck) -> None:
    checks.check(grammar)


@pytest.mark.parametrize(("grammar", "reason"), BAD, ids=[f"{grammar.kind}: {reason}" for grammar, reason in BAD])
def test_bad_grammars_are_refused_with_the_reason(grammar: Grammar, reason: str, checks: LimitedCheck) -> None:
    with pytest.raises(GrammarError) as e:
        checks.check(grammar)
    assert reason in str(e.value)


@pytest.mark.parametrize(
    "grammar",
    [Grammar("json_schema", '{"$ref": "#"}'), Grammar("regex", r"[^\s\S]"), Grammar("lark", "start: start")],
    ids=lambda grammar: grammar.kind,
)
def test_a_grammar_that_no_text_matches_is_refused_in_plain_words(grammar: Grammar, checks: LimitedCheck) -> None:
    with pytest.raises(GrammarError) as e:
        checks.check(grammar)
    assert str(e.value) == "no text matches it"


def test_a_grammar_without_time_ends_its_check_and_no_other() -> None:
    checks = LimitedCheck(CheckLimits(cpu_seconds=0.001))
    large = Grammar("json_schema", json.dumps({"enum": [f"{i}v" for i in range(20000)]}))
    try:
        with pytest.raises(GrammarError, match=r"more than 0\.001 s of a processor"):
            checks.check(large)
        checks._limits = CheckLimits()
        checks.check(GOOD[0])
    finally:
        checks.close()


def test_a_grammar_without_memory_ends_its_check_and_no_other() -> None:
    checks = LimitedCheck(CheckLimits(memory_bytes=1 << 20))
    large = Grammar("json_schema", json.dumps({"enum": [f"{i}v" for i in range(20000)]}))
    try:
        with pytest.raises(GrammarError, match=r"too large|memory"):
            checks.check(large)
        checks._limits = CheckLimits()
        checks.check(GOOD[0])
    finally:
        checks.close()


def test_a_verdict_is_remembered() -> None:
    checks = LimitedCheck()
    with pytest.raises(GrammarError):
        checks.check(BAD[0][0])
    checks.close()
    with pytest.raises(GrammarError):
        checks.check(BAD[0][0])
    assert checks._process is None


@pytest.mark.parametrize("kills", [1, 2])
def test_a_process_that_is_killed_from_outside_is_no_fault_of_the_grammar(kills: int, monkeypatch) -> None:
    checks = LimitedCheck()
    start = checks._start
    left = [True] * kills

    def start_and_kill() -> None:
        start()
        if left:
            left.pop()
            assert checks._process is not None
            checks._process.kill()

    monkeypatch.setattr(checks, "_start", start_and_kill)
    try:
        if kills == TRIES:
            with pytest.raises(GrammarError, match="try again later"):
                checks.check(GOOD[0])
        checks.check(GOOD[0])
    finally:
        checks.close()


def test_a_check_that_cannot_start_is_tried_again(monkeypatch) -> None:
    checks = LimitedCheck()

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("too many processes")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", fail)
        with pytest.raises(GrammarError, match="try again later"):
            checks.check(GOOD[0])
    try:
        checks.check(GOOD[0])
    finally:
        checks.close()


def test_a_process_that_hangs_is_given_up(monkeypatch) -> None:
    checks = LimitedCheck(CheckLimits(seconds=0.05))
    start = checks._start

    def start_and_stop() -> None:
        start()
        assert checks._process is not None
        checks._process.send_signal(signal.SIGSTOP)

    monkeypatch.setattr(checks, "_start", start_and_stop)
    large = Grammar("json_schema", json.dumps({"title": "x" * 250_000}))
    try:
        with pytest.raises(GrammarError, match="try again later"):
            checks.check(large)
        assert checks._process is None
        monkeypatch.undo()
        checks._limits = CheckLimits()
        checks.check(large)
    finally:
        checks.close()
