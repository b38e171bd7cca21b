"""Decides once, for all processes of a server, which commit of a hub model they load.

Each process finds the model's files itself. If each asked for the newest commit, a push in between would give
them different ones. Then a tokenizer might not belong to the weights.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TypeVar

from ..model_files.errors import ModelNotFound
from ..model_files.model_path import pinned_revision
from .options import ServerOptions
from .supervisor import InstanceFailed

log = logging.getLogger(__name__)

Options = TypeVar("Options", bound=ServerOptions)


def pin_model(options: Options) -> Options:
    """Return the options with ``revision`` and ``tokenizer_revision`` set to the commits that they mean on the hub now.

    They stay as they are for a model or tokenizer that is not from the hub. May ask the hub. Raises ``InstanceFailed``
    if a model or tokenizer is not found.
    """
    revision = _pin(options.model_path, "--revision", options.revision)
    tokenizer_revision = options.tokenizer_revision
    if options.tokenizer_path is not None:
        tokenizer_revision = _pin(options.tokenizer_path, "--tokenizer-revision", tokenizer_revision)
    return replace(options, revision=revision, tokenizer_revision=tokenizer_revision)


def _pin(path: str, option: str, revision: str | None) -> str | None:
    try:
        commit = pinned_revision(path, revision)
    except ModelNotFound as e:
        raise InstanceFailed(str(e)) from e
    if commit != revision:
        log.info("%s: %s is commit %s now; %s pins it", path, revision or "the newest revision", commit, option)
    return commit
