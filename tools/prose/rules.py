"""The rules of docs/glossary.md and of plain English, each with what to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .text import Block, Kind
from .words import FRAGMENT_OPENERS, NO_VERBS, PERSON_WORDS

MAX_SENTENCE_WORDS = 25
SHOWN_CHARACTERS = 60
FIRST_WORD = re.compile(r"[^\s,.:;()]+")
PERSON = re.compile(rf"\b({'|'.join(sorted(PERSON_WORDS, key=len, reverse=True))})\b", re.IGNORECASE)


class Rule(NamedTuple):
    """A rule: its name in the baseline, what it counts, and what to do about a finding."""

    name: str
    counts: str
    advice: str


FRAGMENT = Rule(
    "fragments",
    "docstrings and help texts that continue something which is not there",
    'write a text that stands alone: "Maximum connected peers.", not "That are connected."',
)
VERB = Rule(
    "verbless",
    "docstrings of functions that do not begin with a verb",
    'begin with a verb: "Return the oldest request.", "Release one pin."',
)
WHO = Rule(
    "who",
    "words like who and nobody",
    'name the thing: "a request that is retracted", "the client", "no process"',
)
BANNED = Rule("banned", "words that docs/glossary.md replaces", "")
LONG = Rule(
    "long",
    f"sentences of more than {MAX_SENTENCE_WORDS} words",
    f"split it: one thought per sentence, at most {MAX_SENTENCE_WORDS} words",
)
RULES = (FRAGMENT, VERB, WHO, BANNED, LONG)


class Finding(NamedTuple):
    """A text on line ``line`` that breaks ``rule``."""

    line: int
    rule: Rule
    phrase: str
    advice: str


class Glossary:
    """The words that the glossary replaces, each with the term to write."""

    def __init__(self, terms: Mapping[str, str]) -> None:
        self._terms = terms
        words = sorted(terms, key=len, reverse=True)
        alternatives = "|".join(r"\s+".join(map(re.escape, word.split())) for word in words)
        self._pattern = re.compile(rf"(?<![\w-])({alternatives})(?!'?\w|-)", re.IGNORECASE) if terms else None

    def banned(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield the position of each banned word in ``text`` with the term to write instead."""
        for match in self._pattern.finditer(text) if self._pattern else ():
            yield match.start(), self._terms[" ".join(match[0].lower().split())]


def check_text(kind: Kind, blocks: Sequence[Block], glossary: Glossary) -> Iterator[Finding]:
    """Yield each place where a text breaks a rule. ``blocks``: the text's paragraphs and list items."""
    if kind not in (Kind.COMMENT, Kind.PAGE):
        yield from _check_opening(kind, blocks)
    for block in blocks:
        for match in PERSON.finditer(block.mask):
            yield Finding(block.line_of(match.start()), WHO, _around(block, match.start()), WHO.advice)
        for position, term in glossary.banned(block.mask):
            advice = f"write: {term} (docs/glossary.md)"
            yield Finding(block.line_of(position), BANNED, _around(block, position), advice)
        for sentence in block.sentences():
            if sentence.words > MAX_SENTENCE_WORDS:
                yield Finding(sentence.line, LONG, f"{sentence.words} words: {_shorten(sentence.text)}", LONG.advice)


def _check_opening(kind: Kind, blocks: Sequence[Block]) -> Iterator[Finding]:
    if not blocks:
        return
    first = next(blocks[0].sentences())
    words = FIRST_WORD.findall(first.text.lower())
    if words[:1] and (words[0] in FRAGMENT_OPENERS or words[:2] == ["the", "same"]):
        yield Finding(first.line, FRAGMENT, _shorten(first.text), FRAGMENT.advice)
    elif kind is Kind.FUNCTION and not (words and _may_be_verb(words[0])):
        yield Finding(first.line, VERB, _shorten(first.text), VERB.advice)


def _may_be_verb(word: str) -> bool:
    return word.replace("-", "").isalpha() and word not in NO_VERBS


def _shorten(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS].rsplit(" ", 1)[0] + " …"


def _around(block: Block, position: int) -> str:
    begin = max(block.text.rfind(" ", 0, max(position - 20, 0)), 0)
    return _shorten(" ".join(block.text[begin : position + SHOWN_CHARACTERS].split()))
