"""OpenAI's harmony format: messages with a channel and perhaps a recipient. GPT-OSS writes it.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f …<|message|>{…}<|call|>

Channel ``analysis`` is reasoning, ``final`` and ``commentary`` are text; a recipient makes a message a call.
"""

from __future__ import annotations

import re
from collections.abc import Generator

from .base import OutputFormat, ParseRequest
from .json_calls import read_arguments
from .json_scan import json_text
from .reader import SPACE, Incomplete, Malformed, Parser, Reader

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*([A-Za-z]+)")


def parse(reader: Reader, request: ParseRequest) -> Parser:
    """Parse an answer in OpenAI's harmony format: add its reasoning, text and calls to ``reader.events``.

    Yields whenever it needs more text. The answer begins within the header of its first message, after
    ``<|start|>assistant``.
    """
    while True:
        yield from reader.skip_space()
        if reader.has_ended and reader.at == len(reader.text):
            return
        head = yield from _header(reader)
        if head is None:
            continue
        recipient, channels = _RECIPIENT.search(head), _CHANNEL.findall(head)
        channel = channels[-1] if channels else "final"
        if recipient is not None and recipient[1].startswith("functions."):
            yield from _call(reader, recipient[1].removeprefix("functions."), channel, is_offered=bool(request.tools))
        elif channel == "analysis":
            yield from _body(reader, reasoning=True)
        elif recipient is not None and recipient[1] not in ("assistant", "user"):
            # A tool that OpenAI's own service has built in.
            yield from _skip_body(reader)
        else:
            yield from _body(reader, reasoning=False)


def _header(reader: Reader) -> Generator[None, None, str | None]:
    """Read a message's header, and return it without the marks around it.

    Return None, and skip the message, for a header that another mark or the answer's end breaks off. At the answer's
    end, what can be text for the user is emitted.
    """
    start = reader.at
    try:
        head, mark = yield from reader.until(MESSAGE, *ENDS)
    except Incomplete:
        text = reader.text[start:]
        if START not in text and CHANNEL not in text and "to=" not in text:
            reader.emit_text(text)
        elif not reader.is_cut and (rest := re.split(r"<\|channel\|>\s*(?:final|commentary)", text)[-1]) != text:
            reader.emit_text(rest.lstrip(SPACE))
        reader.at = len(reader.text)
        return None
    reader.drop_read()
    return head if mark == MESSAGE else None


def _body(reader: Reader, *, reasoning: bool) -> Parser:
    """Emit a message's text, as reasoning or as text for the user, up to the mark that ends it.

    A mark that neither a new message nor the end of the text follows is part of the text.
    """
    while mark := (yield from reader.show_until(*ENDS, reasoning=reasoning)):
        yield from reader.skip_space()
        follows = yield from reader.sees(START)
        if follows or reader.at == len(reader.text):
            reader.drop_read()
            return
        emit = reader.emit_reasoning if reasoning else reader.emit_text
        emit(reader.space * reasoning + mark + reader.text[len(mark) : reader.at])
        reader.drop_read()


def _skip_body(reader: Reader) -> Parser:
    try:
        yield from reader.until(*ENDS)
    except Malformed:
        reader.at = len(reader.text)
    reader.drop_read()


def _call(reader: Reader, name: str, channel: str, *, is_offered: bool) -> Parser:
    """Emit the call of the tool ``name``, with the JSON arguments at the reader's position.

    If the arguments are not valid, or ``is_offered`` is False, emit the message's text instead. In an answer cut by a
    limit, such a message is dropped.
    """
    start = reader.at
    try:
        yield from read_arguments(reader, name) if is_offered else json_text(reader)
        yield from reader.skip_space()
        mark = yield from reader.takes(*ENDS)
        if not is_offered or (not mark and reader.at < len(reader.text)):
            raise Malformed("end")
    except Malformed:
        reader.at = 0 if reader.break_call() else start
        if not reader.is_cut:
            yield from _body(reader, reasoning=channel == "analysis")
        else:
            reader.at = len(reader.text)
            reader.drop_read()
    else:
        reader.complete_call()


HARMONY = OutputFormat(
    "gpt_oss",
    parse,
    (START, CHANNEL, MESSAGE, *ENDS, "<|constrain|>"),
    ("analysis<|message|>", "<|end|>"),
    (("<|channel|>", "analysis"),),
)
