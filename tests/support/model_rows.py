"""What docs/models.md says of a config, measured: a tiny random model by each engine against transformers, in float32.

Two texts of ``PROMPT`` tokens with a common beginning, each with the ``GREEDY`` tokens that transformers itself goes on
with. An engine computes the first in three chunks, and the second behind the pages of the first, beside it; then it
decodes both. Every logit of every pass is compared, and at each of the last tokens what it would choose.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import Tensor

from pdserve.model_files.errors import UnsupportedModel
from pdserve.model_files.families import registry

from .families import FAMILIES, make_config, make_reference
from .foreign import SERVED, make_foreign
from .gguf_export import ARCHS, write_gguf
from .model_harness import PAGE, Handed, Harness, Rows, draw
from .ranked_rows import ranked_rows

PROMPT, GREEDY = 109, 12
PREFIX = 18 * PAGE
CHUNKS = (0, 50, 100)
"""Where the chunks of the first prompt begin."""
ENGINES = {"torch": "torch", "C++": "cpu"}
"""What the page calls an engine, and what --attention-backend does."""
FOREIGN = "transformers"
"""The page's name for transformers' own class with attention on our pool."""
RANKS = 2
CHUNKED, SHARED, HANDED, CONVERTED, RANKED, GGUF = "chunks", "prefix hit", "PD", "PD, other engine", "TP 2", "GGUF"
COLUMNS = (CHUNKED, SHARED, HANDED, CONVERTED, RANKED, GGUF)
FOREIGN_COLUMNS = (CHUNKED, SHARED, HANDED)


class Absent(NamedTuple):
    """No figure. ``word``: "refused", by the message ``why``; or "none", as there is nothing to measure."""

    word: str
    why: str


Cell = float | Absent
"""A figure is the largest error of a logit."""


class Row(NamedTuple):
    """``greedy``: how many tokens are transformers' own wherever there is a figure; None: there is none."""

    cells: dict[str, Cell]
    greedy: int | None


class Text(NamedTuple):
    """A prompt with what transformers goes on with, and transformers' logits [T, V]."""

    tokens: list[int]
    logits: Tensor


class Tally:
    """What became of a text: the largest error so far, and how many of the tokens to choose were transformers'."""

    def __init__(self, text: Text) -> None:
        self.text, self.error, self.greedy = text, 0.0, 0

    def add(self, begin: int, logits: Tensor) -> None:
        """Count ``logits`` [n, V] of the positions from ``begin`` on."""
        assert logits.isfinite().all()
        expected = self.text.logits[begin : begin + len(logits)]
        self.error = max(self.error, float((logits - expected).abs().max()))
        for position, chosen in enumerate(logits.argmax(-1).tolist(), begin):
            if PROMPT - 1 <= position < PROMPT - 1 + GREEDY:
                self.greedy += chosen == self.text.tokens[position + 1]


class Computed(NamedTuple):
    """Two texts after their prompts. ``last``: logits [1, V] of the second text. ``handed``: its pages to hand over."""

    first: Tally
    second: Tally
    last: Tensor
    handed: Handed | None


Found = dict[str, tuple[Tally, ...] | Absent]
"""Texts that went into each column, or why there are none."""


def measure(name: str, engines: Collection[str] = tuple(ENGINES)) -> dict[str, Row]:
    """Measure the rows of a config of ``FAMILIES``, by engine. ``engines``: those that this machine has."""
    model = make_reference(name)
    texts = make_texts(model)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model.save_pretrained(folder)
        file = folder / "m.gguf"
        if not _why_no_gguf(name):
            write_gguf(model, file, fuse_qkv=model.config.model_type == "glm")
        begun = {engine: _begin(folder, texts, ENGINES[engine]) for engine in engines}
        return {engine: _row(engine, name, folder, texts, begun) for engine in engines}


def measure_foreign(name: str) -> Row:
    """Measure the row of a model of ``SERVED``, which transformers' own class computes."""
    model = make_foreign(*SERVED[name])
    texts = make_texts(model)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model.save_pretrained(folder)
        prefill, decode = Harness(folder), Harness(folder)
        for harness in (prefill, decode):
            assert (harness.runner.implementation, harness.runner.engine.attention_backend) == (FOREIGN, "torch")
        computed = compute_prompts(prefill, texts)
        [handed] = decode_elsewhere(decode, [computed])
        go_on(prefill, computed.first, computed.second)
    return _made({CHUNKED: (computed.first,), SHARED: (computed.second,), HANDED: (handed,)})


def make_texts(model: torch.nn.Module) -> tuple[Text, Text]:
    """Make two texts that begin alike."""
    first = draw(PROMPT, 3)
    prompts = torch.tensor([first, first[:PREFIX] + draw(PROMPT - PREFIX, 4)])
    tokens, chosen = torch.empty(0), torch.zeros(2, GREEDY, dtype=torch.int64)
    # Any tokens at first, then what is chosen behind those: each pass makes at least one more of them the right one,
    # mostly several.
    while not torch.equal(tokens[..., PROMPT:], chosen):
        tokens = torch.cat((prompts, chosen), 1)
        with torch.inference_mode():
            logits: Tensor = model(tokens, use_cache=False).logits
        chosen = logits[:, PROMPT - 1 : -1].argmax(-1)
    # Were they all alike, every engine would be right; were they larger, errors would be.
    assert 0.3 < logits.std() < 3
    one, two = (Text(ids, of_text) for ids, of_text in zip(tokens.tolist(), logits, strict=True))
    return one, two


