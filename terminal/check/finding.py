"""What was found: one line, how bad it is, and what to do about it."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Level(StrEnum):
    """``WARNING``: it runs, but not as well as it could. ``PROBLEM``: it does not, or not for long."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(NamedTuple):
    """``topic`` in a word or two; ``advice`` says what to do, "" where there is nothing to do."""

    topic: str
    level: Level
    text: str
    advice: str = ""


def ok(topic: str, text: str) -> Finding:
    """Return a finding of level ``OK`` about ``topic``."""
    return Finding(topic, Level.OK, text)


def warning(topic: str, text: str, advice: str = "") -> Finding:
    """Return a finding that something works but could be better. ``advice``: what to do; "" if there is nothing."""
    return Finding(topic, Level.WARNING, text, advice)


def problem(topic: str, text: str, advice: str = "") -> Finding:
    """Return a finding that something does not work. ``advice``: what to do; "" if there is nothing."""
    return Finding(topic, Level.PROBLEM, text, advice)
