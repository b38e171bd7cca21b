"""Framing of server-sent events, as every HTTP front writes them."""

DATA_PREFIX = b"data: "
EVENT_END = b"\n\n"
DONE_EVENT = b"data: [DONE]\n\n"
"""Last event of a stream."""
