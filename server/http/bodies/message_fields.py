"""Limits of the messages in a body."""

from __future__ import annotations

MAX_PARTS = 4096
"""Maximum number of parts in the content of one message."""
MAX_MESSAGES = 4096
