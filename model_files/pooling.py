"""How a model's makers pool hidden states to an embedding: ``modules.json`` of sentence-transformers."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..messages.readout import Pooling
from .errors import ModelError, brief, shortened
from .json_file import BROKEN_JSON, read_json_object
from .model_path import ModelSource

MODULES = "modules.json"
MODES: dict[str, Pooling] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
"""Pooling by the field of a Pooling module's configuration."""
KNOWN_MODULES = frozenset({"Transformer", "Pooling", "Normalize"})
"""Modules that are served. Embeddings are always normalised."""
MAX_NAME = 255
"""Characters of a folder's name; no file system has longer ones."""
ADVICE = "name the pooling by --pooling mean or --pooling last"


class _Module(msgspec.Struct):
    """One entry of ``modules.json``. ``path``: the folder of its configuration."""

    type: str = ""
    path: str = ""


def read_pooling(source: ModelSource) -> Pooling:
    """Read the pooling that the model's files ask for; "last" if they say nothing.

    Raises ``ModelError`` if they ask for something else than "mean", "last" and a normalisation.
    """
    file = source.path / MODULES
    if source.kind == "gguf" or not file.is_file():
        return "last"
    try:
        modules = msgspec.json.decode(file.read_bytes(), type=list[_Module])
    except BROKEN_JSON as e:
        raise ModelError(f"{file} can't be read: {brief(e)}; correct it, or {ADVICE}") from e
    folders = {module.type.rpartition(".")[2]: module.path for module in modules}
    if unknown := sorted(folders.keys() - KNOWN_MODULES):
        kinds = shortened(", ".join(unknown))
        raise ModelError(f"{file}: modules of type {kinds} are not served; to leave them out, {ADVICE}")
    if "Pooling" not in folders:
        return "last"
    config_file = _config_file(file, folders["Pooling"])
    config = read_json_object(config_file, ModelError)
    asked = sorted(name for name, value in config.items() if name.startswith("pooling_mode_") and value is True)
    if len(asked) != 1 or asked[0] not in MODES:
        names = shortened(" and ".join(asked)) or "no pooling"
        raise ModelError(f"{config_file} asks for {names}, which is not served; {ADVICE}")
    return MODES[asked[0]]


def _config_file(modules: Path, folder: str) -> Path:
    """Return the configuration in a module's ``folder``. Raises ``ModelError`` unless that lies beside ``modules``."""
    is_plain = Path(folder).name == folder != ".." and folder.isprintable() and len(folder) <= MAX_NAME
    if not is_plain:
        raise ModelError(f"{modules} names the folder {shortened(repr(folder))}: give one beside it, or {ADVICE}")
    return modules.parent / folder / "config.json"
