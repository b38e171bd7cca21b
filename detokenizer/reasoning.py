"""Follows the reasoning at the beginning of an answer: counts its tokens, and says when it is over.

Stop strings count only in the answer proper, and usage reports the tokens of the reasoning.
"""

from __future__ import annotations

from ..messages.outputs import ReasoningReport
from ..messages.sampling import begins_open


class ReasoningWatch:
    """Reads the text of an answer token by token, until its reasoning is over."""

    __slots__ = ("_begin", "_end", "_is_open", "_reported", "_text", "begins_open", "is_over", "tokens")

    def __init__(self, begin: str, end: str, prompt_tail: str) -> None:
        """Begin before the first token of an answer.

        ``begin`` and ``end``: the texts around reasoning, "" for a format without reasoning. ``prompt_tail``: text of
        the prompt's last tokens, special ones included.
        """
        self._begin, self._end = begin.strip(), end
        self._text = ""
        self.begins_open = begins_open(begin, prompt_tail)
        """Whether the prompt ends within reasoning."""
        self.is_over = not begin
        """Whether no reasoning follows any more."""
        self.tokens = 0
        """Tokens of the reasoning so far."""
        self._is_open = self.begins_open
        self._reported: ReasoningReport | None = None

    @property
    def report(self) -> ReasoningReport | None:
        """Return whether the prompt ended within reasoning, and the number of reasoning tokens so far.

        It is None for a format without reasoning.
        """
        return ReasoningReport(self.begins_open, self.tokens) if self._begin else None

    def new_report(self) -> ReasoningReport | None:
        """Return ``report`` if it has changed since the last call, otherwise None."""
        if self._reported is not None and self._reported.tokens == self.tokens:
            return None
        self._reported = self.report
        return self._reported

    def feed(self, text: str) -> None:
        """Count one more output token, and look for the beginning and the end of the reasoning.

        If the answer turns out to begin without reasoning, the count returns to 0. Do nothing once the reasoning is
        over. ``text``: the text that the token completed, which may be "".
        """
        if not self.is_over:
            self.tokens += 1
            self._text += text
            self._look()

    def _look(self) -> None:
        if not self._is_open:
            start = self._text.lstrip()
            if start.startswith(self._begin):
                self._is_open, self._text = True, start[len(self._begin) :]
            elif not self._begin.startswith(start):
                self.is_over, self.tokens = True, 0
        if self._is_open:
            if self._end in self._text:
                self.is_over = True
            self._text = self._text[-len(self._end) :]
