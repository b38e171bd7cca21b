"""What can be wrong with a grammar."""

from __future__ import annotations


class GrammarError(Exception):
    """A grammar cannot be used. The message says where and why."""
