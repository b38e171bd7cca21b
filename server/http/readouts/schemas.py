"""What the endpoints take that read a vector from the pass over a prompt: embeddings, scores and ranks."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from ....messages.readout import MAX_LABELS
from ....runtime.web.body import MAX_PROMPTS
from ..bodies.fields import INT32_MAX, INTEGRAL, TAG, Body, FieldError, OneOrMany, PromptIds, TokenId
from ..bodies.request_fields import RequestFields
from ..bodies.unserved import IGNORED, Unserved, neutral
from ..openai.schemas import Prompt

TEXT, OBJECT, IDS = TAG + "text", TAG + "object", TAG + "ids"
EMBEDDINGS: Unserved = {
    **neutral([], names="messages"),
    **neutral("", names="lora_path chat_template"),
    **neutral(names="truncate_prompt_tokens chat_template_kwargs embed_dtype endianness"),
    **neutral(True, names="normalize use_activation"),
}
OLLAMA: Unserved = dict.fromkeys(("keep_alive", "options"), IGNORED)
SCORES: Unserved = {
    **neutral(names="truncate_prompt_tokens mm_processor_kwargs"),
    **neutral(True, names="use_activation"),
}
RERANK: Unserved = {
    **SCORES,
    **neutral(names="rank_fields"),
    **dict.fromkeys(("max_tokens_per_doc", "max_chunks_per_doc"), IGNORED),
}
Dimensions = Annotated[int, Field(ge=1, le=INT32_MAX), INTEGRAL]
QueryIds = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[PromptIds, Tag(IDS)],
    Discriminator(lambda value: IDS if isinstance(value, list) else TEXT),
]


class ReadoutBody(RequestFields):
    """What all of these bodies share. The instance that computes the prompts answers: there is no hand-over."""

    model: str | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    """vLLM's word for ``extra_key``."""

    @model_validator(mode="after")
    def _check_no_handover(self) -> ReadoutBody:
        if self.bootstrap_host is not None or self.bootstrap_room is not None:
            raise FieldError("bootstrap_host", "has no use here: the instance that computes the prompt answers")
        return self


class EmbeddingsBody(ReadoutBody):
    """``POST /v1/embeddings``."""

    unserved: ClassVar[Unserved] = EMBEDDINGS

    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Dimensions | None = None
    """Number of the first values that are kept before the embedding is normalised; None: all."""
    add_special_tokens: bool | None = None


class OllamaEmbedBody(ReadoutBody):
    """``POST /api/embed``. Without an input, the answer only says that the model is loaded."""

    unserved: ClassVar[Unserved] = OLLAMA

    input: OneOrMany[str] = Field(default_factory=list)
    dimensions: Dimensions | None = None
    truncate: bool = True
    """Whether a text that is too long for the context is cut at its end; False: it is refused."""


class OllamaEmbeddingsBody(ReadoutBody):
    """``POST /api/embeddings``, the older form of ``/api/embed``."""

    unserved: ClassVar[Unserved] = OLLAMA

    prompt: str = ""


class ScoreBody(ReadoutBody):
    """``POST /v1/score``: SGLang's form with ``label_token_ids``, or vLLM's with ``text_1`` and ``text_2``."""

    unserved: ClassVar[Unserved] = SCORES

    query: QueryIds | None = None
    items: Prompt | None = None
    label_token_ids: Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_LABELS)] | None = None
    """Tokens to score at the prompt's end."""
    apply_softmax: bool = False
    """Whether each prompt's probabilities are divided by their sum."""
    item_first: bool = False
    text_1: OneOrMany[str] | None = None
    text_2: OneOrMany[str] | None = None
    instruction: Annotated[str, Field(max_length=4096)] | None = None
    """Question about the pair that the model answers, for ``text_1`` and ``text_2``."""

    @model_validator(mode="after")
    def _check_form(self) -> ScoreBody:
        labels = {"query": self.query, "items": self.items, "label_token_ids": self.label_token_ids}
        texts = {"text_1": self.text_1, "text_2": self.text_2}
        is_of_texts = any(value is not None for value in texts.values())
        wanted, other = (texts, labels) if is_of_texts else (labels, texts)
        for name, value in other.items():
            if value is not None:
                raise FieldError(name, "can't go with text_1 and text_2")
        for name, value in wanted.items():
            if value is None:
                raise FieldError(name, f"is required with {' and '.join(n for n in wanted if n != name)}")
        return self


class DocumentBody(Body):
    """A document in the form of an object."""

    text: str


Document = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[DocumentBody, Tag(OBJECT)],
    Discriminator(lambda value: OBJECT if isinstance(value, dict | DocumentBody) else TEXT),
]


class RerankBody(ReadoutBody):
    """``POST /v1/rerank``."""

    unserved: ClassVar[Unserved] = RERANK

    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[Document], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    top_n: Annotated[int, Field(ge=1, le=INT32_MAX), INTEGRAL] | None = None
    return_documents: bool = True
    instruction: Annotated[str, Field(max_length=4096)] | None = None
    """Question about a query and a document that the model answers."""

    @property
    def texts(self) -> list[str]:
        """Texts of the documents."""
        return [document if isinstance(document, str) else document.text for document in self.documents]


def joined(query: Any, item: Any, *, item_first: bool) -> Any:
    """Return a query and an item, both texts or both token ids, one after the other."""
    return item + query if item_first else query + item
