"""What ``POST /completion`` takes: llama-server's body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator

from ....messages.grammar import Grammar
from ....messages.requests import MAX_TOP_LOGPROBS
from ....messages.sampling import MAX_BIAS, MAX_TEMPERATURE
from ....runtime.web.body import MAX_PROMPTS
from ..bodies.fields import INT32_MAX, INTEGRAL, MANY, MAX_PROMPT_IDS, ONE, TAG, Body, FieldError, PromptIds, TokenId
from ..bodies.request_fields import (
    MAX_BIASES,
    MAX_N,
    Bias,
    MinP,
    Penalty,
    RepetitionPenalty,
    RequestFields,
    SamplingFields,
    Seed,
    Stops,
    TopK,
    TopP,
)
from ..bodies.structure import Source, grammars_of, one_grammar
from ..bodies.unserved import ANYTHING, IGNORED, Unserved, neutral

TEXT, IDS, MIXED, OBJECT = TAG + "text", TAG + "ids", TAG + "mixed", TAG + "object"
MAX_MIXED_CHARACTERS = 1 << 20
"""Maximum length of all texts in mixed prompts together, in characters."""
SAMPLERS = ["dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
"""llama-server's own order, which bodies ask for that leave it out."""

COMPLETION: Unserved = {
    # Samplers that are not served, and their parameters, which mean nothing without them.
    **neutral(0, names="dynatemp_range dry_multiplier xtc_probability mirostat min_keep"),
    **neutral(1, names="typical_p"),
    **neutral(-1, 0, names="top_n_sigma"),
    **dict.fromkeys(("dynatemp_exponent", "xtc_threshold", "mirostat_tau", "mirostat_eta"), ANYTHING),
    **dict.fromkeys(("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"), ANYTHING),
    **neutral(
        [], SAMPLERS, ["penalties", *SAMPLERS], [one for one in SAMPLERS if one != "top_n_sigma"], names="samplers"
    ),
    # The context is never shifted, and the repetition penalty regards all tokens.
    **dict.fromkeys(("n_keep", "n_discard", "n_cache_reuse", "repeat_last_n"), IGNORED),
    **dict.fromkeys(("id_slot", "timings_per_token", "return_progress", "sse_ping_interval"), IGNORED),
    **neutral(0, names="n_indent t_max_predict_ms"),
    **neutral(False, names="post_sampling_probs grammar_lazy"),
    **neutral([], names="image_data lora response_fields grammar_triggers"),
}


def _prompt_kind(value: Any) -> str:
    if isinstance(value, list):
        return MIXED if {str, int} <= set(map(type, value)) else IDS
    return OBJECT if isinstance(value, dict) else TEXT


def _one_or_many(value: Any) -> str:
    """Return ``ONE`` for a text, an object, and a list with a token id; ``MANY`` for a list without one."""
    return MANY if isinstance(value, list) and int not in set(map(type, value)) else ONE


class PromptObject(Body):
    """A prompt with what belongs to it beside text, none of which is served."""

    unserved: ClassVar[Unserved] = neutral([], names="multimodal_data")

    prompt_string: str


Part = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[TokenId, Tag(IDS)],
    Discriminator(lambda value: TEXT if isinstance(value, str) else IDS),
]
MIXED_SCHEMA = {
    "type": "array",
    "items": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0, "maximum": INT32_MAX}]},
    "maxItems": MAX_PROMPT_IDS,
    "allOf": [{"contains": {"type": "string"}}, {"contains": {"type": "integer"}}],
}
"""JSON schema of a mixed prompt. Lists without texts or without token ids are other kinds of prompts."""
MixedPrompt = Annotated[
    list[Part],
    Field(fail_fast=True, max_length=MAX_PROMPT_IDS),
    AfterValidator(tuple),
    WithJsonSchema(MIXED_SCHEMA),
]
"""Token ids and texts, which become one prompt. A tuple, so that it is known without a look at each entry."""
OnePrompt = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[PromptIds, Tag(IDS)]
    | Annotated[MixedPrompt, Tag(MIXED)]
    | Annotated[PromptObject, Tag(OBJECT)],
    Discriminator(_prompt_kind),
]
Prompts = Annotated[
    Annotated[OnePrompt, Tag(ONE)]
    | Annotated[list[OnePrompt], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag(MANY)],
    Discriminator(_one_or_many),
]


def _bias_by_id(value: Any) -> Any:
    """Convert llama-server's list of pairs to an object. ``false`` is the lowest bias.

    Raises ``ValueError`` if a token is named otherwise than by its id.
    """
    if isinstance(value, list):
        pairs = [pair for pair in value if isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int]
        if len(pairs) < len(value):
            raise ValueError("must hold pairs of a token id and a number; /tokenize tells the ids of a text")
        value = {str(token): bias for token, bias in pairs}
    if not isinstance(value, dict):
        return value
    for token in value:
        if not (token.isascii() and token.isdigit() and len(token) <= len(str(INT32_MAX))):
            raise ValueError("names a token otherwise than by its id; /tokenize tells the ids of a text")
    return {token: -MAX_BIAS if bias is False else bias for token, bias in value.items()}


