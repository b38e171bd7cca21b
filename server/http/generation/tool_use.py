"""The tools that the answers to a request may call: how answers are read, and what forces a call."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from ....messages.decode import shown
from ....messages.grammar import MAX_GRAMMAR_CHARACTERS, Grammar
from ...output_parsers.base import ParseRequest, Tools
from ...output_parsers.choice import OutputFormats
from ...output_parsers.forced import forced_calls
from ..errors import bad_request
from .output_reader import OutputReader, ParsedReader, PlainReader

NO_TOOLS = "the model's chat template has no tools; start the server with --chat-template FILE"
NO_FORMAT = "the format of this model's tool calls is not known; start the server with --tool-call-parser"


@dataclass(frozen=True)
class ToolUse:
    """What a request says about tools, in no API's words. All APIs call the fields ``tools`` and ``tool_choice``."""

    schemas: Tools = field(default_factory=dict)
    """JSON schema of each tool's parameters, by the tool's name; {} if no tool may be called."""
    is_forced: bool = False
    """Whether the answer must be a call."""
    only: str | None = None
    """Name of the tool that a forced call is of; None: any."""
    many: bool = True
    """Whether one answer may have several calls."""


def make_reader(
    use: ToolUse,
    formats: OutputFormats,
    *,
    separates_reasoning: bool,
    has_deltas: bool = True,
    most_calls: int | None = None,
) -> OutputReader:
    """Choose the reader that splits answers into text, reasoning and tool calls.

    ``formats``: the model's. ``separates_reasoning``: whether reasoning is kept apart from the text. ``has_deltas``:
    whether streams of the API can send arguments of calls in pieces. ``most_calls``: maximum calls of an answer with
    several; None: any number. Raises ``ApiError`` 400 for tools that the model's template or format does not support.
    """
    if use.schemas and not formats.renders_tools:
        raise bad_request("tools", NO_TOOLS)
    if use.schemas and formats.calls is None:
        raise bad_request("tools", NO_FORMAT)
    output_format = formats.for_request(has_tools=bool(use.schemas), separates_reasoning=separates_reasoning)
    if output_format is None:
        return PlainReader()
    request = ParseRequest(
        use.schemas, separates_reasoning=separates_reasoning, most_calls=most_calls if use.many else 1
    )
    return ParsedReader(output_format, request, streams_arguments=has_deltas and formats.streams_arguments)


def forced_call(use: ToolUse, formats: OutputFormats) -> Grammar | None:
    """Return the grammar of the calls that a request forces; None if it forces none.

    Raises ``ApiError`` 400 for an unknown tool, a format of calls that can't be forced, or too large a grammar.
    """
    if not use.is_forced or formats.calls is None:
        return None
    tools = use.schemas
    if use.only is not None:
        if use.only not in tools:
            raise bad_request("tool_choice", f"names {shown(use.only, 64)!r}, which is not among the tools")
        tools = {use.only: tools[use.only]}
    if (grammar := forced_calls(formats.calls, tools, many=use.many and use.only is None)) is None:
        raise bad_request(
            "tool_choice", f'must be "auto" or "none": calls in the format {formats.calls.name} can\'t be forced yet'
        )
    if len(grammar.source) > MAX_GRAMMAR_CHARACTERS:
        raise bad_request(
            "tools",
            f"make a grammar of {len(grammar.source)} characters for tool_choice; the limit is "
            f"{MAX_GRAMMAR_CHARACTERS}; give fewer tools, or shorter descriptions in their parameters",
        )
    return grammar


def part_id(rid: str, *place: int | str) -> str:
    """Return the id of a part of an answer, such as a tool call: 24 hexadecimal digits.

    It derives from the request's id and the part's place, so an answer that goes on at another instance keeps it.
    """
    name = "/".join(map(str, (rid, *place)))
    return hashlib.blake2b(name.encode(), digest_size=12).hexdigest()
