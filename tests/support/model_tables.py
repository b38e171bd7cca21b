"""The tables of docs/models.md as text, and what they say read back from it."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pdserve.model_files.families import registry

from .families import FAMILIES, SHAPE, make_config
from .foreign import SERVED
from .gguf_export import ARCHS
from .model_rows import GREEDY, Absent, Cell, Row

Key = tuple[str, str]
"""A config and an engine."""
Refused = dict[str, dict[str, str]]
"""Messages of refusals, by heading and by what is asked."""
SMALLEST = 1e-6
"""Below this an error is a matter of a few roundings, and of the processor that made them."""
LARGEST = 1e-3
"""What an order of sums in float32 explains, for logits as large as these; more is a mistake."""
SLACK = 3.0
"""Factor by which an error may exceed that on the page.

Another processor adds up in another order, and the largest of some 10,000 errors varies more than the usual one. A
wrong feature costs a thousand times as much.
"""
SIZES = {*SHAPE, "head_dim"} - {"pad_token_id"}


def rounded_up(error: float) -> str:
    """Round ``error`` up to one digit, so that insignificant changes do not change the page."""
    exponent = math.floor(math.log10(max(error, SMALLEST)))
    # The smaller half of the last digit that a float has is no reason for the next one.
    digit = math.ceil(max(error, SMALLEST) / 10.0**exponent - 1e-9)
    return f"1e{exponent + 1}" if digit == 10 else f"{digit}e{exponent}"


def problems(page: Row | None, found: Row) -> Iterator[str]:
    """Yield each difference between the page and what was measured."""
    if page is None:
        yield "the page has no such row"
        return
    for column, cell in found.cells.items():
        said = page.cells.get(column)
        if isinstance(cell, float) and isinstance(said, float):
            if cell > SLACK * said:
                yield f"{column}: an error of {cell:.1e}, the page says {said:.0e}"
        elif cell != said:
            yield f"{column}: {cell}, the page says {said}"
    if found.greedy != page.greedy:
        yield f"{found.greedy} tokens are transformers', the page says {page.greedy}"


def mistakes(row: Row) -> Iterator[str]:
    """Yield what must not be on any page."""
    for column, cell in row.cells.items():
        if isinstance(cell, float) and cell > LARGEST:
            yield f"{column}: an error of {cell:.1e}"
    if row.greedy not in (None, GREEDY):
        yield f"only {row.greedy} of {GREEDY} tokens are transformers'"


def figures(rows: Mapping[Key, Row], columns: Sequence[str]) -> str:
    """Return a line for each row, and below the table notes on the cells without a figure."""
    notes: dict[Absent, int] = {}
    lines = list(_head("config", "engine", *columns, "greedy tokens"))
    for (config, engine), row in rows.items():
        cells = [_cell(row.cells[column], notes) for column in columns]
        greedy = "–" if row.greedy is None else f"{row.greedy} of {GREEDY}"
        lines.append(_line(f"`{config}`", engine, *cells, greedy))
    return "\n".join([*lines, "", *(f"{number}. {note.why}" for note, number in notes.items())]).rstrip()


def read_figures(text: str, columns: Sequence[str]) -> dict[Key, Row]:
    """Return the rows of a table that ``figures`` has written."""
    notes = dict(re.findall(r"^(\d+)\. (.*)$", text, flags=re.MULTILINE))
    rows: dict[Key, Row] = {}
    for config, engine, *cells, greedy in _lines(text):
        said = {column: _read_cell(cell, notes) for column, cell in zip(columns, cells, strict=True)}
        rows[config.strip("`"), engine] = Row(said, None if greedy == "–" else int(greedy.split()[0]))
    return rows


def refusals(refused: Refused) -> str:
    """Return a table under each heading."""
    parts = []
    for heading, messages in refused.items():
        rows = [_line(what, f"`{message}`") for what, message in messages.items()]
        parts.append("\n".join([f"### {heading}", "", *_head("asked for", "message"), *rows]))
    return "\n\n".join(parts)


def read_refusals(text: str) -> Refused:
    """Read the tables that ``refusals`` has written."""
    parts = re.split(r"^### (.*)$", text, flags=re.MULTILINE)[1:]
    tables = zip(parts[::2], parts[1::2], strict=True)
    return {heading: {what: message.strip("`") for what, message in _lines(table)} for heading, table in tables}


def families() -> str:
    """Return a line for each file of the product that describes families, with its own docstring."""
    files = dict.fromkeys(family.read.__module__ for family in registry.HF.values())
    lines = list(_head("file", "what it describes", "`model_type`", "GGUF architecture"))
    for module in files:
        names = [name for name, family in registry.HF.items() if family.read.__module__ == module]
        wrappers = [f"{name} (its text)" for name, text in registry.TEXT_OF.items() if text in names]
        archs = [name for name, read in registry.GGUF.items() if read.__module__ == module]
        lines.append(_line(f"`{module.split('.')[-1]}.py`", _about(module), *map(_listed, (names + wrappers, archs))))
    return "\n".join(lines)


def configs() -> str:
    """Return a line for each config: its family, its sizes, and the other fields of its config.json."""
    lines = list(_head("config", "`model_type`", "layers", "hidden, inner", "heads, KV heads, head_dim", "besides"))
    for name, (_, fields, _) in FAMILIES.items():
        config = make_config(name)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        sizes = (
            str(config.num_hidden_layers),
            f"{config.hidden_size}, {config.intermediate_size}",
            f"{config.num_attention_heads}, {config.num_key_value_heads}, {head_dim}",
        )
        lines.append(_line(f"`{name}`", config.model_type, *sizes, besides(fields)))
    return "\n".join(lines)


def foreign_configs() -> str:
    """Return a line for each config of a family that pdserve does not implement."""
    lines = list(_head("config", "class", "besides"))
    for name, (prefix, fields) in SERVED.items():
        lines.append(_line(f"`{name}`", prefix, besides(fields)))
    return "\n".join(lines)


def besides(fields: Mapping[str, Any]) -> str:
    """Return the fields of a config other than sizes."""
    return ", ".join(
        f"`{key}`" if value is True else f"`{key}={_short(value)}`"
        for key, value in fields.items()
        if key not in SIZES and (key not in SHAPE or SHAPE[key] != value)
    )


def model_type(name: str) -> str:
    """Return the family of a config."""
    return str(make_config(name).model_type)


def gguf_architecture(name: str) -> str:
    """Return the GGUF name of a config's family."""
    return ARCHS.get(model_type(name), model_type(name))


