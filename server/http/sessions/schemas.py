"""What the endpoints of sessions take and answer."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, model_validator

from ..answers import AnswerBody, InstanceAnswer
from ..bodies.fields import Body, FieldError, PromptIds, Rid, TemplateArgs
from ..native.schemas import SamplingParamsBody
from ..openai.schemas import ChatMessages
from ..session_store.session_files import NAME, WANTED_NAME


def _check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError(WANTED_NAME)
    return name


Name = Annotated[str, AfterValidator(_check_name)]
Owner = Annotated[str, Field(max_length=64)]


class SnapshotBody(Body):
    """``POST /kv/snapshot``: a request that runs, or has ended lately, or a prompt to be computed.

    ``sampling_params``: how a prompt is to be answered, if it is gone on with. ``ttl_s``: seconds that it is kept.
    """

    name: Name
    rid: Rid | None = None
    text: Annotated[str, Field(min_length=1)] | None = None
    input_ids: PromptIds | None = None
    messages: ChatMessages | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateArgs = Field(default_factory=dict)
    sampling_params: SamplingParamsBody = SamplingParamsBody()
    extra_key: Annotated[str, Field(max_length=1024)] = ""
    ttl_s: Annotated[float, Field(gt=0)] | None = None

    OF_PROMPTS: ClassVar[tuple[str, ...]] = ("sampling_params", "extra_key")
    OF_MESSAGES: ClassVar[tuple[str, ...]] = ("add_generation_prompt", "chat_template_kwargs")

    @model_validator(mode="after")
    def _check_source(self) -> SnapshotBody:
        sources = ("rid", "text", "input_ids", "messages")
        given = [name for name in sources if getattr(self, name) is not None]
        if len(given) != 1:
            raise FieldError("rid", f"give exactly one of {', '.join(sources)}; found: {' and '.join(given) or 'none'}")
        useless = self.OF_PROMPTS if given[0] == "rid" else ()
        useless += () if given[0] == "messages" else self.OF_MESSAGES
        for name in useless:
            if name in self.model_fields_set:
                raise FieldError(
                    name, f"goes with {'a prompt' if name in self.OF_PROMPTS else 'messages'}; leave it out"
                )
        if self.input_ids == []:
            raise FieldError("input_ids", "is empty; a prompt needs at least one token")
        if self.sampling_params.n != 1:
            raise FieldError("sampling_params.n", "a session is one answer; leave it out")
        return self


class RestoreBody(Body):
    """``POST /kv/restore``. ``resume``: generate the rest of its answer; false: only bring its KV back.

    The KV then serves the next request with the same tokens. Default: as its answer was begun. ``owner``: the owner of
    the session, for an admin.
    """

    name: Name
    resume: bool | None = None
    stream: bool = False
    incremental: bool | None = None
    rid: Rid | None = None
    return_token_ids: bool = False
    owner: Owner | None = None


class SlotBody(Body):
    """``POST /slots/{id}?action=…`` of llama-server."""

    filename: Name


class SnapshotAnswer(AnswerBody):
    """``POST /kv/snapshot``. ``kv``: "stored", or why not all of it is. Sizes in bytes, times Unix's."""

    name: str
    created: float
    expires: float
    prompt_tokens: int
    output_tokens: int
    kv_tokens: int
    kv_bytes: int
    bytes: int
    kv: str


class RestoreAnswer(AnswerBody):
    """``POST /kv/restore`` without ``resume``: tokens that were found, and that had to be computed. With it the answer
    is that of ``POST /generate``.
    """

    name: str
    tokens: int
    cached_tokens: int
    computed_tokens: int
    resumable: bool
    token_ids: list[int] | None = None


class SessionEntry(AnswerBody):
    """``GET /kv/sessions``: one. ``damaged``: it can only be deleted."""

    name: str
    owner: str | None = None
    created: float | None = None
    expires: float | None = None
    model: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    kv_tokens: int | None = None
    kv_bytes: int | None = None
    bytes: int
    damaged: bool = False
    instances: list[str] | None = None


class SessionList(AnswerBody):
    """``GET /kv/sessions``."""

    sessions: list[SessionEntry]


class Deleted(AnswerBody):
    """``DELETE /kv/sessions/{name}``; a router says where."""

    deleted: str
    instances: list[InstanceAnswer] | None = None


class SlotAnswer(AnswerBody):
    """What llama-server says of a slot that was saved, restored or erased."""

    id_slot: int | str
    filename: str | None = None
    n_saved: int | None = None
    n_written: int | None = None
    n_restored: int | None = None
    n_read: int | None = None
    n_erased: int | None = None
    timings: dict[str, float] | None = None
