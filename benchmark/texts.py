"""Prompts from a file: plain lines, JSON lines, or ShareGPT conversations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from ..model_files.errors import ModelError
from ..model_files.text.errors import TokenizerLoadError
from ..model_files.text.load import load_tokenizer
from ..model_files.text.text_tokenizer import TextTokenizer
from ..scheduler.options import SchedulerOptions
from .errors import WorkloadError
from .prompts import RequestSpec


class TextEntry(NamedTuple):
    """A prompt, and what says how much to ask for: a number of tokens, or a known answer; both may be missing."""

    prompt: str
    output_len: int | None = None
    answer: str | None = None


def read_texts(path: Path, limit: int | None) -> list[TextEntry]:
    """Read the first ``limit`` prompts of a file (None: all), in the format of its suffix; raises ``WorkloadError``."""
    try:
        content = path.read_text(encoding="utf-8")
        entries = _conversations(path, content) if path.suffix == ".json" else _lines(path, content)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise WorkloadError(f"{path}: {e.__class__.__name__}: {e}") from e
    if not entries:
        raise WorkloadError(f"{path} holds no prompts")
    return entries[:limit]


def _conversations(path: Path, content: str) -> list[TextEntry]:
    """Return the first question and answer of each conversation; conversations without them are left out."""
    loaded = orjson.loads(content)
    if not isinstance(loaded, list):
        raise WorkloadError(f"{path} is not a list of conversations")
    entries = []
    for item in loaded:
        turns: Any = item.get("conversations", ()) if isinstance(item, dict) else ()
        if len(turns) >= 2:
            entries.append(TextEntry(str(turns[0]["value"]), None, str(turns[1]["value"])))
    return entries


def _lines(path: Path, content: str) -> list[TextEntry]:
    is_json = path.suffix == ".jsonl"
    return [_json_line(line) if is_json else TextEntry(line) for line in content.splitlines() if line.strip()]


def _json_line(line: str) -> TextEntry:
    item: Any = orjson.loads(line)
    prompt = item.get("prompt") if isinstance(item, dict) else None
    if not isinstance(prompt, str):
        raise ValueError(f'not an object with a "prompt": {line[:60]}')
    return TextEntry(prompt, item.get("output_len"), item.get("answer"))


def text_requests(
    entries: Sequence[TextEntry], tokenizer_path: str | None, output_len: int | None
) -> list[RequestSpec]:
    """Make a request for each entry. Its prompt is sent as text or, with a tokenizer, as token ids.

    ``output_len``: tokens to ask for; None: what each entry says, or the length of its answer. Raises
    ``WorkloadError``.
    """
    if tokenizer_path is None:
        return [RequestSpec(e.prompt, _wanted(e, output_len, None)) for e in entries]
    tokenizer = _tokenizer(tokenizer_path)
    prompts = tokenizer.encode_batch([e.prompt for e in entries], add_special_tokens=True)
    return [
        RequestSpec(np.asarray(ids, np.int32), _wanted(e, output_len, tokenizer))
        for e, ids in zip(entries, prompts, strict=True)
        if ids
    ]


def _wanted(entry: TextEntry, output_len: int | None, tokenizer: TextTokenizer | None) -> int:
    if output_len is not None:
        return output_len
    if entry.output_len is not None:
        return entry.output_len
    if entry.answer is not None and tokenizer is not None:
        return max(1, len(tokenizer.encode_batch([entry.answer], add_special_tokens=False)[0]))
    raise WorkloadError(
        "the file doesn't say how many tokens to ask for: give --output-len, "
        "or --tokenizer where conversations hold the answers"
    )


def _tokenizer(path: str) -> TextTokenizer:
    try:
        return load_tokenizer(SchedulerOptions(model_path=path))
    except (TokenizerLoadError, ModelError) as e:
        raise WorkloadError(f"--tokenizer {path}: {e}") from e
