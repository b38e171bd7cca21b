"""Files of a checkpoint, tensors that two of them hold, and heads that are tied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.model_files.checkpoint import checkpoint_files
from pdserve.model_files.errors import InvalidWeights
from pdserve.model_files.model_path import ModelSource
from tests.unit.model_files.test_model_loading import load, save_hf

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()


def write_index(folder: Path, content: object) -> None:
    (folder / "model.safetensors.index.json").write_text(content if isinstance(content, str) else json.dumps(content))


def test_the_single_file_comes_before_the_index(tmp_path: Path) -> None:
    touch(tmp_path, "a.safetensors", "b.safetensors", "c.safetensors")
    write_index(tmp_path, {"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}})
    assert [file.name for file in checkpoint_files(tmp_path)] == ["a.safetensors", "b.safetensors"]
    touch(tmp_path, "model.safetensors")
    assert [file.name for file in checkpoint_files(tmp_path)] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"weight_map": ', r"index\.json is no usable index"),
        ({"metadata": {}}, r"index\.json is no usable index .*weight_map"),
        ({"weight_map": {"x": 1}}, r"index\.json is no usable index"),
        ([1], r"index\.json is no usable index"),
        ({"weight_map": {}}, r"index\.json names no files"),
        ({"weight_map": {"x": "gone.safetensors"}}, r"index\.json names gone\.safetensors, which is not beside it"),
        ({"weight_map": {"x": "../a.safetensors"}}, r"index\.json names '\.\./a\.safetensors'"),
    ],
)
def test_a_broken_index_is_named(content: object, message: str, tmp_path: Path) -> None:
    write_index(tmp_path, content)
    with pytest.raises(InvalidWeights, match=message):
        checkpoint_files(tmp_path)


def test_shards_without_an_index_are_no_checkpoint(tmp_path: Path) -> None:
    touch(tmp_path, "model-00001-of-00002.safetensors")
    with pytest.raises(InvalidWeights, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json"):
        checkpoint_files(tmp_path)


def shard_with(source: ModelSource, extra: dict[str, torch.Tensor]) -> None:
    """Move the checkpoint into a shard, and put a second one with ``extra`` beside it."""
    folder = source.path
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "a.safetensors")
    save_file(extra, folder / "b.safetensors")
    write_index(folder, {"weight_map": dict.fromkeys(tensors, "a.safetensors") | {"z": "b.safetensors"}})


def test_a_tensor_may_lie_twice_if_it_is_the_same(tmp_path: Path) -> None:
    source = save_hf("llama", tmp_path)
    expected = load(source)[1]
    norm = load_file(tmp_path / "model.safetensors")["model.norm.weight"]
    shard_with(source, {"model.norm.weight": norm})
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load(source)[1].items())
    save_file({"model.norm.weight": norm + 1}, tmp_path / "b.safetensors")
    with pytest.raises(InvalidWeights, match=r"a\.safetensors and .*b\.safetensors hold 'model\.norm\.weight' with"):
        load(source)


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    source = save_hf("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"norm.weight": tensors["model.norm.weight"].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidWeights, match=r"holds 'norm\.weight' under two names"):
        load(source)


@pytest.mark.parametrize("names", [{TABLE}, {HEAD}, {TABLE, HEAD}])
def test_a_tied_pair_may_be_stored_under_either_name(names: set[str], tmp_path: Path) -> None:
    source = save_hf("qwen2", tmp_path)
    expected = load(source)[1]
    tensors = load_file(tmp_path / "model.safetensors")
    table = tensors.pop(TABLE)
    save_file(tensors | {name: table.clone() for name in names}, tmp_path / "model.safetensors")
    spec, weights = load(source)
    assert spec.tied_head
    assert weights.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())


def test_a_tied_head_with_other_values_is_refused(tmp_path: Path) -> None:
    source = save_hf("qwen2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    other = tensors[TABLE].clone()
    other[-1, -1] += 1
    save_file(tensors | {HEAD: other}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidWeights, match=r"model\.safetensors holds 'lm_head\.weight' .* tie_word_embeddings"):
        load(source)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert torch.equal(load(source)[1]["lm_head.weight"], other)


def test_an_untied_head_is_not_made_up(tmp_path: Path) -> None:
    source = save_hf("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != HEAD}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidWeights, match=r"lacks 1 tensors, 'lm_head\.weight'"):
        load(source)
