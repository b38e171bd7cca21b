"""Framing of server-sent events. Streams are written by ``server/http/generation/`` and ``router/client_answer.py``."""

DATA_PREFIX = b"data: "
EVENT_END = b"\n\n"
DONE_EVENT = b"data: [DONE]\n\n"
"""Last event of a stream."""
