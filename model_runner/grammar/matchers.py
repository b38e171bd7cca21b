"""Matchers of output against grammars, and the token masks that they allow.

A matcher's state is a function of the grammar and the output so far. So a row that starts again, after a retraction, a
hand-over or on another instance, gets the matcher that it had.

The mask of a row's next token is computed on a thread of its own while the next pass runs. llguidance releases the
interpreter meanwhile.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ...messages.base import I32
from ...messages.grammar import Grammar
from ...model_files.grammar.lowering import lower
from ...model_files.options import ModelOptions
from ...runtime.machine.threads import place_thread, set_niceness

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from .tokenizer import GrammarTokenizer

log = logging.getLogger(__name__)
COMPILER_NICE = 10
"""Niceness of the thread that compiles, so that a large grammar does not slow the steps."""
NOT_SERVED = "this worker serves no grammars"
BYTES_PER_CHARACTER = 400
"""Memory of a compiled grammar per character of its translation. Measured: 0 to 380; llguidance does not tell."""
F32 = npt.NDArray[np.float32]


class TokenMatcher(Protocol):
    """State of one row's output."""

    def penalties(self) -> F32:
        """Return what is added to the logits of the next token, [V] float32: 0 if it is allowed, else -inf.

        Waits until it is computed. No token is allowed if the matcher has failed.
        """


class MakesMatchers(Protocol):
    """Makes matchers for the rows of one model."""

    def prepare(self, grammar: Grammar, then: Callable[[int], None]) -> None:
        """Compile ``grammar`` on another thread and call ``then`` there with its estimated bytes; don't wait.

        ``then`` is called even if the grammar can't be used.
        """

    def forget(self, grammar: Grammar) -> None:
        """Drop the compiled ``grammar``. Rows that have a matcher of it keep theirs."""

    def make(self, grammar: Grammar, output: I32) -> TokenMatcher:
        """Return a matcher for ``grammar``, in the state after the tokens ``output``."""

    def advance(self, chosen: Sequence[tuple[TokenMatcher, int]]) -> None:
        """Feed each matcher the next token of its output, and compute the penalties after it; don't wait for that."""


class NoMatchers:
    """Stands for ``Matchers`` on devices without structured output. Requests with a grammar are refused before."""

    def prepare(self, grammar: Grammar, then: Callable[[int], None]) -> None:
        """Raise ``AssertionError``: requests with a grammar are refused before."""
        raise AssertionError(NOT_SERVED)

    def forget(self, grammar: Grammar) -> None:
        """Raise ``AssertionError``: requests with a grammar are refused before."""
        raise AssertionError(NOT_SERVED)

    def make(self, grammar: Grammar, output: I32) -> TokenMatcher:
        """Raise ``AssertionError``: requests with a grammar are refused before."""
        raise AssertionError(NOT_SERVED)

    def advance(self, chosen: Sequence[tuple[TokenMatcher, int]]) -> None:
        """Do nothing if ``chosen`` is empty; else raise ``AssertionError``, as there can be no matcher."""
        assert not chosen, NOT_SERVED


class _Compiled(NamedTuple):
    matcher: LLMatcher | None
    """The matcher of an empty output; None if the grammar can't be used."""
    nbytes: int


NOT_USABLE = _Compiled(None, 0)


