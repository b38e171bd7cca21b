"""How many bytes of prompts an instance holds, for all API keys and for each."""

from __future__ import annotations

from collections.abc import Sequence

from ...key_shares import KeyShares
from ..errors import ApiError

MAX_HELD_BYTES = 1 << 30
"""Maximum total length of the messages of all requests that the engine has not ended.

The engine keeps each prompt in some form until its request ends. One API key may hold half of it.
"""


class _Abandoned:
    """The bytes of a submission that has no reader, and how many of its requests the engine has not ended."""

    __slots__ = ("key", "nbytes", "running")

    def __init__(self, key: str, nbytes: int, running: int) -> None:
        self.key, self.nbytes, self.running = key, nbytes, running


class HeldBytes:
    """The lengths of submissions, held until the engine has ended all of their requests.

    A client that goes gives nothing back at once: its prompts may still wait for the tokenizer. A key may hold as much
    as it leaves free.
    """

    def __init__(self, most: int = MAX_HELD_BYTES) -> None:
        self._shares = KeyShares(most)
        self._abandoned: dict[str, _Abandoned] = {}
        """Submissions without a reader, by the wire ids of their requests."""

    @property
    def nbytes(self) -> int:
        """Bytes of prompts held by all API keys together."""
        return self._shares.held

    def check(self, key: str, nbytes: int) -> None:
        """Raise ``ApiError`` 429 if the API key ``key`` may not hold ``nbytes`` more of prompts now; count nothing."""
        shares = self._shares
        if not shares.has_room(key, nbytes):
            raise ApiError(
                429,
                f"{nbytes} bytes of prompts beside {shares.of(key)} of this API key and {shares.held} of all keys are "
                f"too many: the limit is {shares.most}, of which a key may have as many as it leaves free; "
                "try again later",
                code=shares.refusal_code(key, nbytes),
            )

    def take(self, key: str, nbytes: int) -> None:
        """Count ``nbytes`` of prompts as held for ``key``, without a check."""
        self._shares.take(key, nbytes)

    def give_back(self, key: str, nbytes: int, running: Sequence[str]) -> None:
        """Give back ``nbytes`` that ``take`` counted for the API key named ``key``.

        They are given back once the engine has ended all requests ``running`` (wire ids), or at once if there are none.
        """
        if not running:
            self._shares.give_back(key, nbytes)
            return
        self._abandoned.update(dict.fromkeys(running, _Abandoned(key, nbytes, len(running))))

    def ended(self, rid: str) -> None:
        """Note that the engine has ended the request of wire id ``rid``.

        If it is the last one of a submission passed to ``give_back``, give back that submission's bytes.
        """
        abandoned = self._abandoned.pop(rid, None)
        if abandoned is None:
            return
        abandoned.running -= 1
        if not abandoned.running:
            self._shares.give_back(abandoned.key, abandoned.nbytes)
