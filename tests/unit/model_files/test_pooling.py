"""Pooling of embeddings as a model's files ask for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.model_files.errors import ModelError
from pdserve.model_files.model_path import ModelSource
from pdserve.model_files.pooling import read_pooling

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


def write(folder: Path, modules: Any, pooling: dict[str, Any] | None = None) -> ModelSource:
    (folder / "modules.json").write_text(modules if isinstance(modules, str) else json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return ModelSource("hf", folder)


def test_without_files_the_last_token_counts(tmp_path: Path) -> None:
    assert read_pooling(ModelSource("hf", tmp_path)) == "last"
    assert read_pooling(ModelSource("gguf", tmp_path / "x.gguf")) == "last"
    assert read_pooling(write(tmp_path, [TRANSFORMER, NORMALIZE])) == "last"


@pytest.mark.parametrize(("mode", "pooling"), [("mean_tokens", "mean"), ("lasttoken", "last")])
def test_the_pooling_module_decides(mode: str, pooling: str, tmp_path: Path) -> None:
    others = dict.fromkeys(("pooling_mode_cls_token", "pooling_mode_max_tokens"), False)
    config = {"word_embedding_dimension": 64, **others, f"pooling_mode_{mode}": True, "include_prompt": True}
    assert read_pooling(write(tmp_path, [TRANSFORMER, POOLING, NORMALIZE], config)) == pooling


@pytest.mark.parametrize(
    ("modules", "config", "named"),
    [
        ([TRANSFORMER, POOLING], {"pooling_mode_cls_token": True}, "pooling_mode_cls_token"),
        (
            [TRANSFORMER, POOLING],
            {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
            "pooling_mode_lasttoken and pooling_mode_mean_tokens",
        ),
        ([TRANSFORMER, POOLING], {}, "no pooling"),
        ([TRANSFORMER, POOLING, DENSE], {"pooling_mode_mean_tokens": True}, "Dense"),
        ("{", None, "modules.json"),
        ([TRANSFORMER, POOLING], None, "config.json"),
        ([POOLING | {"path": "../other"}], None, r"names the folder '\.\./other'"),
        ([POOLING | {"path": ".."}], None, r"names the folder '\.\.'"),
        ([POOLING | {"path": "/etc"}], None, "names the folder '/etc'"),
        ([POOLING | {"path": "a\0b"}], None, "names the folder"),
        ([POOLING | {"path": "a" * 300}], None, "names the folder"),
        ([POOLING | {"path": 7}], None, "modules.json"),
        ([{"type": "x" * 3000}], None, "are not served"),
    ],
)
def test_what_is_not_served_is_named_with_the_option(
    modules: Any, config: dict[str, Any] | None, named: str, tmp_path: Path
) -> None:
    source = write(tmp_path, modules, config)
    with pytest.raises(ModelError, match=named):
        read_pooling(source)