BIAS_VALUE = {"anyOf": [{"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}, {"const": False}]}
BIAS_PAIR = [{"type": "integer"}, BIAS_VALUE]
BIAS_SCHEMA = {
    "anyOf": [
        {"type": "object", "additionalProperties": BIAS_VALUE},
        {"type": "array", "items": {"type": "array", "prefixItems": BIAS_PAIR, "minItems": 2, "maxItems": 2}},
    ]
}
"""JSON schema of biases by token id: an object, or a list of pairs."""
LogitBias = Annotated[
    dict[str, Bias], Field(max_length=MAX_BIASES), BeforeValidator(_bias_by_id), WithJsonSchema(BIAS_SCHEMA)
]


class LlamaBody(RequestFields):
    """``POST /completion``. ``SAMPLING`` are its fields of sampling, ``OTHER_NAMES`` their names in other bodies."""

    unserved: ClassVar[Unserved] = COMPLETION
    OTHER_NAMES: ClassVar[Mapping[str, str]] = {"repeat_penalty": "repetition_penalty"}
    SAMPLING: ClassVar[tuple[str, ...]] = (
        *("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty"),
        *("stop", "ignore_eos", "logit_bias"),
    )

    prompt: Prompts
    model: str | None = None
    stream: bool = False
    n_predict: Annotated[int, Field(ge=-1, le=INT32_MAX), INTEGRAL] = -1
    """Maximum number of tokens to generate; -1: until the context is full."""
    n_cmpl: Annotated[int, Field(ge=1, le=MAX_N), INTEGRAL] = 1
    temperature: Annotated[float, Field(le=MAX_TEMPERATURE), AfterValidator(lambda value: max(value, 0.0))] = 1.0
    """0 and less: greedy."""
    top_k: TopK = -1
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    repeat_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    seed: Seed | None = None
    stop: Stops = Field(default_factory=list)
    ignore_eos: bool = False
    logit_bias: LogitBias = Field(default_factory=dict)
    n_probs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), INTEGRAL] = 0
    grammar: Source = ""
    """A grammar in GBNF."""
    json_schema: dict[str, Any] | None = None
    cache_prompt: bool = True
    """Whether KV of earlier requests is used."""
    return_tokens: bool = False

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens to generate."""
        return INT32_MAX if self.n_predict < 0 else self.n_predict

    @property
    def is_batch(self) -> bool:
        """Whether the body has a list of prompts, of which there may be one or none."""
        return isinstance(self.prompt, list) and not (self.prompt and isinstance(self.prompt[0], int))

    @property
    def prompts(self) -> list[str | list[int] | tuple[int | str, ...]]:
        """The prompts: texts, token ids, and tuples of both."""
        prompts: Any = self.prompt if self.is_batch else [self.prompt]
        return [one.prompt_string if isinstance(one, PromptObject) else one for one in prompts]

    def sampling(self) -> SamplingFields:
        """Return the fields of sampling that were given, under this server's names."""
        given = self.model_fields_set.intersection(self.SAMPLING)
        return SamplingFields(**{self.OTHER_NAMES.get(name, name): getattr(self, name) for name in given})

    def asked_grammar(self) -> Grammar | None:
        """Return what the output must match; None: anything. Raises ``FieldError`` if two fields are given."""
        # A schema that allows anything still asks for JSON.
        schema = None if self.json_schema is None else self.json_schema or "{}"
        return one_grammar(grammars_of({"json_schema": ("json_schema", schema), "grammar": ("ebnf", self.grammar)}))

    @model_validator(mode="after")
    def _check_grammar(self) -> LlamaBody:
        if (grammar := self.asked_grammar()) is not None and self.ignore_eos:
            raise FieldError("ignore_eos", f"can't go with {grammar.field}, which says where the output ends")
        return self

    @model_validator(mode="after")
    def _check_mixed(self) -> LlamaBody:
        mixed = [prompt for prompt in self.prompts if isinstance(prompt, tuple)]
        texts = [part for prompt in mixed for part in prompt if isinstance(part, str)]
        if len(texts) > MAX_PROMPTS:
            raise FieldError("prompt", f"holds {len(texts)} texts among token ids, the limit is {MAX_PROMPTS}")
        if (characters := sum(map(len, texts))) > MAX_MIXED_CHARACTERS:
            raise FieldError(
                "prompt", f"holds {characters} characters among token ids, the limit is {MAX_MIXED_CHARACTERS}"
            )
        return self
