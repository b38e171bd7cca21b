"""Checkpoints with files that are cut, doubled, stale or strange."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .checkpoint import INDEX, SINGLE, Change, Checkpoint, of_config
from .variant import Variant

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
Parts = dict[str, dict[str, Tensor]]


def halves(tensors: Mapping[str, Tensor]) -> Parts:
    """Return the tensors in two files."""
    names = sorted(tensors)
    middle = len(names) // 2
    return {ONE: {n: tensors[n] for n in names[:middle]}, TWO: {n: tensors[n] for n in names[middle:]}}


def sharded(index: Any = None, **more: Any) -> Change:
    """Return a change into two shards. ``index``: another index than the right one. ``more``: keys of the index."""

    def change(checkpoint: Checkpoint) -> None:
        checkpoint.shard(halves(checkpoint.tensors), index)
        if more:
            checkpoint.json[INDEX] |= more

    return change


def with_parts(edit: Any) -> Change:
    """Return a change into two shards that ``edit`` changes before they are written; their index names the tensors."""

    def change(checkpoint: Checkpoint) -> None:
        parts = halves(checkpoint.tensors)
        edit(parts)
        checkpoint.shard(parts)

    return change


def with_index(edit: Any) -> Change:
    """Return a change into two shards, with a ``weight_map`` that ``edit`` changes afterwards."""

    def change(checkpoint: Checkpoint) -> None:
        checkpoint.shard(halves(checkpoint.tensors))
        edit(checkpoint.json[INDEX]["weight_map"])

    return change


def with_bytes(file: str, edit: Any) -> Change:
    """Return a change into two shards. ``edit`` changes the bytes of one of them, ``file``."""

    def change(checkpoint: Checkpoint) -> None:
        parts = halves(checkpoint.tensors)
        checkpoint.shard(parts)
        checkpoint.weights[file] = edit(checkpoint.bytes_of(parts[file]))

    return change


def with_single(edit: Any) -> Change:
    """Return a change into two shards, beside which a single file lies with the tensors that ``edit`` makes."""

    def change(checkpoint: Checkpoint) -> None:
        checkpoint.shard(halves(checkpoint.tensors))
        checkpoint.weights[SINGLE] = edit(dict(checkpoint.tensors))

    return change


def with_tensors(edit: Any) -> Change:
    """Return a change of a single file to the tensors that ``edit`` makes."""

    def change(checkpoint: Checkpoint) -> None:
        checkpoint.weights[SINGLE] = edit(dict(checkpoint.tensors))

    return change


def _double(parts: Parts, scale: float) -> None:
    name = sorted(parts[ONE])[0]
    parts[TWO][name] = parts[ONE][name] * scale


def _lose(parts: Parts) -> None:
    parts[TWO].pop(sorted(parts[TWO])[0])


def _no_index(checkpoint: Checkpoint) -> None:
    checkpoint.shard(halves(checkpoint.tensors))
    del checkpoint.json[INDEX]


def _lack_shard(checkpoint: Checkpoint) -> None:
    checkpoint.shard(halves(checkpoint.tensors))
    del checkpoint.weights[TWO]


def _strange_metadata(checkpoint: Checkpoint) -> None:
    checkpoint.metadata = {"made by": "nobody", "total": "many"}
    checkpoint.weights[SINGLE] = dict(checkpoint.tensors)


def _no_metadata(checkpoint: Checkpoint) -> None:
    checkpoint.metadata = {}
    checkpoint.weights[SINGLE] = dict(checkpoint.tensors)


def _scaled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor * 0.5 for name, tensor in tensors.items()}


def _some(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(list(tensors.items())[:3])


def _swap(weight_map: dict[str, str]) -> None:
    other = {ONE: TWO, TWO: ONE}
    weight_map.update({name: other[file] for name, file in weight_map.items()})


def _extra(name: str, shape: tuple[int, ...] = (4,)) -> Change:
    return with_tensors(lambda tensors: tensors | {name: torch.ones(shape)})


CASES: dict[str, tuple[Change, str | None]] = {
    "two shards": (sharded(), None),
    "shards that index and files name otherwise": (with_index(_swap), None),
    "an index without metadata": (lambda c: (sharded()(c), c.json[INDEX].pop("metadata")), None),
    "an index with further keys": (sharded(made_by="x"), None),
    "a cut index": (sharded(b'{"weight_map": '), INDEX),
    "an empty index": (sharded(b""), INDEX),
    "an index without a map": (sharded({"metadata": {}}), INDEX),
    "an index whose map is a list": (sharded({"metadata": {}, "weight_map": [ONE]}), INDEX),
    "an index whose map has numbers": (sharded({"metadata": {}, "weight_map": {"a": 1}}), INDEX),
    "an index that names nothing": (sharded({"metadata": {}, "weight_map": {}}), INDEX),
    "an index that is a list": (sharded([1]), INDEX),
    "an index of another folder": (with_index(lambda m: m.update(a=f"../{ONE}")), INDEX),
    "an index of a missing file": (with_index(lambda m: m.update(a="model-3.safetensors")), "model-3.safetensors"),
    "an index with a stale name": (with_index(lambda m: m.update(a=ONE)), None),
    "an index that lacks a name": (with_index(lambda m: m.pop(next(iter(m)))), None),
    "an index that lacks a shard": (
        with_index(lambda m: [m.pop(name) for name, file in list(m.items()) if file == TWO]),
        "lacks",
    ),
    "no index": (_no_index, INDEX),
    "a missing shard": (_lack_shard, TWO),
    "a tensor twice": (with_parts(lambda parts: _double(parts, 1.0)), None),
    "a tensor twice, with other values": (with_parts(lambda parts: _double(parts, 2.0)), TWO),
    "a lost tensor": (with_parts(_lose), "lacks"),
    "a cut shard": (with_bytes(TWO, lambda data: data[:-100]), TWO),
    "a shard cut in its header": (with_bytes(ONE, lambda data: data[:40]), ONE),
    "an empty shard": (with_bytes(ONE, lambda data: b""), ONE),
    "a shard of text": (with_bytes(ONE, lambda data: b"<html>not found</html>"), ONE),
    "a shard with more behind it": (with_bytes(TWO, lambda data: data + b"\0" * 8), TWO),
    "a pointer in place of a shard": (
        with_bytes(TWO, lambda data: b"version https://git-lfs.github.com/spec/v1\n"),
        TWO,
    ),
    "a single file beside equal shards": (with_single(lambda tensors: tensors), None),
    "a single file beside other shards": (with_single(_scaled), None),
    "a part in a single file beside shards": (with_single(_some), "lacks"),
    "an empty single file beside shards": (
        lambda c: (sharded()(c), c.weights.update({SINGLE: b""})),
        SINGLE,
    ),
    "another file beside the checkpoint": (lambda c: c.weights.update({"adapter.safetensors": b"x"}), None),
    "strange metadata": (_strange_metadata, None),
    "no metadata": (_no_metadata, None),
    "frequencies of the rope": (_extra("model.layers.0.self_attn.rotary_emb.inv_freq"), None),
    "an unknown tensor": (_extra("model.layers.0.self_attn.spice.weight"), "spice"),
    "one layer more": (_extra("model.layers.7.mlp.up_proj.weight"), "layers.7"),
    "names without a prefix": (
        with_tensors(lambda t: {name.removeprefix("model."): tensor for name, tensor in t.items()}),
        None,
    ),
    "a tensor under two names": (
        with_tensors(lambda t: t | {"norm.weight": t["model.norm.weight"] * 2.0}),
        "two names",
    ),
    "a tensor of integers": (
        with_tensors(lambda t: t | {"model.norm.weight": torch.ones(32, dtype=torch.int32)}),
        "norm.weight",
    ),
    "a tensor of another shape": (with_tensors(lambda t: t | {"model.norm.weight": torch.ones(31)}), "norm.weight"),
    "a tensor with a dimension more": (
        with_tensors(lambda t: t | {"model.norm.weight": torch.ones(1, 32)}),
        "norm.weight",
    ),
    "a file that config.json names": (of_config(transformers_weights="other.safetensors"), "transformers_weights"),
    "no files": (lambda c: c.weights.clear(), SINGLE),
    "files of another format": (
        lambda c: (c.weights.clear(), c.weights.update({"pytorch_model.bin": b"x"})),
        SINGLE,
    ),
}
"""Changes by name, and what a refusal must contain; None: the checkpoint is served."""


def file_variants() -> Iterator[Variant]:
    """Yield the cases of an untied model, and those of indices of a tied one."""
    for base in ("llama", "qwen3"):
        for name, (change, refusal) in CASES.items():
            yield Variant(f"{base}, files: {name}", base, change, refusal=refusal)


def json_cases() -> Iterator[Variant]:
    """Yield cases of a config.json that can't be read."""
    for name, data in {"cut": b'{"model_type": ', "a list": b"[]", "empty": b"", "bytes": b"\xff\xfe"}.items():

        def change(checkpoint: Checkpoint, data: bytes = data) -> None:
            checkpoint.json["config.json"] = data

        yield Variant(f"llama, config.json: {name}", "llama", change, refusal="config.json")
    wrong = {"rope_parameters": ["x"], "layer_types": 5, "rope_scaling": "yarn", "num_hidden_layers": "two"}
    for key, value in json.loads(json.dumps(wrong)).items():
        yield Variant(f"llama, config.json: {key} {value!r}", "llama", of_config(**{key: value}), refusal="config.json")