def _cell(cell: Cell, notes: dict[Absent, int]) -> str:
    if isinstance(cell, Absent):
        return f"{cell.word} ({notes.setdefault(cell, len(notes) + 1)})"
    return rounded_up(cell)


def _read_cell(text: str, notes: Mapping[str, str]) -> Cell:
    found = re.fullmatch(r"(\w+) \((\d+)\)", text)
    return float(text) if found is None else Absent(found[1], notes[found[2]])


def _short(value: object) -> str:
    if isinstance(value, Mapping):
        kinds = [value.get("rope_type")] if "rope_type" in value else [v["rope_type"] for v in value.values()]
        more = [key for key in ("mscale", "attention_factor", "partial_rotary_factor") if key in value]
        return " ".join([" and ".join(map(str, kinds)), *(f"{key} {value[key]}" for key in more)])
    if isinstance(value, list):
        return "[" + " ".join(str(item).removesuffix("_attention") for item in value) + "]"
    return str(value)


def _about(module: str) -> str:
    """Return the first line of the file's own docstring."""
    return (sys.modules[module].__doc__ or "").strip().splitlines()[0].rstrip(".")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" if " " not in name else "`{}` {}".format(*name.split(" ", 1)) for name in names)


def _head(*columns: str) -> tuple[str, str]:
    return _line(*columns), "|" + "---|" * len(columns)


def _line(*cells: str) -> str:
    # A cell ends at a bar, wherever it stands.
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _lines(text: str) -> Iterator[list[str]]:
    """Yield the cells of a table's lines below its head."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    for line in lines[1:]:
        yield [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
