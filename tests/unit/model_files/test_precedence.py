"""Values that several files or keys state: which one counts, and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from checkpoints.gguf_parts import make_parts
from gguf import GGUFWriter
from support.families import make_config, make_reference
from support.gguf_export import write_gguf
from support.model_harness import Harness

from pdserve.model_files.errors import InvalidWeights, ModelError, UnsupportedModel
from pdserve.model_files.families.registry import spec_from_hf
from pdserve.model_files.model_path import ModelSource
from pdserve.model_files.sampling_defaults import read_sampling_defaults
from pdserve.model_files.spec import RopeType
from pdserve.model_files.spec_reader import read_spec
from pdserve.model_files.text.errors import TokenizerLoadError
from pdserve.model_files.text.hf_tokenizer import tokenizer_from_folder
from pdserve.model_files.text.text_tokenizer import FastTokenizer
from tests.unit.model_files.test_model_config import read
from tests.unit.model_files.test_tokenizer_hf import make_folder

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}


def test_rope_scaling_replaces_rope_parameters(tmp_path: Path) -> None:
    [rope] = read(tmp_path, rope_scaling=YARN | {"rope_theta": 500.0}, rope_parameters=PLAIN).ropes
    assert (rope.type, rope.factor, rope.theta) == (RopeType.YARN, 4.0, 500.0)
    for empty in (None, {}):
        assert read(tmp_path, rope_scaling=empty, rope_parameters=PLAIN).ropes[0].type is RopeType.DEFAULT


def test_a_theta_that_rope_scaling_would_lose_is_refused(tmp_path: Path) -> None:
    usual = read(tmp_path, rope_scaling=YARN, rope_parameters={"rope_theta": 10000.0})
    assert usual.ropes[0].theta == 10000.0
    beside = read(tmp_path, rope_scaling=YARN, rope_parameters=PLAIN, rope_theta=500.0)
    assert beside.ropes[0].theta == 500.0
    with pytest.raises(UnsupportedModel, match=r"config\.json: rope_scaling .* rope_theta 500\.0; add rope_theta"):
        read(tmp_path, rope_scaling=YARN, rope_parameters=PLAIN)


def test_a_share_that_rope_scaling_would_lose_is_refused(tmp_path: Path) -> None:
    glm = {"model_type": "glm4", "num_hidden_layers": 1, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert read(tmp_path, **glm).ropes[0].rotary_dim == 64
    with pytest.raises(UnsupportedModel, match=r"partial_rotary_factor 0\.25"):
        read(tmp_path, **glm, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.25})


def test_rope_scaling_changes_layers_that_see_everything_key_by_key() -> None:
    raw = make_config("gemma3").to_dict()
    full, local = spec_from_hf(raw | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}).ropes
    assert (full.type, full.factor, full.theta) == (RopeType.LINEAR, 8.0, 500.0)
    assert local == spec_from_hf(raw).ropes[1]


def test_an_original_context_beside_the_ropes_of_layer_types_does_not_count() -> None:
    raw = make_config("olmo3").to_dict()
    assert spec_from_hf(raw | {"original_max_position_embeddings": 32}).ropes == spec_from_hf(raw).ropes
    one = make_config("llama-yarn").to_dict()
    assert spec_from_hf(one | {"original_max_position_embeddings": 32}).ropes[0].original_context == 32


def test_layers_with_a_window_that_is_off_are_refused(tmp_path: Path) -> None:
    layers = {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 21}
    assert read(tmp_path, **layers, use_sliding_window=True).layers[1].attention.window == 21
    with pytest.raises(UnsupportedModel, match="layer_types has sliding_attention, but sliding_window 21 is not used"):
        read(tmp_path, **layers, use_sliding_window=False)


def test_a_window_of_all_layers_is_that_whatever_layer_types_says(tmp_path: Path) -> None:
    phi3 = {"model_type": "phi3", "sliding_window": 21}
    for layers in ({}, {"layer_types": ["full_attention"] * 2}):
        assert [layer.attention.window for layer in read(tmp_path, **phi3, **layers).layers] == [21, 21]
    with pytest.raises(UnsupportedModel, match=r"layer_types .* is not supported for a 'phi3' model"):
        read(tmp_path, **phi3, layer_types=["full_attention", "sliding_attention"])


def test_half_a_llama3_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json .*low_freq_factor"):
        read(tmp_path, rope_scaling={"rope_type": "llama3", "factor": 8.0})


@pytest.mark.parametrize("stated", [{}, {"rope_parameters": None}])
def test_a_gpt_oss_without_a_rope_is_stretched(stated: dict[str, Any]) -> None:
    raw = {name: value for name, value in make_config("gpt-oss").to_dict().items() if name != "rope_parameters"}
    assert spec_from_hf(raw | stated).ropes[0].type is RopeType.YARN
    assert spec_from_hf(raw | {"rope_parameters": PLAIN}).ropes[0].type is RopeType.DEFAULT


def test_the_head_of_texts_and_images_is_stated_outside(tmp_path: Path) -> None:
    text = make_config("gemma3").to_dict()
    for outer, inner in ((None, False), (True, False), (False, True)):
        raw = {"model_type": "gemma3", "text_config": text | {"tie_word_embeddings": inner}}
        raw |= {} if outer is None else {"tie_word_embeddings": outer}
        assert spec_from_hf(raw).tied_head is (outer is not False)


def test_the_packing_of_the_whole_model_comes_before_that_of_its_text() -> None:
    text = make_config("gemma3").to_dict() | {"quantization_config": None}
    awq, unknown = {"quant_method": "awq", "bits": 4}, {"quant_method": "spice"}
    spec_from_hf({"model_type": "gemma3", "quantization_config": awq, "text_config": text})
    for whole, part in ((unknown, None), (unknown, awq), (None, unknown)):
        raw = {
            "model_type": "gemma3",
            "quantization_config": whole,
            "text_config": text | {"quantization_config": part},
        }
        with pytest.raises(UnsupportedModel, match="'spice'"):
            spec_from_hf(raw)


def test_weights_in_a_file_that_config_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"transformers_weights 'other\.safetensors'"):
        read(tmp_path, transformers_weights="other.safetensors")


@pytest.mark.parametrize("value", [["x"], "yarn", 5])
def test_a_rope_of_another_type_is_refused(tmp_path: Path, value: object) -> None:
    for key in ("rope_parameters", "rope_scaling"):
        with pytest.raises(UnsupportedModel, match=rf"config\.json: {key} .* must be an object"):
            read(tmp_path, **{key: value})


def test_longrope_says_when_short_texts_get_the_factors_of_long_ones(tmp_path: Path, caplog: Any) -> None:
    make_reference("phi3-long").save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        Harness(tmp_path, attention_backend="torch", context_length=64)
        assert "longrope" not in caplog.text
        Harness(tmp_path, attention_backend="torch")
    assert "--context-length 64 computes short texts" in caplog.text


def test_older_files_have_sampling_defaults_in_config(tmp_path: Path) -> None:
    source = ModelSource("hf", tmp_path)
    config = {"temperature": 0.3, "top_k": None, "text_config": {"top_k": 7, "temperature": 0.9}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_sampling_defaults(source).given == {"temperature": 0.3, "top_k": 7}
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_sampling_defaults(source).given == {}
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"temperature": "hot"}))
    with pytest.raises(ModelError, match=r"/config\.json: temperature is hot"):
        read_sampling_defaults(source)


@pytest.mark.parametrize("top_k", [0, -1])
def test_a_top_k_that_means_all_tokens_is_none(tmp_path: Path, top_k: int) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": top_k, "temperature": 0.7}))
    assert read_sampling_defaults(ModelSource("hf", tmp_path)).given == {"temperature": 0.7}


def test_a_part_of_a_gguf_is_called_a_part(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint16("split.count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(InvalidWeights, match=r"m\.gguf is one of 2 parts .*llama-gguf-split --merge"):
        read_spec(ModelSource("gguf", tmp_path / "m.gguf"))


@pytest.mark.parametrize("more", [14, 3000])
def test_a_gguf_with_more_tokens_than_embeddings_is_refused(tmp_path: Path, more: int) -> None:
    parts = make_parts("llama").copy()
    parts.metadata["tokenizer.ggml.tokens"] = [*parts.metadata["tokenizer.ggml.tokens"], *map(str, range(more))]
    parts.write(tmp_path / "m.gguf")
    with pytest.raises(InvalidWeights, match=rf"m\.gguf lists {267 + more} tokens, but has 280 embeddings"):
        read_spec(ModelSource("gguf", tmp_path / "m.gguf"))


def write_scaled(path: Path, scaling: Mapping[str, object]) -> ModelSource:
    return ModelSource("gguf", write_gguf(make_reference("llama"), path, more=scaling))


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope.scaling.factor": 4.0}, (RopeType.LINEAR, 4.0)),
        ({"rope.scale_linear": 4.0}, (RopeType.LINEAR, 4.0)),
        ({"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, (RopeType.LINEAR, 4.0)),
        ({"rope.scaling.factor": 0.0}, (RopeType.DEFAULT, 1.0)),
    ],
)
def test_a_factor_without_a_type_is_linear_in_a_gguf(tmp_path: Path, scaling: dict[str, object], expected: Any) -> None:
    [rope] = read_spec(write_scaled(tmp_path / "m.gguf", scaling)).ropes
    assert (rope.type, rope.factor) == expected
    off = {"rope.scaling.type": "none", **scaling}
    assert read_spec(write_scaled(tmp_path / "off.gguf", off)).ropes[0].type is RopeType.DEFAULT


def load(folder: Path) -> FastTokenizer:
    tokenizer = tokenizer_from_folder(folder)
    assert isinstance(tokenizer, FastTokenizer)
    return tokenizer


def entry(content: str, **flags: bool) -> dict[str, object]:
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    return {"content": content, **plain, **flags}


def test_the_older_map_counts_only_without_added_tokens_decoder(tmp_path: Path) -> None:
    config = {"eos_token": "</s>"}
    make_folder(tmp_path, tokenizer_config=config, special_tokens_map={"eos_token": "<s>"})
    assert (load(tmp_path).special_tokens["eos_token"], load(tmp_path).eos_ids) == ("<s>", (256,))
    make_folder(tmp_path, tokenizer_config=config | {"added_tokens_decoder": {"257": entry("</s>")}})
    assert (load(tmp_path).special_tokens["eos_token"], load(tmp_path).eos_ids) == ("</s>", (257,))


def test_a_named_token_of_the_vocabulary_is_special(tmp_path: Path) -> None:
    make_folder(tmp_path, tokenizer_config={"eos_token": "a", "extra_special_tokens": ["b"], "image_token": "c"})
    tokenizer = load(tmp_path)
    ids = [tokenizer.backend.token_to_id(text) for text in "abc"]
    assert tokenizer.decode([*ids, tokenizer.backend.token_to_id("d")], skip_special_tokens=True) == "d"
    assert tokenizer.byte_table is not None
    assert tokenizer.byte_table.special_ids >= set(ids)
    assert tokenizer.special_tokens == {"eos_token": "a", "image_token": "c"}


def test_a_named_token_is_special_whatever_its_entry_says(tmp_path: Path) -> None:
    added = {"added_tokens_decoder": {"259": entry("<end>", special=False), "260": entry("<tool>", special=False)}}
    tokenizer = load(make_folder(tmp_path, tokenizer_config={"eos_token": "<end>", **added}))
    assert tokenizer.decode([259, 260], skip_special_tokens=True) == "<tool>"


def test_a_named_token_that_is_nowhere_is_added_at_the_end(tmp_path: Path) -> None:
    make_folder(tmp_path, tokenizer_config={"pad_token": "[PAD]"})
    assert load(tmp_path).encode_batch(["[PAD]"], add_special_tokens=False) == [[259]]


@pytest.mark.parametrize(
    ("beside", "older", "tokens"),
    [
        ({}, {}, {"<x>": 259, "<y>": 260}),
        ({"extra_special_tokens": ["<l>"]}, {}, {"<x>": 259, "<y>": 260, "<l>": 261}),
        ({"z_token": "<z>"}, {}, {"<x>": None, "<z>": 259}),
        ({"extra_special_tokens": {"q": "<q>"}}, {}, {"<x>": None, "<q>": 259}),
        ({}, {"extra_special_tokens": {"q": "<q>"}}, {"<x>": 259, "<y>": 260, "<q>": 261}),
    ],
)
def test_tokens_of_one_model_count_beside_no_others_of_the_config(
    tmp_path: Path, beside: dict[str, Any], older: dict[str, Any], tokens: dict[str, int | None]
) -> None:
    config = {"model_specific_special_tokens": {"x_token": "<x>", "y": "<y>"}, **beside}
    tokenizer = load(make_folder(tmp_path, tokenizer_config=config, special_tokens_map=older))
    assert {text: tokenizer.backend.token_to_id(text) for text in tokens} == tokens


def test_properties_in_the_config_replace_those_of_the_tokenizer(tmp_path: Path) -> None:
    make_folder(tmp_path, tokenizer_config={"added_tokens_decoder": {"257": entry("</s>", lstrip=True)}})
    assert load(tmp_path).encode_batch(["  </s>"], add_special_tokens=False) == [[257]]
    make_folder(tmp_path, tokenizer_config={"added_tokens_decoder": {"257": entry("</s>", special=False)}})
    tokenizer = load(tmp_path)
    assert tokenizer.decode([257], skip_special_tokens=True) == ""
    assert tokenizer.is_left_out(257, skip_special_tokens=True)
    assert tokenizer.byte_table is not None
    assert 257 in tokenizer.byte_table.special_ids


def test_new_tokens_get_the_ids_of_the_file_or_are_left_out(tmp_path: Path) -> None:
    added = {"259": entry("<one>"), "260": entry("<two>"), "262": entry("<far>")}
    tokenizer = load(make_folder(tmp_path, tokenizer_config={"added_tokens_decoder": added, "pad_token": "<far>"}))
    assert [tokenizer.backend.token_to_id(text) for text in ("<one>", "<two>", "<far>")] == [259, 260, None]


def test_special_tokens_are_split_if_the_config_says_so(tmp_path: Path) -> None:
    make_folder(tmp_path, tokenizer_config={"split_special_tokens": True})
    assert len(load(tmp_path).encode_batch(["</s>"], add_special_tokens=False)[0]) == 4


def test_a_negative_id_ends_nothing(tmp_path: Path) -> None:
    make_folder(tmp_path, config={"eos_token_id": [-1, 257]}, generation_config={"eos_token_id": -1})
    assert load(tmp_path).eos_ids == (257,)


def test_the_text_config_may_end_texts_too(tmp_path: Path) -> None:
    make_folder(tmp_path, config={"eos_token_id": 257, "text_config": {"eos_token_id": 258}})
    assert load(tmp_path).eos_ids == (257, 258)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config": {"eos_token_id": "2"}}, r"config\.json: eos_token_id '2' is no token id"),
        ({"generation_config": {"eos_token_id": [1, None]}}, r"generation_config\.json: eos_token_id"),
        ({"tokenizer_config": {"bos_token": 5}}, r"tokenizer_config\.json: bos_token 5 is no token"),
        ({"tokenizer_config": {"extra_special_tokens": "<x>"}}, "extra_special_tokens '<x>' is no list"),
        (
            {"tokenizer_config": {"model_specific_special_tokens": ["<x>"]}},
            r"model_specific.* is no table of tokens by",
        ),
        ({"tokenizer_config": {"added_tokens_decoder": ["<x>"]}}, "added_tokens_decoder is no table of tokens"),
        ({"added_tokens": {"<x>": "3"}}, r"added_tokens\.json is no table"),
    ],
)
def test_a_statement_of_another_type_is_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    make_folder(tmp_path, **files)
    with pytest.raises(TokenizerLoadError, match=message):
        load(tmp_path)


def test_older_added_tokens_are_added(tmp_path: Path) -> None:
    make_folder(tmp_path, added_tokens={"<extra>": 259, "<far>": 280})
    assert load(tmp_path).encode_batch(["<extra>"], add_special_tokens=False) == [[259]]
    assert load(tmp_path).backend.token_to_id("<far>") is None
