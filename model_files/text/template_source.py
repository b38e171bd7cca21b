"""Finds a model's chat template without loading its tokenizer: the HTTP process reads it, and stays small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ..errors import ModelNotFound
from ..model_path import ModelSource, resolve_model
from ..options import ModelOptions
from .errors import TokenizerLoadError
from .gguf_metadata import read_gguf_metadata


def read_chat_template(options: ModelOptions) -> str | None:
    """Return the template of the options, else the model's own, else None, without loading a tokenizer.

    Raises ``TokenizerLoadError`` or ``ModelError``.
    """
    if options.chat_template is not None:
        return read_template_file(options.chat_template)
    source = find_tokenizer(options)
    if source.kind == "gguf":
        return read_gguf_metadata(source.path).string("tokenizer.chat_template")
    return find_template_in_folder(source.path, read_json_object(source.path / "tokenizer_config.json"))


def find_template_in_folder(folder: Path, config: dict[str, Any]) -> str | None:
    """Find the default chat template: a file of its own, or the config's entry (one template, or a list with names)."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    value = read_json_object(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value}.get("default")
    return value if isinstance(value, str) else None


def read_template_file(path: str) -> str:
    """Return the template in the file of ``--chat-template``. Raises ``TokenizerLoadError``."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise TokenizerLoadError(f"--chat-template {path} can't be read: {e}") from e


def find_tokenizer(options: ModelOptions) -> ModelSource:
    """Return the file or folder that the tokenizer is read from. Raises ``TokenizerLoadError`` and ``ModelError``."""
    path = options.tokenizer_path
    if path is None:
        return resolve_model(options.model_path, revision=options.revision, weights=False)
    folder = Path(path).expanduser()
    # A folder with only a tokenizer is no model, but all that is needed here.
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return ModelSource("hf", folder)
    try:
        return resolve_model(path, revision=options.tokenizer_revision, weights=False)
    except ModelNotFound as e:
        raise TokenizerLoadError(f"--tokenizer-path leads nowhere: {e}") from e


def read_json_object(file: Path) -> dict[str, Any]:
    """Read the JSON object in ``file``, {} if there is no such file; raises ``TokenizerLoadError``."""
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as e:
        raise TokenizerLoadError(f"{file} can't be read: {e}") from e
