"""The model that this instance serves, as clients ask for it and hear of it."""

from __future__ import annotations

from dataclasses import dataclass

from ...model_files.model_path import resolve_model
from ...model_files.sampling_defaults import NO_DEFAULTS, SamplingDefaults, read_sampling_defaults
from ...runtime.options import ServerOptions

ALWAYS = "default"
"""A name that every instance answers to."""


@dataclass(frozen=True)
class ServedModel:
    """``names``: the first one is what answers say. ``defaults``: of sampling, where a request leaves something out."""

    names: tuple[str, ...]
    path: str
    defaults: SamplingDefaults = NO_DEFAULTS

    @staticmethod
    def read(options: ServerOptions) -> ServedModel:
        """From the options and the model's files; raises ``ModelError``."""
        defaults = NO_DEFAULTS
        if options.sampling_defaults == "model":
            defaults = read_sampling_defaults(
                resolve_model(options.model_path, revision=options.revision, weights=False)
            )
        return ServedModel(options.model_names, options.model_path, defaults)

    @property
    def name(self) -> str:
        """The name that answers say."""
        return self.names[0]

    def answers_to(self, asked: str | None) -> bool:
        """Whether a client that asks for this name means the model; None and "" name none."""
        return not asked or asked in (ALWAYS, self.path, *self.names)
