"""Tool calls of an answer: how they are read, forced and named."""

from __future__ import annotations

import hashlib

from ....messages.decode import shown
from ....messages.grammar import MAX_GRAMMAR_CHARACTERS, Grammar
from ...output_parsers.base import ParseRequest, Tools
from ...output_parsers.choice import OutputFormats
from ...output_parsers.forced import forced_calls
from ..errors import bad_request
from .output_reader import OutputReader, ParsedReader, PlainReader

NO_TOOLS = "the model's chat template has no tools; start the server with --chat-template FILE"
ANY_TOOL = ""
"""Stands for the name of the tool that must be called if any will do."""


def choose_reader(tools: Tools, formats: OutputFormats, *, separates_reasoning: bool) -> OutputReader:
    """Choose the reader that splits answers into text, reasoning and calls of ``tools``.

    ``formats``: the model's. ``separates_reasoning``: reasoning is kept apart from the text. Raises ``ApiError`` 400
    for tools that the model's template or format does not support.
    """
    if tools and not formats.renders_tools:
        raise bad_request("tools", NO_TOOLS)
    if tools and formats.calls is None:
        raise bad_request(
            "tools", "the format of this model's tool calls is not known; start the server with --tool-call-parser"
        )
    output_format = formats.for_request(has_tools=bool(tools), separates_reasoning=separates_reasoning)
    if output_format is None:
        return PlainReader()
    return ParsedReader(output_format, ParseRequest(tools, separates_reasoning=separates_reasoning))


def force_call(forced: str | None, tools: Tools, formats: OutputFormats, *, many: bool) -> Grammar | None:
    """Return the grammar of calls that ``tool_choice`` forces; None if it forces none.

    ``forced``: name of the tool that must be called, ``ANY_TOOL`` for any, None for no call. ``many``: several calls of
    any tools are allowed. Raises ``ApiError`` 400 for an unknown tool, a format of calls that can't be forced, or too
    large a grammar.
    """
    if forced is None or formats.calls is None:
        return None
    if forced != ANY_TOOL:
        if forced not in tools:
            raise bad_request("tool_choice", f"names {shown(forced, 64)!r}, which is not among the tools")
        tools = {forced: tools[forced]}
    if (grammar := forced_calls(formats.calls, tools, many=many and forced == ANY_TOOL)) is None:
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


def call_id(rid: str, choice: int, number: int) -> str:
    """Return the id of a choice's call of this ``number``. It derives from the request's id, ``rid``.

    So an answer that goes on at another instance keeps it.
    """
    return f"call_{hashlib.blake2b(f'{rid}/{choice}/{number}'.encode(), digest_size=12).hexdigest()}"
