"""The model that this instance serves, by the names that clients use and see."""

from __future__ import annotations

from dataclasses import dataclass

from ...model_files.model_path import resolve_model
from ...model_files.sampling_defaults import NO_DEFAULTS, SamplingDefaults, read_sampling_defaults
from ..options import ServerOptions

ALWAYS = "default"
"""A name that every instance answers to."""


@dataclass(frozen=True)
class ServedModel:
    """The served model. ``names``: answers report the first one. ``defaults``: sampling values for what a request
    leaves out.
    """

    names: tuple[str, ...]
    path: str
    defaults: SamplingDefaults = NO_DEFAULTS

    @staticmethod
    def read(options: ServerOptions) -> ServedModel:
        """Read the model's names and defaults from the options and its files. Raises ``ModelError``."""
        defaults = NO_DEFAULTS
        if options.sampling_defaults == "model":
            defaults = read_sampling_defaults(
                resolve_model(options.model_path, revision=options.revision, weights=False)
            )
        return ServedModel(options.model_names, options.model_path, defaults)

    @property
    def name(self) -> str:
        """Return the name that answers report."""
        return self.names[0]

    def answers_to(self, asked: str | None) -> bool:
        """Return whether ``asked`` names this model; None and "" name none and always do."""
        return not asked or asked in (ALWAYS, self.path, *self.names)
