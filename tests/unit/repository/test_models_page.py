"""docs/models.md is true: every row is measured again, every config has its rows, and no table is written by hand.

A row is every engine's chunks, shared prefix, hand-over and greedy tokens against transformers in float32, on one rank
and two, from safetensors and from GGUF (``support/model_rows.py``).
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import transformers
from support import models_page
from support.families import FAMILIES
from support.foreign import SERVED
from support.model_rows import (
    CHUNKED,
    FOREIGN,
    GGUF,
    GREEDY,
    SHARED,
    Absent,
    Row,
    Tally,
    Text,
    measure,
    measure_foreign,
)
from support.model_tables import LARGEST, gguf_architecture, mistakes, model_type, problems, rounded_up

from pdserve.model_files.families import registry
from pdserve.model_runner.cpu_engine.build import BuildError
from pdserve.model_runner.cpu_engine.library import load_library

TEXT = models_page.PAGE.read_text(encoding="utf-8")
PAGE = models_page.read(TEXT)
ADVICE = "run make models, and look at what it changes"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def engines() -> list[str]:
    """Return the engines that this machine has."""
    try:
        load_library()
    except BuildError:
        return ["torch"]
    return ["torch", "C++"]


MEASURED = set(list(FAMILIES)[::2])
"""Configs that ``make test`` measures: every other one, and so at least one of every family."""


@pytest.mark.parametrize(
    "chosen", [slice(-1, None), pytest.param(slice(-1), marks=pytest.mark.slow)], ids=["best", "rest"]
)
@pytest.mark.parametrize(
    "name", [name if name in MEASURED else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_rows_of_a_config(name: str, chosen: slice, engines: list[str]) -> None:
    """Measure the best engine of this machine; make test-slow measures the others."""
    found = measure(name, engines[chosen])
    wrong = [f"{engine}: {one}" for engine, row in found.items() for one in mistakes(row)]
    assert not wrong
    wrong = [
        f"{engine}: {one}" for engine, row in found.items() for one in problems(PAGE.rows.get((name, engine)), row)
    ]
    assert not wrong, ADVICE


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if i % 2 else name for i, name in enumerate(SERVED)]
)
def test_row_by_transformers_own_class(name: str) -> None:
    row = measure_foreign(name)
    assert not list(mistakes(row))
    assert not list(problems(PAGE.foreign.get((name, FOREIGN)), row)), ADVICE


def test_the_page_is_what_the_command_writes() -> None:
    assert models_page.written(TEXT, PAGE) == TEXT, ADVICE


def test_every_config_has_its_rows_and_every_row_its_config() -> None:
    assert list(PAGE.rows) == models_page.keys()
    assert list(PAGE.foreign) == models_page.foreign_keys()


def test_every_family_has_two_configs_and_every_engine_computes_it() -> None:
    known = Counter(map(model_type, FAMILIES))
    assert set(known) == set(registry.HF)
    assert min(known.values()) >= 2
    assert set(map(model_type, MEASURED)) == set(registry.HF)
    for engine in ("torch", "C++"):
        computed = {model_type(name) for (name, by), row in PAGE.rows.items() if by == engine and row.greedy}
        assert computed == set(registry.HF), engine


def test_every_architecture_of_gguf_has_a_figure() -> None:
    figures = {gguf_architecture(name) for (name, _), row in PAGE.rows.items() if isinstance(row.cells[GGUF], float)}
    assert figures == set(registry.GGUF)


def test_families_by_transformers_alone_are_not_known_here() -> None:
    types = {getattr(transformers, f"{prefix}Config").model_type for prefix, _ in SERVED.values()}
    assert len(types) >= 2
    assert not types & {*registry.HF, *registry.TEXT_OF}


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (0.0, "1e-6"),
        (9e-7, "1e-6"),
        (1.01e-6, "2e-6"),
        (5e-6, "5e-6"),
        (5.1e-6, "6e-6"),
        (9.7e-6, "1e-5"),
        (0.3, "3e-1"),
    ],
)
def test_figures_are_rounded_up(error: float, text: str) -> None:
    assert rounded_up(error) == text


REFUSED = Absent("refused", "why")
ROW = Row({CHUNKED: 4e-6, SHARED: 2e-6, GGUF: REFUSED}, GREEDY)


@pytest.mark.parametrize(
    ("cells", "greedy", "says"),
    [
        ({CHUNKED: 1.1e-5}, GREEDY, []),
        ({CHUNKED: 1.3e-5}, GREEDY, ["chunks: an error of 1.3e-05, the page says 4e-06"]),
        ({CHUNKED: REFUSED}, GREEDY, ["chunks: Absent(word='refused', why='why'), the page says 4e-06"]),
        ({GGUF: 1e-6}, GREEDY, ["GGUF: 1e-06, the page says Absent(word='refused', why='why')"]),
        ({GGUF: Absent("refused", "other")}, GREEDY, ["GGUF: Absent(word='refused', why='other'), the page says"]),
        ({GGUF: Absent("none", "why")}, GREEDY, ["GGUF: Absent(word='none', why='why'), the page says"]),
        ({}, GREEDY - 1, ["11 tokens are transformers', the page says 12"]),
        ({}, None, ["None tokens are transformers', the page says 12"]),
    ],
)
def test_what_the_page_says_otherwise_is_named(cells: dict, greedy: int | None, says: list[str]) -> None:
    found = list(problems(ROW, Row(ROW.cells | cells, greedy)))
    assert len(found) == len(says)
    assert all(one.startswith(other) for one, other in zip(found, says, strict=True))


def test_a_row_that_is_not_there_is_named() -> None:
    assert list(problems(None, ROW)) == ["the page has no such row"]


def test_mistakes_are_no_rows() -> None:
    assert not list(mistakes(ROW))
    assert list(mistakes(Row({CHUNKED: 2 * LARGEST}, GREEDY)))
    assert list(mistakes(Row({CHUNKED: 1e-6}, GREEDY - 1)))


def test_a_tally_finds_the_worst_logit_and_the_wrong_token() -> None:
    """Here the token at a position is the position, and so is the one that logits choose."""
    logits = torch.eye(130)
    tally = Tally(Text([0, *range(129)], logits))
    tally.add(0, logits[:100])
    assert (tally.error, tally.greedy) == (0.0, 0)
    wrong = logits[100:].clone()
    wrong[10, 3] += 2.5
    tally.add(100, wrong)
    assert (tally.error, tally.greedy) == (2.5, GREEDY - 1)
    with pytest.raises(AssertionError):
        tally.add(0, torch.full((1, 130), torch.nan))
