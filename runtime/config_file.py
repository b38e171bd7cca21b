"""``--config file.yaml``: options from a file, under those of the command line."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from cyclopts import App, ArgumentCollection, CycloptsError, Token
from cyclopts.config import Dict

from .web.keys import API_KEY_VARIABLE

CONFIG_FLAG = "--config"
VARIABLES = {"--api-key": API_KEY_VARIABLE}


def read_config(path: Path, flags: list[str]) -> dict[str, Any]:
    """Read the options in YAML file ``path``, keyed by flag name without dashes.

    Options with the value null are left out. ``flags`` are the names that exist ("--page-size"). Keys may be written
    "page-size" or "page_size". Raises ``CycloptsError`` if the file can't be read, is no mapping, or has an unknown or
    repeated key.
    """
    import yaml  # takes longer than a start without a file should

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise CycloptsError(msg=f"{CONFIG_FLAG} {path}: {e}") from e
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise CycloptsError(msg=f'{CONFIG_FLAG} {path}: write one "flag-name: value" a line')
    known = {flag.removeprefix("--") for flag in flags} - {CONFIG_FLAG.removeprefix("--")}
    options: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f' Did you mean "{near[0]}"?' if near else ""
            raise CycloptsError(msg=f'{CONFIG_FLAG} {path}: there is no option "{key}".{hint}')
        if name in options:
            raise CycloptsError(msg=f'{CONFIG_FLAG} {path}: "{name}" is given twice')
        if value is not None:
            options[name] = value
    return options


def apply_config(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Set every argument that the command line left out, from its environment variable or from the ``--config`` file.

    A variable sets what must not be seen among a process's arguments, and is in no file either. Raises
    ``CycloptsError``.
    """
    for flag, variable in VARIABLES.items():
        argument, value = arguments.get(flag, default=None), os.environ.get(variable)
        # An empty one is taken too, and refused: a secret that went missing must not open the server.
        if argument is not None and value is not None and not argument.tokens:
            argument.append(Token(keyword=flag, value=value, source=variable))
    given = arguments.get(CONFIG_FLAG, default=None)
    if given is None or not given.tokens:
        return
    path = Path(given.tokens[-1].value)
    flags = [argument.name for argument in arguments if argument.parse]
    Dict(read_config(path, flags), source=str(path), use_commands_as_keys=False)(app, commands, arguments)
