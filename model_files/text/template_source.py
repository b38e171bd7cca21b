"""Finds a model's chat template without loading its tokenizer: the HTTP process reads it, and stays small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ..errors import ModelNotFound
from ..json_file import read_optional_object
from ..model_path import ModelSource, is_file, resolve_model
from ..options import ModelOptions
from .errors import TokenizerLoadError
from .gguf_metadata import GGUFMetadata, read_gguf_metadata
from .named_templates import DEFAULT, TOOL_USE, NamedTemplates, choose_templates

TEMPLATE_FILE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
"""File of the default template, and folder of those with other names."""


def read_chat_template(options: ModelOptions) -> NamedTemplates | None:
    """Return the template of the options, else the model's own, else None, without loading a tokenizer.

    Raises ``TokenizerLoadError`` or ``ModelError``.
    """
    if options.chat_template is not None:
        return read_template_file(options.chat_template)
    source = find_tokenizer(options)
    if source.kind == "gguf":
        return templates_in_gguf(read_gguf_metadata(source.path, longest=0))
    return find_template_in_folder(source.path, read_json_object(source.path / "tokenizer_config.json"))


def find_template_in_folder(folder: Path, config: dict[str, Any]) -> NamedTemplates | None:
    """Find the folder's chat templates; None if there are none. Raises ``TokenizerLoadError``.

    Templates in files of their own replace those in ``config`` (tokenizer_config.json), as in transformers. A
    chat_template.json is for transformers' processors, and its tokenizers don't read it: it counts without the others.
    """
    named = {file.stem: file for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    if (folder / TEMPLATE_FILE).is_file():
        named = {DEFAULT: folder / TEMPLATE_FILE, **named}
    if named:
        texts = {name: _read_text(file, str(file)) for name, file in named.items()}
        return choose_templates(texts, str(named.get(DEFAULT, folder)))
    for file, values in (
        (folder / "tokenizer_config.json", config),
        (folder / "chat_template.json", read_json_object(folder / "chat_template.json")),
    ):
        if values.get("chat_template"):
            return choose_templates(_by_name(file, values["chat_template"]), f"chat_template in {file}")
    return None


def _by_name(file: Path, value: Any) -> dict[str, str]:
    """Return the templates of an entry ``chat_template`` by name. Raises ``TokenizerLoadError``.

    It is one template, a list of templates with names, or an object by name.
    """
    if isinstance(value, str):
        return {DEFAULT: value}
    try:
        named = value if isinstance(value, dict) else {entry["name"]: entry["template"] for entry in value}
        return msgspec.convert(named, dict[str, str])
    except (TypeError, KeyError, msgspec.ValidationError) as e:
        raise TokenizerLoadError(
            f"{file}: chat_template is neither a text nor a list of objects with name and template; "
            "correct it, or name a template with --chat-template"
        ) from e


def templates_in_gguf(metadata: GGUFMetadata) -> NamedTemplates | None:
    """Return the templates in the metadata of a GGUF file, or None. Raises ``TokenizerLoadError``."""
    key = "tokenizer.chat_template"
    found = {DEFAULT: metadata.string(key), TOOL_USE: metadata.string(f"{key}.{TOOL_USE}")}
    return choose_templates({n: text for n, text in found.items() if text is not None}, f"{key} in {metadata.path}")


def read_template_file(path: str) -> NamedTemplates:
    """Return the template in the file of ``--chat-template``. Raises ``TokenizerLoadError``."""
    return NamedTemplates(_read_text(Path(path).expanduser(), f"--chat-template {path}"), origin=path)


def _read_text(file: Path, name: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise TokenizerLoadError(f"{name} can't be read: {e}") from e


def find_tokenizer(options: ModelOptions) -> ModelSource:
    """Return the file or folder that the tokenizer is read from. A hub's files are downloaded unless they are cached.

    Raises ``TokenizerLoadError`` and ``ModelError``.
    """
    path = options.tokenizer_path
    if path is None:
        return resolve_model(options.model_path, revision=options.revision, weights=False)
    folder = Path(path).expanduser()
    # A folder with only a tokenizer is no model, but all that is needed here.
    if any(is_file(folder / name) for name in ("tokenizer.json", "tokenizer_config.json")):
        return ModelSource("hf", folder)
    try:
        return resolve_model(path, revision=options.tokenizer_revision, weights=False)
    except ModelNotFound as e:
        raise TokenizerLoadError(f"--tokenizer-path leads nowhere: {e}") from e


def read_json_object(file: Path) -> dict[str, Any]:
    """Read the JSON object in ``file``, {} if there is no such file; raises ``TokenizerLoadError``."""
    return read_optional_object(file, TokenizerLoadError)