def compute_prompts(rows: Rows, texts: tuple[Text, Text]) -> Computed:
    """Compute both prompts: the first in chunks, the second after shared pages."""
    first, second = map(Tally, texts)
    tokens, others = texts[0].tokens, texts[1].tokens
    for begin, end in itertools.pairwise(CHUNKS):
        first.add(begin, rows.forward((0, tokens[begin:end])))
    rows.share(0, 1, PREFIX)
    begin = CHUNKS[-1]
    logits = rows.forward((1, others[PREFIX:PROMPT]), (0, tokens[begin:PROMPT]))
    second.add(PREFIX, logits[: PROMPT - PREFIX])
    first.add(begin, logits[PROMPT - PREFIX :])
    handed = rows.hand_over(1) if isinstance(rows, Harness) else None
    return Computed(first, second, logits[PROMPT - PREFIX - 1 : PROMPT - PREFIX], handed)


def go_on(rows: Rows, *tallies: Tally) -> None:
    """Decode the texts, which lie in the rows from 0 on, side by side."""
    for position in range(PROMPT, PROMPT + GREEDY - 1):
        logits = rows.forward(*((row, [tally.text.tokens[position]]) for row, tally in enumerate(tallies)))
        for row, tally in enumerate(tallies):
            tally.add(position, logits[row : row + 1])


def decode_elsewhere(decode: Harness, prefills: Iterable[Computed]) -> list[Tally]:
    """Go on with the second text of each of ``prefills``, from the pages that it hands over."""
    tallies = []
    for row, prefill in enumerate(prefills):
        assert prefill.handed is not None
        decode.take_over(row, prefill.handed)
        tally = Tally(prefill.second.text)
        # A split request's first token is the prefill's.
        tally.add(PROMPT - 1, prefill.last)
        tallies.append(tally)
    go_on(decode, *tallies)
    return tallies


def _begin(folder: Path, texts: tuple[Text, Text], backend: str) -> tuple[Harness, Computed] | Absent:
    try:
        harness = Harness(folder, attention_backend=backend)
    except UnsupportedModel as e:
        return Absent("refused", str(e))
    return harness, compute_prompts(harness, texts)


def _row(
    engine: str,
    name: str,
    folder: Path,
    texts: tuple[Text, Text],
    begun: dict[str, tuple[Harness, Computed] | Absent],
) -> Row:
    mine, backend = begun[engine], ENGINES[engine]
    if isinstance(mine, Absent):
        return Row(dict.fromkeys(COLUMNS, mine), None)
    harness, (first, second, *_) = mine
    found: Found = {CHUNKED: (first,), SHARED: (second,)}
    prefills: dict[str, Computed] = {}
    for other, prefill in begun.items():
        column = HANDED if other == engine else CONVERTED
        if isinstance(prefill, Absent):
            found[column] = prefill
        else:
            prefills[column] = prefill[1]
    handed = decode_elsewhere(Harness(folder, attention_backend=backend), prefills.values())
    found |= {column: (tally,) for column, tally in zip(prefills, handed, strict=True)}
    go_on(harness, first, second)
    found[RANKED] = _on_ranks(folder, texts, backend)
    found[GGUF] = _from_gguf(name, folder / "m.gguf", texts, backend)
    return _made(found)


def _on_ranks(folder: Path, texts: tuple[Text, Text], backend: str) -> tuple[Tally, ...] | Absent:
    try:
        rows = ranked_rows(folder, RANKS, backend)
    except UnsupportedModel as e:
        return Absent("refused", str(e))
    return _whole_run(rows, texts)


def _from_gguf(name: str, file: Path, texts: tuple[Text, Text], backend: str) -> tuple[Tally, ...] | Absent:
    why = _why_no_gguf(name)
    if why:
        return Absent("none", why)
    return _whole_run(Harness(file, attention_backend=backend), texts)


def _why_no_gguf(name: str) -> str:
    """Return why a config has no GGUF, or "" if it has one."""
    kind = make_config(name).model_type
    if ARCHS.get(kind, kind) not in registry.GGUF:
        return f"a GGUF of {kind} is not read"
    lacking = FAMILIES[name].not_in_gguf
    return f"llama.cpp's converter does not write {lacking}" if lacking else ""


def _whole_run(rows: Rows, texts: tuple[Text, Text]) -> tuple[Tally, ...]:
    computed = compute_prompts(rows, texts)
    go_on(rows, computed.first, computed.second)
    return computed.first, computed.second


def _made(found: Found) -> Row:
    """Make a row from the worst of each column's tallies."""
    cells: dict[str, Cell] = {}
    greedy: list[int] = []
    for column in COLUMNS:
        tallies = found.get(column)
        if isinstance(tallies, Absent):
            cells[column] = tallies
        elif tallies is not None:
            cells[column] = max(tally.error for tally in tallies)
            greedy += [tally.greedy for tally in tallies]
    return Row(cells, min(greedy))
