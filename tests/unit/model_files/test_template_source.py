"""Where a model's chat templates are found: as transformers finds them, and with the file's name in every error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.model_files.text.errors import TokenizerLoadError
from pdserve.model_files.text.gguf_metadata import GGUFMetadata
from pdserve.model_files.text.named_templates import NamedTemplates
from pdserve.model_files.text.template_source import read_chat_template, templates_in_gguf
from pdserve.server.options import ServerOptions

NAMED = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]


def found(folder: Path, **files: Any) -> NamedTemplates | None:
    """Write files, ``.`` in place of ``__`` and ``/`` in place of ``___``, and read the folder's templates."""
    (folder / "tokenizer_config.json").write_text("{}")
    for name, value in files.items():
        file = folder / name.replace("___", "/").replace("__", ".")
        file.parent.mkdir(exist_ok=True)
        file.write_text(value if isinstance(value, str) else json.dumps(value))
    return read_chat_template(ServerOptions(tokenizer_path=str(folder)))


def texts(folder: Path, **files: Any) -> tuple[str, str | None]:
    """Return the default template and that for tools."""
    templates = found(folder, **files)
    assert templates is not None
    return templates.default, templates.tool_use


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config__json": {"chat_template": "D"}}, ("D", None)),
        ({"tokenizer_config__json": {"chat_template": NAMED}}, ("D", "T")),
        ({"tokenizer_config__json": {"chat_template": {"default": "D", "rag": "R"}}}, ("D", None)),
        (
            {"tokenizer_config__json": {"chat_template": "C"}, "chat_template__json": {"chat_template": "D"}},
            ("C", None),
        ),
        ({"chat_template__json": {"chat_template": "D"}}, ("D", None)),
        ({"chat_template__jinja": "F", "chat_template__json": {"chat_template": "D"}}, ("F", None)),
        ({"tokenizer_config__json": {"chat_template": NAMED}, "chat_template__jinja": "F"}, ("F", None)),
        (
            {
                "tokenizer_config__json": {"chat_template": "C"},
                "chat_template__jinja": "F",
                "additional_chat_templates___tool_use__jinja": "T",
                "additional_chat_templates___rag__jinja": "R",
            },
            ("F", "T"),
        ),
    ],
)
def test_templates_of_a_folder(tmp_path: Path, files: dict[str, Any], expected: tuple[str, str | None]) -> None:
    assert texts(tmp_path, **files) == expected


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config__json": {"chat_template": None}},
        {"tokenizer_config__json": {"chat_template": NAMED[::2]}},
        {"tokenizer_config__json": {"chat_template": "C"}, "additional_chat_templates___rag__jinja": "R"},
    ],
)
def test_a_folder_without_a_default_template_has_none(tmp_path: Path, files: dict[str, Any]) -> None:
    assert found(tmp_path, **files) is None


@pytest.mark.parametrize("value", [7, [7], [{"name": "default"}], [{"name": "default", "template": 7}], {"default": 7}])
def test_a_template_of_another_type_is_refused_with_its_file(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TokenizerLoadError, match=r"tokenizer_config.json: chat_template is neither"):
        found(tmp_path, tokenizer_config__json={"chat_template": value})


def test_a_template_that_is_no_text_is_refused_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerLoadError, match=r"chat_template.jinja can't be read"):
        found(tmp_path)


def test_the_origin_names_the_file(tmp_path: Path) -> None:
    templates = found(tmp_path, tokenizer_config__json={"chat_template": "D"})
    assert templates is not None
    assert templates.origin == f"chat_template in {tmp_path}/tokenizer_config.json"


def test_the_file_of_the_options_comes_first(tmp_path: Path) -> None:
    assert texts(tmp_path, tokenizer_config__json={"chat_template": NAMED}, mine__jinja="M") == ("D", "T")
    mine = read_chat_template(ServerOptions(tokenizer_path=str(tmp_path), chat_template=str(tmp_path / "mine.jinja")))
    assert mine == NamedTemplates("M", None, str(tmp_path / "mine.jinja"))
    (tmp_path / "mine.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerLoadError, match=r"--chat-template .*mine\.jinja can't be read"):
        read_chat_template(ServerOptions(tokenizer_path=str(tmp_path), chat_template=str(tmp_path / "mine.jinja")))


def test_templates_of_a_gguf_file() -> None:
    values: dict[str, Any] = {"tokenizer.chat_template": "D", "tokenizer.chat_template.tool_use": "T"}
    both = templates_in_gguf(GGUFMetadata(Path("m.gguf"), values))
    assert both == NamedTemplates("D", "T", "tokenizer.chat_template in m.gguf")
    assert templates_in_gguf(GGUFMetadata(Path("m.gguf"), {})) is None
    with pytest.raises(TokenizerLoadError, match=r"m\.gguf"):
        templates_in_gguf(GGUFMetadata(Path("m.gguf"), {"tokenizer.chat_template": [1]}))
