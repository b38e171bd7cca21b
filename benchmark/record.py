"""What is written down about each request while it runs."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from .errors import RequestError
from .readers import DONE, AnswerReader
from .sse import EventSplitter


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are seconds since the run began; token counts are the server's where it gives them.

    ``due``: when the schedule wanted it sent; ``sent``: when it was; ``ended``: when the answer was complete or given
    up.
    ``chunk_times``/``chunk_tokens``: arrival, and number of tokens, of each chunk that carried any.
    """

    group: str
    due: float
    output_len: int
    input_len: int | None
    sent: float = 0.0
    ended: float = 0.0
    chunk_times: array[float] = field(default_factory=lambda: array("d"))
    chunk_tokens: array[int] = field(default_factory=lambda: array("l"))
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Return the seconds from sending to the first chunk with a token. Needs such a chunk, as a good answer has."""
        return self.chunk_times[0] - self.sent

    @property
    def e2e(self) -> float:
        """Return the seconds from sending to the last chunk with a token. Needs such a chunk, as a good answer has."""
        return self.chunk_times[-1] - self.sent

    @property
    def itls(self) -> list[float]:
        """Return the seconds between successive chunks with tokens: one value fewer than there are chunks."""
        times = self.chunk_times
        return [times[i] - times[i - 1] for i in range(1, len(times))]

    @property
    def tpot(self) -> float | None:
        """Return the mean seconds for each output token after the first; None for fewer than two tokens."""
        if self.completion_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.completion_tokens - 1)


class StreamRecorder:
    """Fed by the HTTP client; writes chunk times into ``record``, counted from ``origin``."""

    def __init__(self, record: RequestRecord, reader: AnswerReader, origin: float) -> None:
        self._record = record
        self._reader = reader
        self._origin = origin
        self._splitter = EventSplitter()
        self._done = False
        self._problem: RequestError | None = None

    def feed(self, data: bytes, at: float) -> None:
        """Take bytes of the answer, and record the time of each event with tokens.

        ``at``: when they arrived, in seconds of the client's clock. Errors are kept until ``finish``.
        """
        for event in self._splitter.feed(data):
            if event == DONE:
                self._done = True
            elif self._problem is None:
                self._take(event, at)

    def _take(self, event: bytes, at: float) -> None:
        try:
            tokens = self._reader.read(event)
        except RequestError as e:
            # Kept for ``finish``: we are inside the socket's callback here.
            self._problem = e
            return
        if tokens > 0:
            self._record.chunk_times.append(at - self._origin)
            self._record.chunk_tokens.append(tokens)

    def finish(self) -> None:
        """Take over the server's counts into the record, because the answer has ended.

        Raises ``RequestError`` for an answer that is incomplete, without tokens or reports an error.
        """
        if self._problem is not None:
            raise self._problem
        if self._reader.ends_with_done and not self._done:
            raise RequestError("the stream ended without [DONE]")
        self._reader.finish()
        record, reader = self._record, self._reader
        if not record.chunk_times:
            raise RequestError("the answer holds no token")
        counted = sum(record.chunk_tokens)
        record.completion_tokens = counted if reader.completion_tokens is None else reader.completion_tokens
        known = record.input_len or 0
        record.prompt_tokens = known if reader.prompt_tokens is None else reader.prompt_tokens
        record.cached_tokens = reader.cached_tokens
