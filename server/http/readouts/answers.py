"""Answers with embeddings, scores and ranks, for the OpenAPI page and for tests."""

from __future__ import annotations

from typing import Literal

from pydantic import RootModel

from ..answers import AnswerBody


class CachedPart(AnswerBody):
    """``prompt_tokens_details``."""

    cached_tokens: int


class PromptUsage(AnswerBody):
    """``usage`` of prompts without output."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedPart


class EmbeddingEntry(AnswerBody):
    """The embedding of one input: numbers, or base64 of their float32 bytes."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsAnswer(AnswerBody):
    """``POST /v1/embeddings``."""

    object: Literal["list"]
    data: list[EmbeddingEntry]
    model: str
    usage: PromptUsage


class OllamaEmbedAnswer(AnswerBody):
    """``POST /api/embed``. Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsAnswer(AnswerBody):
    """``POST /api/embeddings``."""

    embedding: list[float]


class LabelScores(AnswerBody):
    """``POST /v1/score`` with labels: each prompt's probability of each label."""

    object: Literal["scoring"]
    scores: list[list[float]]
    model: str
    usage: PromptUsage


class PairScore(AnswerBody):
    """Score of one pair of texts, from 0 to 1."""

    index: int
    object: Literal["score"]
    score: float


class PairScores(AnswerBody):
    """``POST /v1/score`` with texts."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: PromptUsage


class ScoreAnswer(RootModel[LabelScores | PairScores]):
    """The form of the answer is that of the body."""


class RankedText(AnswerBody):
    """A document."""

    text: str


class RankedDocument(AnswerBody):
    """A document's score from 0 to 1, and its place in the body."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class RerankAnswer(AnswerBody):
    """``POST /v1/rerank``: the best document first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PromptUsage
