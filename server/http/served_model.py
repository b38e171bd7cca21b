"""The model that this instance serves, by the names that clients use and see."""

from __future__ import annotations

from dataclasses import dataclass

from ...messages.decode import shown
from ...messages.readout import Pooling
from ...model_files.model_path import resolve_model
from ...model_files.pooling import read_pooling
from ...model_files.sampling_defaults import NO_DEFAULTS, SamplingDefaults, read_sampling_defaults
from ...model_files.text.template_source import read_chat_template
from ..options import ServerOptions
from ..output_parsers.choice import NONE, PLAIN_TEXT, OutputFormats, choose_formats
from .errors import ApiError

ALWAYS = "default"
"""A name that every instance answers to."""
LATEST = ":latest"
"""Tag of Ollama's, which a name without a tag stands for. Clients get names with it from ``/api/tags``."""


@dataclass(frozen=True)
class ServedModel:
    """The served model. ``names``: answers report the first one. ``defaults``: sampling values for what a request
    leaves out. ``formats``: how its answers mark tool calls and reasoning. ``template``: its chat template, "" if it
    has none or if the options ask for no parsers.
    """

    names: tuple[str, ...]
    path: str
    defaults: SamplingDefaults = NO_DEFAULTS
    formats: OutputFormats = PLAIN_TEXT
    template: str = ""
    pooling: Pooling = "last"
    """How embeddings are made of hidden states."""

    @staticmethod
    def read(options: ServerOptions) -> ServedModel:
        """Make the served model: names from the options, sampling defaults and output formats from the model's files.

        The files are read only as far as the options ask for defaults or parsers. Raises ``ModelError`` and
        ``TokenizerLoadError``.
        """
        defaults = NO_DEFAULTS
        if options.sampling_defaults == "model":
            defaults = read_sampling_defaults(
                resolve_model(options.model_path, revision=options.revision, weights=False)
            )
        calls, thoughts = options.tool_call_parser, options.reasoning_parser
        template = None if calls == thoughts == NONE else read_chat_template(options)
        text = None if template is None else template.with_tools
        formats = choose_formats(calls, thoughts, text, streams_arguments=options.stream_tool_arguments)
        text = "" if template is None else template.default
        pooling = options.pooling if options.pooling != "auto" else pooling_of(options)
        return ServedModel(options.model_names, options.model_path, defaults, formats, text, pooling)

    @property
    def name(self) -> str:
        """Return the name that answers report: the first of ``names``."""
        return self.names[0]

    def answers_to(self, asked: str | None) -> bool:
        """Return whether ``asked`` names this model; None and "" name none and always do.

        A name may have the tag ``LATEST``.
        """
        return not asked or not {asked, asked.removesuffix(LATEST)}.isdisjoint((ALWAYS, self.path, *self.names))


def pooling_of(options: ServerOptions) -> Pooling:
    """Return the pooling that the model's files ask for. Raises ``ModelError``."""
    return read_pooling(resolve_model(options.model_path, revision=options.revision, weights=False))


def check_model(asked: str | None, model: ServedModel) -> None:
    """Raise ``ApiError`` 404 if a client asks for a model that is not the one served.

    None asks for no particular one.
    """
    if not model.answers_to(asked):
        message = f'model: "{shown(asked or "")}" is not served here; "{model.name}" is'
        raise ApiError(404, message, param="model", code="model_not_found")
