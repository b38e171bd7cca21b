"""``pdserve check --model-path``: what it says of models, without torch, a network or a start."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.numpy import save_file
from support.families import make_reference

from pdserve.model_files.checkpoint import TensorSize
from pdserve.model_files.model_path import resolve_model
from pdserve.model_files.spec_reader import read_spec
from pdserve.model_runner.kv.layout import make_layout
from pdserve.runtime.machine.memory import Memory
from pdserve.terminal.check.finding import Finding, Level
from pdserve.terminal.check.model import fit, look_at_model, page_bytes, weight_bytes
from pdserve.terminal.check.options import CheckOptions, CheckOptionsError
from pdserve.terminal.check.run import choose_probes

GIB = 2**30


def only(findings: Iterable[Finding]) -> Finding:
    [finding] = findings
    return finding


def make_model(folder: Path, **changes: object) -> Path:
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        **changes,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"a": np.zeros((64, 32), np.float16), "b": np.zeros(32, np.float32)}, folder / "model.safetensors")
    return folder


def test_the_default_model() -> None:
    found = list(look_at_model("smollm2", True))
    assert [(f.topic, f.level) for f in found] == [(t, Level.OK) for t in ("model", "fit", "tokenizer", "template")]
    assert "llama with 30 layers, 0.13 billion weights, a context of 8192 tokens" in found[0].text
    # Its file has 98 MB, and the table of embeddings lies beside it once more, in bfloat16: 57 MB.
    assert "about 0.14 GiB of weights and a KV pool" in found[1].text
    # 135 million weights in bfloat16.
    assert "about 0.25 GiB of weights and" in list(look_at_model("smollm2", False))[1].text


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / "config.json").unlink(), "neither a config.json nor a .gguf"),
        (lambda f: make_model(f, model_type="t5", is_encoder_decoder=True), "encoder-decoder models are not supported"),
        (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-1]), "can't be read"),
    ],
)
def test_a_model_that_can_not_be_served(tmp_path: Path, damage: Callable[[Path], object], says: str) -> None:
    folder = make_model(tmp_path / "m")
    damage(folder)
    finding = only(look_at_model(str(folder), True))
    assert finding.level is Level.PROBLEM
    assert says in finding.text
    assert finding.advice


def test_a_model_that_transformers_would_run(tmp_path: Path) -> None:
    found = list(look_at_model(str(make_model(tmp_path / "m", model_type="stablelm")), True))
    assert [(f.topic, f.level) for f in found] == [("model", Level.WARNING), ("tokenizer", Level.PROBLEM)]
    assert "stablelm with 0.00 billion weights, a context of 128 tokens; it would run by its own class" in found[0].text


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    found = list(look_at_model(str(make_model(tmp_path / "m")), True))
    assert [f.level for f in found] == [Level.OK, Level.OK, Level.PROBLEM]
    assert found[2].topic == "tokenizer"


def test_a_model_that_is_not_here_is_not_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    finding = only(look_at_model("some-org/some-model", True))
    assert finding.level is Level.WARNING
    assert "downloads it at its first start" in finding.advice
    assert only(look_at_model("/no/such/folder", True)).level is Level.PROBLEM


def test_the_revision_of_a_hub_model_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    snapshots = {"main": make_model(tmp_path / "main"), "v2": make_model(tmp_path / "v2", model_type="stablelm")}

    def snapshot(name: str, *, revision: str | None, **others: object) -> str:
        if (revision or "main") not in snapshots:
            raise LocalEntryNotFoundError("no such revision")
        return str(snapshots[revision or "main"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    for revision, found in ((None, "main"), ("main", "main"), ("v2", "v2")):
        options = CheckOptions(model_path="some-org/some-model", revision=revision)
        [probe] = [probe for probe in choose_probes(options) if probe.topic == "model"]
        assert next(iter(probe.look())).text.startswith(f"{snapshots[found]}: ")
    missing = only(look_at_model("some-org/some-model", True, "v3"))
    assert missing.level is Level.WARNING
    assert "revision 'v3' of 'some-org/some-model'" in missing.text
    with pytest.raises(CheckOptionsError, match="--model-path"):
        CheckOptions(revision="v2").check()


def test_the_pool_is_counted_as_the_worker_counts_it(tmp_path: Path) -> None:
    spec = read_spec(resolve_model(str(make_model(tmp_path / "m"))))
    assert page_bytes(spec, 32) == make_layout(spec, 32, torch.bfloat16).page_bytes


def test_what_does_not_fit(tmp_path: Path) -> None:
    spec = read_spec(resolve_model(str(make_model(tmp_path / "m"))))
    assert fit(spec, GIB, False, Memory(64 * GIB, 2 * GIB)).level is Level.OK
    # Two copies while they are packed.
    assert fit(spec, GIB, True, Memory(64 * GIB, 2 * GIB)).level is Level.PROBLEM
    assert fit(spec, GIB, True, Memory(64 * GIB, 2 * GIB + 1)).level is Level.OK
    # The pool is beside the weights, in what is free.
    assert fit(spec, 4 * GIB, False, Memory(12 * GIB, 5 * GIB)).level is Level.OK
    finding = fit(spec, 4 * GIB, False, Memory(12 * GIB, 4 * GIB + 1))
    assert finding.level is Level.PROBLEM
    assert "no room for a KV pool" in finding.text


def test_a_pool_behind_windows_holds_more(tmp_path: Path) -> None:
    model = make_reference("gemma3")
    model.save_pretrained(tmp_path)
    spec = read_spec(resolve_model(str(tmp_path)))
    weights, memory = GIB, Memory(4 * GIB, GIB + (20 << 20))
    kept = fit(spec, weights, False, memory).text
    layers = tuple(replace(one, attention=replace(one.attention, window=None)) for one in spec.layers)
    dense = fit(replace(spec, layers=layers), weights, False, memory).text
    kept_tokens, dense_tokens = (int(re.search(r"pool of (\d+) tokens", text).group(1)) for text in (kept, dense))
    assert kept_tokens > 1.5 * dense_tokens


def test_weights_of_a_gguf() -> None:
    tensors = [TensorSize("token_embd.weight", 1000, 600), TensorSize("w", 100, 50), TensorSize("norm", 10)]
    assert weight_bytes(tensors, False) == 2 * 1110
    assert weight_bytes(tensors, True) == 600 + 2000 + 50 + 20
