"""What ``POST /tokenize``, ``/detokenize`` and ``/apply-template`` take, as vLLM, SGLang and llama-server do."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from ..bodies.fields import Body, FieldError, OneOrMany, TemplateArgs, TokenIds
from ..bodies.unserved import Unserved
from ..openai.schemas import ChatMessages
from ..openai.tools import ToolBodies

MAX_CHARACTERS = 1 << 20
MAX_IDS = 1 << 17
"""Maximum number of token ids in one question. ``text_questions.py`` refuses texts with too many tokens."""


class RenderedBody(Body):
    """What bodies with a conversation share, which the model's template renders."""

    unserved: ClassVar[Unserved] = {"chat_template": ("",), "mm_processor_kwargs": ({},)}

    model: str | None = None
    messages: ChatMessages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateArgs = Field(default_factory=dict)
    tools: ToolBodies = Field(default_factory=list)

    @property
    def characters(self) -> int:
        """Length of all texts of the body together, in characters, with reasoning, tools and template variables."""
        given = len(repr(self.chat_template_kwargs)) if self.chat_template_kwargs else 0
        given += len(repr(self.tools)) if self.tools else 0
        return given + sum(turn.characters for turn in self.messages or ())

    def check_characters(self, field: str) -> None:
        """Raise ``FieldError`` for ``field`` if the body has more than ``MAX_CHARACTERS`` characters."""
        if self.characters > MAX_CHARACTERS:
            raise FieldError(field, f"holds {self.characters} characters, the limit is {MAX_CHARACTERS}; ask in parts")


class ApplyTemplateBody(RenderedBody):
    """``POST /apply-template``: a conversation."""

    messages: ChatMessages

    @model_validator(mode="after")
    def _check_length(self) -> ApplyTemplateBody:
        self.check_characters("messages")
        return self


class TokenizeBody(RenderedBody):
    """``POST /tokenize``: texts, or a conversation as the model's template renders it."""

    prompt: OneOrMany[str] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", 'give exactly one of "prompt" and "messages"')
        self.check_characters("prompt" if self.messages is None else "messages")
        return self

    @property
    def characters(self) -> int:
        """Length of all texts of the body together, in characters, with reasoning, tools and template variables."""
        texts = [self.prompt] if isinstance(self.prompt, str) else self.prompt or ()
        return super().characters + sum(map(len, texts))


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_count(self) -> DetokenizeBody:
        count = sum(len(ids) if isinstance(ids, list) else 1 for ids in self.tokens)
        if count > MAX_IDS:
            raise FieldError("tokens", f"holds {count} ids, the limit is {MAX_IDS}; ask in parts")
        return self
