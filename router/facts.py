"""What a policy may ask about one request. Each fact is computed when it is asked for first, and then kept."""

from __future__ import annotations

from functools import cached_property

from .headers import Headers
from .request_body import MAX_KEY_BYTES, RequestBody

SESSION_HEADER = b"x-session-id"
BLOCK_BYTES = 512
MAX_BLOCKS = 2048
"""Maximum number of blocks of a prompt. It bounds the time on the event loop to about a millisecond."""


class Facts:
    """Facts about one request, for all of its attempts. They cost nothing until a policy asks for them."""

    def __init__(
        self, body: RequestBody, headers: Headers = (), key_name: str = "", *, is_checked: bool = True
    ) -> None:
        """Take the client's ``body`` and ``headers``. ``key_name``: the name of its API key, "" without one.

        ``is_checked``: the router has keys. A router without keys takes the name that a client gives.
        """
        self.body = body
        self._headers = headers
        self._key_name = key_name
        self._is_checked = is_checked

    @property
    def prompt_tokens(self) -> int:
        """Length of all prompts, estimated if they are text."""
        return self.body.prompt_tokens

    @property
    def prompt_bytes(self) -> int:
        """Length of the JSON of all prompts in bytes."""
        return sum(len(memoryview(part)) for part in self.body.prompt)

    @property
    def owner(self) -> str:
        """Name of the client's API key, "" without one. At a router without keys, all clients are one owner."""
        return self._key_name if self._is_checked else ""

    @property
    def is_prompt_alone(self) -> bool:
        """Whether the instance that computes the prompt answers, so that no decode takes part."""
        return self.body.is_prompt_alone

    @cached_property
    def session_key(self) -> bytes:
        """Name of the conversation that the request belongs to; empty without one.

        It is the field ``prompt_cache_key``, else the header ``x-session-id``, else the field ``user``.
        """
        header = next((value for name, value in self._headers if name == SESSION_HEADER), b"")
        return self.body.prompt_cache_key or header[:MAX_KEY_BYTES] or self.body.user

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Hashes of the prompt's blocks of ``BLOCK_BYTES`` bytes, each of a block and all before it.

        So two prompts have as many hashes in common as blocks of a common prefix, unless their API keys or cache
        namespaces differ. A block is of the client's JSON, in the order of the prompt. The rest after the last whole
        block does not count, nor does what follows ``MAX_BLOCKS``. Hashes differ from process to process, so clients
        can't construct collisions.
        """
        data = self._prompt_start(MAX_BLOCKS * BLOCK_BYTES)
        hashes: list[int] = []
        last = hash((self._key_name, self.body.cache_namespace))
        for end in range(BLOCK_BYTES, len(data) + 1, BLOCK_BYTES):
            last = hash((last, data[end - BLOCK_BYTES : end]))
            hashes.append(last)
        return tuple(hashes)

    def _prompt_start(self, size: int) -> bytes:
        """Return the first ``size`` bytes of the prompt, as JSON."""
        pieces: list[memoryview] = []
        for part in self.body.prompt:
            pieces.append(memoryview(part)[:size])
            size -= len(pieces[-1])
        return b"".join(pieces)
