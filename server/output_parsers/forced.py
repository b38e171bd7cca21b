"""Grammars of answers that must call a tool, in the format of the model."""

from __future__ import annotations

import json

from ...messages.grammar import Grammar
from .base import OutputFormat, Tools

OBJECT = {"type": "object"}


def forced_calls(output_format: OutputFormat, tools: Tools, *, many: bool) -> Grammar | None:
    """Return the grammar of an answer that must call one of ``tools``; None for a format without a ``CallShape``.

    ``many``: the answer may have several calls, if the format has a separator for them.
    """
    shape = output_format.shape
    if shape is None:
        return None
    source = {
        "marks": output_format.shown,
        "prefix": shape.prefix,
        "suffix": shape.suffix,
        "separator": shape.separator or "",
        "many": many and shape.separator is not None,
        "calls": [
            {
                "before": shape.before.replace("NAME", shape.written(name)),
                "schema": schema or OBJECT,
                "after": shape.after,
            }
            for name, schema in tools.items()
        ],
    }
    return Grammar("tool_calls", json.dumps(source, ensure_ascii=False), "tool_choice")
