"""A grammar that the output of a request must match."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .base import Message

MAX_GRAMMAR_CHARACTERS = 1 << 18
GrammarKind = Literal["json_schema", "regex", "lark", "ebnf", "choice", "structural_tag", "tool_calls"]


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A grammar as the client wrote it."""

    kind: GrammarKind
    """- "json_schema": a JSON schema. "choice": a JSON list of strings.
    - "regex": a regular expression for the whole output.
    - "lark": a grammar in the dialect of llguidance. "ebnf": one in GBNF, as llama.cpp and xgrammar have it.
    - "tool_calls": JSON, calls of tools in the format of the model; see ``server/output_parsers/forced.py``.
    - "structural_tag": JSON, free text with tags around parts that have schemas, as in SGLang.
    """
    source: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARACTERS)]
    field: Annotated[str, Meta(max_length=128)] = "grammar"
    """Name of the field that the client gave it in."""
    reasoning: tuple[str, str] = ("", "")
    """Texts that begin and end the reasoning before the output; empty: there is none."""
    is_reasoning_open: bool = False
    """Whether the prompt ends within reasoning. Otherwise the output may begin with some."""


class PrepareGrammar(Message):
    """Scheduler → worker: compile a grammar beside the steps, and keep it until ``ForgetGrammar``.

    Answered by ``GrammarPrepared``.
    """

    number: int
    grammar: Grammar


class GrammarPrepared(Message):
    """Worker → scheduler: the grammar of this ``number`` is compiled, or cannot be."""

    number: int
    nbytes: int = 0
    """Estimate of the memory that it takes."""


class ForgetGrammar(Message):
    """Scheduler → worker: drop the compiled grammar of this ``number``. No living request has it."""

    number: int
