"""Checks JSON schemas of public suites: which are refused, and whether instances are accepted as they should be.

    PYTHONPATH=. .venv/bin/python -P -m tools.schema_suites FOLDER...

A folder holds JSON files of JSONSchemaBench (``maskbench/data``: one schema and its tests each) or of the
JSON-Schema-Test-Suite (``tests/draft2020-12``: a list of them). No model runs: each instance's tokens go through the
matcher that masks are made of. Ends with 1 if an invalid instance was accepted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from pdserve.messages.grammar import MAX_GRAMMAR_CHARACTERS, Grammar
from pdserve.model_files.grammar.errors import GrammarError
from pdserve.model_files.grammar.limited_check import LimitedCheck
from pdserve.model_files.options import ModelOptions
from pdserve.model_files.text.load import load_tokenizer
from pdserve.model_runner.grammar.matchers import Matchers


@dataclass
class Report:
    """Counts of one run."""

    schemas: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    instances: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    check_ms: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        refused = sum(self.refused.values())
        lines = [f"{self.schemas} schemas, {refused} refused ({refused / max(1, self.schemas):.1%}):"]
        lines += [f"  {count:5} {reason}" for reason, count in self.refused.most_common(25)]
        lines += [f"{count:6} instances {kind}" for kind, count in sorted(self.instances.items())]
        lines += [f"  invalid but accepted: {name}" for name in self.wrong]
        for name, values in (("check, ms", self.check_ms), ("mask, us", self.mask_us)):
            if values:
                p50, p99, most = np.percentile(values, [50, 99, 100])
                lines.append(f"{name}: median {p50:.1f}, P99 {p99:.1f}, most {most:.1f}")
        return "\n".join(lines)


def cases(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each JSON schema with tests that a JSON file below ``folder`` has, with a name for reports."""
    for file in sorted(folder.rglob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        for case in content if isinstance(content, list) else [content]:
            if isinstance(case, dict) and "schema" in case and "tests" in case:
                yield f"{file.name}: {case.get('description', '')}", case


def spellings(value: Any) -> Iterator[str]:
    """Yield ``value`` as JSON text: with a space after commas and colons, then without."""
    yield json.dumps(value, ensure_ascii=False)
    yield json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class Suite:
    """Runs cases through the check and the matcher."""

    def __init__(self, options: ModelOptions, masks: int) -> None:
        self._tokenizer = load_tokenizer(options)
        size = self._tokenizer.backend.get_vocab_size(with_added_tokens=True)  # type: ignore[attr-defined]
        self._matchers = Matchers(options, size)
        self._checks = LimitedCheck()
        self._masks = masks
        self.report = Report()

    def run(self, name: str, case: dict[str, Any]) -> None:
        """Check one schema, then match each of its test instances, and add the outcome to ``report``.

        ``name``: of the schema, for the report. A refused schema's tests are not run.
        """
        report = self.report
        report.schemas += 1
        source = json.dumps(case["schema"])
        if len(source) > MAX_GRAMMAR_CHARACTERS:
            report.refused["over the limit of characters"] += 1
            return
        grammar = Grammar("json_schema", source)
        began = time.perf_counter()
        try:
            self._checks.check(grammar)
        except GrammarError as e:
            report.refused[str(e).partition("\n")[0][:90]] += 1
            return
        finally:
            report.check_ms.append((time.perf_counter() - began) * 1e3)
        for test in case["tests"]:
            accepted = any(self._accepts(grammar, text) for text in spellings(test["data"]))
            kind = f"{'valid' if test['valid'] else 'invalid'}, {'accepted' if accepted else 'refused'}"
            report.instances[kind] += 1
            if accepted and not test["valid"]:
                report.wrong.append(f"{name}: {test.get('description', '')}")
        self._matchers.forget(grammar)

    def _accepts(self, grammar: Grammar, text: str) -> bool:
        """Return whether the grammar accepts the whole ``text``. Also time masks, until enough are timed."""
        tokens = np.array(self._tokenizer.encode_batch([text], add_special_tokens=False)[0], np.int32)
        compiled = self._matchers.compile(grammar)
        assert compiled is not None, "its check passed"
        if len(self.report.mask_us) < self._masks:
            self._time(compiled.deep_copy(), tokens)
        matcher = compiled.deep_copy()
        return matcher.try_consume_tokens(tokens.tolist()) == len(tokens) and bool(matcher.is_accepting())

    def _time(self, matcher: Any, tokens: np.ndarray) -> None:
        for token in tokens.tolist():
            began = time.perf_counter()
            matcher.compute_bitmask()
            self.report.mask_us.append((time.perf_counter() - began) * 1e6)
            if not matcher.consume_token(token):
                return


def main() -> int:
    """Check the schemas of the folders and print a report. Return 1 if an invalid instance was accepted."""
    parser = argparse.ArgumentParser(prog="python -P -m tools.schema_suites", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of schemas with tests")
    parser.add_argument("--model-path", default="smollm2", help="model with the tokenizer")
    parser.add_argument("--every", type=int, default=1, help="take each N-th schema")
    parser.add_argument("--masks", type=int, default=20000, help="masks to time")
    args = parser.parse_args()
    suite = Suite(ModelOptions(model_path=args.model_path), args.masks)
    found = [case for folder in args.folders for case in cases(folder)]
    for name, case in tqdm(found[:: args.every], disable=None):
        suite.run(name, case)
    print(suite.report)
    return int(bool(suite.report.wrong))


if __name__ == "__main__":
    sys.exit(main())
