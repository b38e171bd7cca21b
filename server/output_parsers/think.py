"""Reasoning between ``<think>`` and ``</think>``, and nothing else: DeepSeek R1, QwQ, SmolLM3 and many others."""

from __future__ import annotations

from .base import OutputFormat, ParseRequest
from .reader import Parser, Reader
from .sections import only_text, reasoning

PAIR = ("<think>", "</think>")


def parse(reader: Reader, request: ParseRequest) -> Parser:
    """Parse an answer in a format with reasoning only: add its reasoning and text to ``reader.events``.

    Yields whenever it needs more text.
    """
    yield from reasoning(reader, request, PAIR)
    yield from only_text(reader)


THINK = OutputFormat("think", parse, PAIR, PAIR, (PAIR[1:],))
