"""What one HTTP request waits for: its choices, filled in place as the engine answers.

A choice: submitted → (text, tokens)* → finished. The submission ends when every choice has finished, when one fails, or
when the client goes. News is not queued: whatever arrives while the client's socket is busy ends up in the same
``Delta``, which is what every API's renderer streams.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from ...messages.outputs import FinishReason, NamedLogprob, PromptText, ReqMeta, ReqText
from ...runtime.web.errors import without_frames
from .errors import AnswerMoved, ApiError, ClientGone
from .logprob_account import LogprobAccount


class Kind(Enum):
    """Who reads a choice, and how: a client as it grows, a client when it is whole, or nobody.

    A leg is the prefill's part of a request that another instance answers.
    """

    STREAM = auto()
    WHOLE = auto()
    LEG = auto()


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence that the engine generates. Times are ``time.monotonic()`` seconds, 0 for what has not happened.

    Its text is kept in the pieces in which it comes: to add to one string would copy all of it for each token. Where
    nothing repeats what a delta has told (``keeps_told`` False), that is not kept either, only counted.
    """

    index: int
    prompt_index: int
    rid: str
    wire_rid: str
    """Its id inside the instance."""
    arrival: float
    keep_output: bool = True
    keeps_told: bool = True
    """Whether text, tokens and log-probabilities are kept after a delta has told them."""
    kind: Kind = Kind.WHOLE
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    token_ids: list[int] = field(default_factory=list)
    """Output tokens that are kept."""
    logprobs: list[NamedLogprob] = field(default_factory=list)
    """Of the tokens that are kept."""
    finish: FinishReason | None = None
    meta: ReqMeta | None = None
    prompt: PromptText | None = None
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    finished_at: float = 0.0
    opened: bool = False
    """Whether there was a delta."""
    chars: int = 0
    """Characters of the output so far."""
    completion_tokens: int = 0
    """Tokens of the output so far."""
    told_chars: int = 0
    """Characters that deltas have told. More than ``chars`` for a moved answer that has not caught up."""
    told_tokens: int = 0
    """Tokens that deltas have told, likewise."""
    told_logprob_chars: int = 0
    """Characters that the tokens completed which are no longer kept, by their log-probabilities."""
    replay: bool = False
    """Whether its next tokens were another instance's, before it came here."""
    _pieces: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From arrival to the end. Of a choice that has finished."""
        return self.finished_at - self.arrival

    def goes_by(self, route: str) -> None:
        """The scheduler says which leg it is: what the instance's mode let expect may not be."""
        if route == "outgoing":
            self.kind = Kind.LEG

    @property
    def text(self) -> str:
        """The text that is kept: all of it for a whole answer."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def add(self, item: ReqText, now: float) -> None:
        """Take in what the engine says."""
        if self.keep_output:
            if item.text:
                self._pieces.append(item.text)
                self.chars += len(item.text)
            self.token_ids += item.token_ids
            self.completion_tokens += len(item.token_ids)
            if item.logprobs:
                self.logprobs += item.logprobs
        if item.meta is not None:
            self.meta = item.meta
            self.prompt_tokens = item.meta.prompt_tokens
            self.cached_tokens = item.meta.cached_tokens
        if item.prompt is not None:
            self.prompt = item.prompt
        if item.finish is not None:
            self.finish = item.finish
            self.finished_at = now

    def take(self) -> Delta:
        """Return what is new since the last call."""
        text, token_ids, logprobs = self.text, self.token_ids, self.logprobs
        # Of a moved answer more may have been told elsewhere than has come here yet.
        first_char = max(0, self.told_chars - (self.chars - len(text)))
        first_token = max(0, self.told_tokens - (self.completion_tokens - len(token_ids)))
        is_first, self.opened = not self.opened, True
        offset = self.told_chars
        self.told_chars = max(self.told_chars, self.chars)
        self.told_tokens = max(self.told_tokens, self.completion_tokens)
        if not self.keeps_told:
            self.told_logprob_chars += sum(entry.chars for entry in logprobs)
            self._pieces, self.token_ids, self.logprobs = [], [], []
        return Delta(
            choice=self,
            is_first=is_first,
            text=text[first_char:],
            token_ids=token_ids[first_token:],
            logprobs=logprobs[first_token:],
            offset=offset,
            finish=self.finish,
        )


class Delta(NamedTuple):
    """What is new of one choice; ``offset``: characters of its text before. ``text`` may be empty, also with tokens."""

    choice: Choice
    is_first: bool
    text: str
    token_ids: list[int]
    logprobs: list[NamedLogprob]
    offset: int
    finish: FinishReason | None


class Submission:
    """The choices of one HTTP request, the names that its owner has for it, and the way to wait for it. One waiter."""

    def __init__(
        self,
        choices: list[Choice],
        *,
        owner: str = "",
        names: list[str],
        streaming: bool,
        follows: bool = False,
        nbytes: int = 0,
        account: LogprobAccount | None = None,
    ) -> None:
        self._account = account
        self.logprobs = 0
        """Log-probabilities of prompts, and of output that is kept, alternatives included."""
        self.nbytes = nbytes
        """Length of the messages that asked for it."""
        self.follows = follows
        """Whether its client reads the rest elsewhere where it is told to."""
        self.choices = choices
        self.owner = owner
        self.names = names
        self._streaming = streaming
        self._running = len(choices)
        self._changed: dict[int, Choice] = {}
        self._failure: ApiError | ClientGone | AnswerMoved | None = None
        self._told = False
        self._quiet = True
        self._nudged = False
        self._wakeup = asyncio.Event()

    @property
    def is_abandoned(self) -> bool:
        """Whether the client has gone."""
        return isinstance(self._failure, ClientGone)

    @property
    def is_failed(self) -> bool:
        """Whether nothing more will come."""
        return self._failure is not None

    @property
    def is_moved(self) -> bool:
        """Whether its client reads the rest elsewhere."""
        return isinstance(self._failure, AnswerMoved)

    @property
    def done(self) -> bool:
        """Whether every choice has finished."""
        return not self._running

    def update(self, choice: Choice, item: ReqText, now: float) -> None:
        """``item`` arrived for ``choice``."""
        choice.add(item, now)
        if item.logprobs or item.prompt is not None:
            self._count_logprobs(choice, item)
        self._running -= item.finish is not None
        if self._streaming:
            self._changed[choice.index] = choice
            self._wakeup.set()
        elif not self._running:
            self._wakeup.set()

    def _count_logprobs(self, choice: Choice, item: ReqText) -> None:
        entries = list(item.logprobs or ()) if choice.keeps_told else []
        if item.prompt is not None:
            entries += item.prompt.logprobs or ()
        if self._account is not None:
            self._account.add(self, sum(1 + len(entry.top) for entry in entries))

    def fail(self, failure: ApiError | ClientGone | AnswerMoved) -> None:
        """Nothing more will come. The first reason counts; a client that has gone needs no other."""
        if self._failure is None or isinstance(failure, ClientGone):
            self._failure = failure
        self._wakeup.set()

    def close(self) -> None:
        """Nobody waits any more. What it failed with lets go of the frames that waited, which lead back to this."""
        if self._failure is not None:
            without_frames(self._failure)

    def tick(self) -> None:
        """Called every so often: where nothing came since the last call, ``news`` returns with nothing."""
        if self._quiet:
            self._nudged = True
            self._wakeup.set()
        self._quiet = True

    async def news(self) -> list[Delta]:
        """What changed since the last call; nothing after a ``tick`` only. Raises ``ApiError`` or ``ClientGone``.

        Before the first news an error wins, as it can still become the status; later, text that came before it does.
        """
        while not self._changed or (self._failure is not None and not self._told) or self.is_abandoned:
            if self._nudged and self._failure is None:
                self._nudged, self._told = False, True
                return []
            await self._wait()
        self._told, self._quiet, self._nudged = True, False, False
        deltas = [choice.take() for choice in self._changed.values()]
        self._changed.clear()
        return deltas

    async def finished(self) -> list[Choice]:
        """Every choice, once all have finished; raises ``ApiError``, ``ClientGone`` or ``AnswerMoved``."""
        while self._running or self._failure is not None:
            await self._wait()
        return self.choices

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._wakeup.clear()
        await self._wakeup.wait()
