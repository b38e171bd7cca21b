"""Chooses the formats by which the answers of a served model are read."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ...messages.sampling import OutputMarks
from .base import OutputFormat, ParseRequest
from .reader import Parser, Reader
from .registry import FORMATS, HARMONY_NAME
from .sections import reasoning
from .think import THINK

AUTO, NONE = "auto", "none"
if TYPE_CHECKING:
    ParserName = str
else:
    ParserName = Literal[(AUTO, NONE, *(one.name for one in FORMATS))]
"""Value of ``--tool-call-parser`` and ``--reasoning-parser``."""
JOINT = re.compile(r"""["']\s*(?:-?}}\s*{{-?|~)\s*["']""")
"""End of a string in a template, and the beginning of the next one that is printed behind it."""
BY_NAME = {one.name: one for one in FORMATS}


@dataclass(frozen=True)
class OutputFormats:
    """Formats of one model. ``calls``: of its tool calls, None if they are not known. ``reasoning``: likewise."""

    calls: OutputFormat | None = None
    reasoning: OutputFormat | None = None
    renders_tools: bool = False
    """Whether the chat template prints tools."""
    streams_arguments: bool = True
    """Whether streams tell the arguments of calls while the model writes them."""

    def for_request(self, *, has_tools: bool, separates_reasoning: bool) -> OutputFormat | None:
        """Return the format to parse a request's answers with; None if the whole answer is text.

        ``has_tools``: the model may call tools. ``separates_reasoning``: reasoning is kept apart from the text.
        Harmony's format is used in any case, because its text is never plain.
        """
        calls = self.calls if has_tools else None
        thoughts = self.reasoning if separates_reasoning or self.reasoning is BY_NAME[HARMONY_NAME] else None
        if calls is None or thoughts is None or calls is thoughts:
            return calls or thoughts
        return _combined(calls, thoughts)


PLAIN_TEXT = OutputFormats()


def choose_formats(calls: str, thoughts: str, template: str | None, *, streams_arguments: bool = True) -> OutputFormats:
    """Return a model's formats of tool calls and of reasoning, by the options ``calls`` and ``thoughts``.

    "auto" takes the first format with signs that the chat template contains, "none" takes none. ``template``: None if
    the model has no chat template.
    """
    text = _printed(template or "")
    found = next((one for one in FORMATS if _has_signs(text, one)), None)
    renders_tools = "tools" in text
    own = None
    if found is not None and found.reasoning[0].strip() and found.reasoning[1].strip() in text:
        own = found
    elif _has_signs(text, THINK):
        own = THINK
    of_calls = _chosen(calls, found if renders_tools and found is not THINK else None)
    return OutputFormats(of_calls, _chosen(thoughts, own), renders_tools, streams_arguments)


def marks_of(output_format: OutputFormat) -> OutputMarks:
    """Return the marks of a format for the detokenizer.

    They are the special tokens that it shows as text, and the texts that begin and end the reasoning.
    """
    return OutputMarks(output_format.shown, output_format.reasoning)


def _printed(template: str) -> str:
    """Return a chat template with its strings as it prints them, so that a format's signs can be found in it.

    Strings printed one after the other are joined, escapes of quotes and line breaks are replaced, and white space
    becomes one space.
    """
    joined = JOINT.sub("", template)
    return " ".join(joined.replace('\\"', '"').replace("\\n", "\n").split())


def _has_signs(text: str, output_format: OutputFormat) -> bool:
    return any(all(sign in text for sign in alternative) for alternative in output_format.signs)


def _chosen(name: str, found: OutputFormat | None) -> OutputFormat | None:
    return found if name == AUTO else BY_NAME.get(name)


def _combined(calls: OutputFormat, thoughts: OutputFormat) -> OutputFormat:
    """Return a format that reads reasoning as ``thoughts`` does and tool calls as ``calls`` does."""
    return OutputFormat(
        f"{thoughts.name}+{calls.name}",
        _parse_combined(calls, thoughts.reasoning),
        (*calls.shown, *thoughts.shown),
        thoughts.reasoning,
        shape=calls.shape,
    )


def _parse_combined(calls: OutputFormat, pair: tuple[str, str]) -> Callable[[Reader, ParseRequest], Parser]:
    def parse(reader: Reader, request: ParseRequest) -> Parser:
        yield from reasoning(reader, request, pair)
        yield from calls.parse(reader, replace(request, begins_in_reasoning=False, separates_reasoning=False))

    return parse