class Matchers:
    """Compiles grammars for the tokenizer of one model, and keeps them until they are to be forgotten."""

    def __init__(self, options: ModelOptions, vocab_size: int) -> None:
        self._options = options
        self._vocab_size = vocab_size
        self._tokenizer: GrammarTokenizer | None = None
        self._compiled: dict[Grammar, Future[_Compiled]] = {}
        # The calling thread is bound to one core later, and threads inherit that.
        cores = os.sched_getaffinity(0)

        def begin(nice: int) -> None:
            # Neither call raises. An executor takes no more work once its initializer has failed.
            place_thread(0, cores)
            set_niceness(nice)

        self._masks = ThreadPoolExecutor(1, "grammar-masks", initializer=begin, initargs=(0,))
        self._compiler = ThreadPoolExecutor(1, "grammar-compiler", initializer=begin, initargs=(COMPILER_NICE,))

    def prepare(self, grammar: Grammar, then: Callable[[int], None]) -> None:
        """Queue ``grammar`` for compilation unless it is cached, and then a call of ``then`` on the compiler's thread.

        Never waits. ``then`` gets the estimated bytes of the compiled grammar, also if it can't be used.
        """
        compiled = self._compile_soon(grammar)
        # One thread: it gets here when the grammar is compiled.
        self._compiler.submit(lambda: then(compiled.result().nbytes))

    def forget(self, grammar: Grammar) -> None:
        """Drop the compiled ``grammar`` from the cache. Matchers that rows have of it stay usable."""
        self._compiled.pop(grammar, None)

    def make(self, grammar: Grammar, output: I32) -> TokenMatcher:
        """Return a matcher that has consumed ``output``, and queue the computation of its next token's mask.

        Waits for the compiler. The matcher of a grammar that can't be used allows no token.
        """
        compiled = self.compile(grammar)
        if compiled is None:
            return _NoMatcher(self._vocab_size)
        matcher = compiled.deep_copy()
        if len(output):
            matcher.consume_tokens(output.tolist())
        made = _Matcher(matcher, self._vocab_size)
        made.computed = self._masks.submit(made.compute)
        return made

    def advance(self, chosen: Sequence[tuple[TokenMatcher, int]]) -> None:
        """Queue one job on the masks' thread, which feeds all tokens to their matchers and computes the next masks.

        Matchers of grammars that can't be used are skipped.
        """
        pairs = [(matcher, token) for matcher, token in chosen if isinstance(matcher, _Matcher)]

        def advance() -> None:
            for matcher, token in pairs:
                matcher.take(token)

        # One job for all rows: to hand over a job of its own for each costs as much as a mask.
        computed = self._masks.submit(advance)
        for matcher, _ in pairs:
            matcher.computed = computed

    def compile(self, grammar: Grammar) -> LLMatcher | None:
        """Wait until ``grammar`` is compiled, and return its matcher before any output; None if it can't be used.

        The matcher is cached: copy it before it takes tokens.
        """
        return self._compile_soon(grammar).result().matcher

    def _compile_soon(self, grammar: Grammar) -> Future[_Compiled]:
        if grammar not in self._compiled:
            self._compiled[grammar] = self._compiler.submit(self._compile, grammar)
        return self._compiled[grammar]

    def _compile(self, grammar: Grammar) -> _Compiled:
        from llguidance import LLMatcher

        try:
            tokenizer = self._load_tokenizer()
            lowered = lower(grammar, tokenizer.special_id)
            made = LLMatcher(tokenizer.tokens, lowered, log_level=0)
        except Exception:  # the tokenizer process refuses what cannot be used; whatever else it is, ends its request
            log.exception("a grammar cannot be used")
            return NOT_USABLE
        if made.is_error():
            log.error("a grammar cannot be compiled: %s", made.get_error()[:200])
            return NOT_USABLE
        return _Compiled(made, len(lowered) * BYTES_PER_CHARACTER)

    def _load_tokenizer(self) -> GrammarTokenizer:
        if self._tokenizer is None:
            # Imported here: only requests with a grammar need them.
            from .tokenizer import load_grammar_tokenizer

            self._tokenizer = load_grammar_tokenizer(self._options, self._vocab_size)
        return self._tokenizer


class _NoMatcher:
    """Stands for the matcher of a grammar that cannot be used: it allows no token."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def penalties(self) -> F32:
        return np.full(self._vocab_size, -np.inf, np.float32)


class _Matcher:
    """A matcher of llguidance. All but ``penalties`` runs on the masks' thread."""

    computed: Future[None]

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._bits = np.zeros((vocab_size + 31) // 32 * 4, np.uint8)
        """One bit a token, lowest first; 1: allowed."""
        self._penalties = np.zeros(vocab_size, np.float32)
        self._has_failed = False

    def penalties(self) -> F32:
        self.computed.result()
        return self._penalties

    def take(self, token: int) -> None:
        try:
            self._matcher.consume_token(token)
        except BaseException:  # a panic of the library is no Exception, and must end this request alone
            log.exception("a token cannot be matched")
            self._has_failed = True
        self.compute()

    def compute(self) -> None:
        try:
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        except BaseException:  # as above
            log.exception("a token mask cannot be computed")
            self._has_failed = True
        if self._has_failed or self._matcher.is_error():
            self._bits[:] = 0
        allowed = np.unpackbits(self._bits, count=len(self._penalties), bitorder="little").view(np.bool_)
        self._penalties = np.where(allowed, np.float32(0.0), np.float32(-np.inf))
