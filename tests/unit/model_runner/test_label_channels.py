"""Files of label channels: written by a command, checked when they are read, and refused for some models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.families import make_reference
from support.model_harness import Harness
from support.tiny_model import CONFIG
from transformers import LlamaConfig, LlamaForCausalLM

from pdserve.model_files.errors import UnsupportedModel
from pdserve.model_files.model_path import resolve_model
from pdserve.model_files.spec import ModelSpec
from pdserve.model_files.spec_reader import read_spec
from pdserve.model_runner.kv.sparse.channels import (
    FORMAT,
    LabelChannels,
    choose_channels,
    read_channels,
    write_channels,
)
from pdserve.model_runner.options import RECENT_TOKENS
from pdserve.runtime.options import OptionError, check_options
from pdserve.server.cli import app
from pdserve.server.options import ServerOptions

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_reference("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def spec(llama: Path) -> ModelSpec:
    return read_spec(resolve_model(str(llama)))


def asked(path: Path | None, **options: object) -> ServerOptions:
    given = {"enable_double_sparsity": True, "ds_channel_config_path": None if path is None else str(path)}
    return ServerOptions(**{"attention_backend": "torch", **given, **options})


def shuffled(spec: ModelSpec) -> torch.Tensor:
    heads = [torch.randperm(spec.head_dim) for _ in range(spec.num_layers * spec.num_kv_heads)]
    return torch.stack(heads).view(spec.num_layers, spec.num_kv_heads, -1)


def test_a_file_comes_back_as_it_was_written(tmp_path: Path, spec: ModelSpec) -> None:
    path, ranked = tmp_path / "channels.json", shuffled(spec)
    write_channels(path, spec, ranked, 77)
    assert json.loads(path.read_text())["format"] == FORMAT
    assert json.loads(path.read_text())["tokens"] == 77
    assert torch.equal(read_channels(path, spec), ranked)
    usual, five = (choose_channels(asked(path, ds_heavy_channel_num=count), spec) for count in (None, 5))
    assert usual is not None
    assert usual.dim == spec.head_dim // 4
    assert five is not None
    assert torch.equal(five.indices, ranked[..., :5].sort(-1).values)
    assert five.digest == LabelChannels.of(ranked, 5).digest != usual.digest
    assert choose_channels(ServerOptions(), spec) is None


def test_a_file_that_is_not_the_models_is_refused(tmp_path: Path, spec: ModelSpec) -> None:
    path = tmp_path / "channels.json"
    write_channels(path, spec, shuffled(spec), 77)
    content = json.loads(path.read_text())
    damaged = json.loads(path.read_text())
    damaged["channels"][1][0][3] = damaged["channels"][1][0][4]
    for change, reason in (
        ({"model": content["model"] | {"hidden_size": 96, "heads": 7}}, "hidden_size 96, not 48; heads 7, not 6"),
        ({"model": content["model"] | {"family": "qwen3"}}, "family qwen3, not llama"),
        ({"channels": damaged["channels"]}, "does not list each channel"),
        ({"channels": content["channels"][1:]}, "does not list each channel"),
        ({"format": "another"}, "is no file of label channels"),
        ({"more": 1}, "is no file of label channels"),
    ):
        path.write_text(json.dumps(content | change))
        with pytest.raises(UnsupportedModel, match=reason):
            read_channels(path, spec)
    path.write_text("[")
    with pytest.raises(UnsupportedModel, match="is no file of label channels"):
        read_channels(path, spec)
    with pytest.raises(UnsupportedModel, match="No such file"):
        read_channels(tmp_path / "none.json", spec)


def test_more_channels_than_there_are(tmp_path: Path, spec: ModelSpec) -> None:
    write_channels(tmp_path / "a", spec, shuffled(spec), 1)
    with pytest.raises(UnsupportedModel, match="--ds-heavy-channel-num 17: a key has 16"):
        choose_channels(asked(tmp_path / "a", ds_heavy_channel_num=17), spec)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mistral-window", "layer 0 has a sliding window"),
        ("gemma2-uncapped", "layer 0 has a sliding window"),
        ("gpt-oss", "layer 0 has a sliding window and sinks"),
        ("deepseek-v3", "not supported for latent attention"),
    ],
)
def test_models_whose_attention_is_another_are_refused(tmp_path: Path, family: str, reason: str) -> None:
    make_reference(family).save_pretrained(tmp_path)
    (tmp_path / "channels.json").write_text("{}")
    options = {"enable_double_sparsity": True, "ds_channel_config_path": str(tmp_path / "channels.json")}
    with pytest.raises(UnsupportedModel, match=f"--enable-double-sparsity .*{reason}"):
        Harness(tmp_path, attention_backend="torch", **options)
    out = tmp_path / "out.json"
    assert app(["calibrate", "--model-path", str(tmp_path), "--out", str(out)], result_action="return_value") == 1
    assert not out.exists()


def test_a_model_by_its_own_class_is_refused(llama: Path) -> None:
    options = {"enable_double_sparsity": True, "ds_channel_config_path": "a", "model_impl": "transformers"}
    with pytest.raises(UnsupportedModel, match="--enable-double-sparsity: a model by transformers' own class"):
        Harness(llama, attention_backend="torch", **options)


def test_the_command_finds_the_loudest_channels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two pairs of channels of each KV head are made loud, one in its keys and one in its queries."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, head_dim=16))
    loud = {(layer, head): ((layer + 3 * head) % 8, (layer + 3 * head + 1) % 8) for layer in (0, 1) for head in (0, 1)}
    for (layer, head), (of_key, of_query) in loud.items():
        attention = model.model.layers[layer].self_attn
        with torch.no_grad():
            attention.k_proj.weight.view(2, 2, 8, -1)[head, :, of_key] *= 20
            attention.q_proj.weight.view(2, 2, 2, 8, -1)[head, :, :, of_query] *= 15
    model.save_pretrained(tmp_path)
    text, out = tmp_path / "text", tmp_path / "out.json"
    text.write_text("The quick brown fox jumps over the lazy dog, again and again. " * 3)
    args = ["calibrate", "--model-path", str(tmp_path), "--out", str(out), "--text", str(text), "--dtype", "float32"]
    args += ["--tokenizer-path", "smollm2", "--window"]
    assert app([*args, "20", "--tokens", "100"], result_action="return_value") == 0
    ranked = read_channels(out, read_spec(resolve_model(str(tmp_path))))
    for (layer, head), pair in loud.items():
        assert set(ranked[layer, head, :4].tolist()) == {i + half for i in pair for half in (0, 8)}
    assert json.loads(out.read_text())["tokens"] == 40
    assert app([*args, "90", "--tokens", "100"], result_action="return_value") == 1
    assert "the text has fewer than 90 tokens" in capsys.readouterr().err


def test_a_tokenizer_of_another_model_is_refused(
    tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["calibrate", "--model-path", str(llama), "--out", str(tmp_path / "a"), "--tokenizer-path", "smollm2"]
    assert app([*args, "--window", "20", "--tokens", "20"], result_action="return_value") == 1
    assert "and the model has 97; give the model's own as --tokenizer-path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--window", "1"], "--window is at least 2"),
        (["--text", "/none"], "--text /none: there is no such file"),
        (["--out", "/none/a"], "there is no folder /none"),
    ],
)
def test_what_the_command_refuses(capsys: pytest.CaptureFixture[str], more: list[str], reason: str) -> None:
    assert app(["calibrate", *more], result_action="return_value") == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention_backend": "auto"}, "needs --attention-backend torch"),
        ({"attention_backend": "cpu"}, "needs --attention-backend torch"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8: labels of one byte"),
        ({"tp_size": 2}, "--tp-size 2: labels are not divided"),
        ({"ds_heavy_token_num": RECENT_TOKENS - 1}, "--ds-heavy-token-num is 15"),
        ({"ds_heavy_channel_num": 0}, "--ds-heavy-channel-num is 0"),
        ({"ds_sparse_decode_threshold": -1}, "--ds-sparse-decode-threshold is -1"),
        ({"ds_channel_config_path": None}, "needs --ds-channel-config-path FILE"),
        ({"ds_channel_config_path": "/none"}, "/none: there is no such file"),
        ({"enable_double_sparsity": False}, "is for --enable-double-sparsity"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, options: dict[str, object], reason: str) -> None:
    path = tmp_path / "channels.json"
    path.touch()
    check_options(asked(path))
    with pytest.raises(OptionError, match=reason):
        check_options(asked(path, **({"ds_channel_config_path": str(path)} | options)))
