"""Models by transformers' own classes on our KV pool: equal to transformers, or refused by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.families import SHAPE, make_reference
from support.foreign import EXPERTS, SERVED, make_foreign
from support.model_harness import CONTEXT, PAGE, VOCAB, Harness, close, draw, reference_logits

from pdserve.model_files.errors import InvalidWeights, UnsupportedModel
from pdserve.model_files.model_limits import ModelLimits, read_limits
from pdserve.model_files.model_path import ModelSource, resolve_model

LENGTH = 90
STABLELM = "transformers.models.stablelm.modeling_stablelm"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on busy cores would make these tests many times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(harness: Harness, model: torch.nn.Module) -> None:
    """Chunks, decodes, a shared prefix beside another row, and greedy tokens."""
    tokens = draw(LENGTH, 3)
    expected = reference_logits(model, tokens)
    assert expected.std() > 0.05
    close(harness.forward((0, tokens[:31])), expected[:31])
    close(harness.forward((0, tokens[31:84]), logits_at=[0, 52]), expected[[31, 83]])
    for position in range(84, LENGTH):
        close(harness.forward((0, tokens[position : position + 1])), expected[position : position + 1])
    prefix = 11 * PAGE
    other = tokens[:prefix] + draw(20, 4)
    harness.share(0, 1, prefix)
    logits = harness.forward((1, other[prefix:]), (0, [5]))
    close(logits[:-1], reference_logits(model, other)[prefix:])
    close(logits[-1:], reference_logits(model, [*tokens, 5])[-1:])
    for _ in range(4):
        other.append(int(logits[-2 if len(logits) > 1 else 0].argmax()))
        logits = harness.forward((1, other[-1:]))
        expected = reference_logits(model, other)
        close(logits, expected[-1:])
        assert logits[0].argmax() == expected[-1].argmax()


@pytest.mark.parametrize("name", list(SERVED))
def test_a_model_of_no_family_here_equals_transformers(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_foreign(*SERVED[name])
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO):
        harness = Harness(tmp_path)
    assert "model implementation: transformers" in caplog.text
    assert harness.runner.attention_backend == "torch"
    assert harness.runner.layout.num_layers == model.config.num_hidden_layers
    check(harness, model)


@pytest.mark.parametrize("name", ["llama-llama3", "qwen3-window", "gemma2", "glm4"])
def test_a_family_of_ours_by_transformers(name: str, tmp_path: Path) -> None:
    model = make_reference(name)
    model.save_pretrained(tmp_path)
    harness = Harness(tmp_path, model_impl="transformers")
    assert harness.runner.implementation == "transformers"
    check(harness, model)
    assert Harness(tmp_path).runner.implementation == "native"


def save(folder: Path, name: str = "StableLm", **fields: Any) -> Path:
    make_foreign(name, SHAPE | fields).save_pretrained(folder)
    return folder


def edit(folder: Path, **fields: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


MLA = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
LINEAR = {"layer_types": ["linear_attention", "full_attention", "full_attention"]}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("T5", {"is_encoder_decoder": True}, "'t5': encoder-decoder models are not supported"),
    ("StableLm", {"quantization_config": {"quant_method": "awq"}}, "quantised safetensors are not supported"),
    ("StableLm", {"layer_types": ["chunked_attention"] * 3}, "layers of the types chunked_attention"),
    ("Qwen3Next", LINEAR, "layers of the types linear_attention"),
    ("DeepseekV3", MLA, r"latent attention \(MLA\)"),
    ("Mllama", {"text_config": {}}, "models of more than text"),
    ("StableLm", {"max_position_embeddings": None}, "config.json says none of max_position_embeddings"),
    ("StableLm", {"model_type": "brand_new", "auto_map": {"AutoModelForCausalLM": "x.Y"}}, "trust_remote_code"),
    ("StableLm", {"model_type": "vit"}, "'vit' .* it is no causal language model"),
    ("StableLm", {"architectures": ["StableLmForSequenceClassification"]}, "its class is StableLmForSequence"),
    ("Bloom", {}, "'bloom' .* does not use transformers' attention interface"),
    ("Mamba", {}, "'mamba' .* layers of the types linear_attention"),
    ("Rwkv", {}, "'rwkv' .* state-space"),
    ("GptOss", EXPERTS | {"head_dim": 8, "sliding_window": 16}, "the attention argument 's_aux' is not supported"),
    ("Bert", {"is_decoder": False}, "not causal"),
]


@pytest.mark.parametrize(("name", "fields", "says"), REFUSED)
def test_refusals_name_the_reason(name: str, fields: dict[str, Any], says: str, tmp_path: Path) -> None:
    kind = {"GptOss": "gpt_oss", "Qwen3Next": "qwen3_next", "DeepseekV3": "deepseek_v3"}.get(name, name.lower())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | SHAPE | fields))
    with pytest.raises(UnsupportedModel, match=says):
        Harness(tmp_path, load_format="dummy")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model_impl": "native"}, "'stablelm' is not supported; .*--model-impl transformers runs others"),
        ({"attention_backend": "cpu"}, "--attention-backend cpu"),
        ({"quantization": "int8"}, "--quantization int8"),
        ({"context_length": CONTEXT + 1}, "--context-length 257 is not within"),
    ],
)
def test_options_that_it_can_not_have(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        Harness(save(tmp_path), **options)


def test_gguf_files_are_native() -> None:
    with pytest.raises(UnsupportedModel, match="does not read GGUF files"):
        read_limits(resolve_model("smollm2"), None, "transformers")


def test_limits_without_torch(tmp_path: Path) -> None:
    source = ModelSource("hf", save(tmp_path))
    assert read_limits(source, None) == read_limits(source, None, "transformers") == ModelLimits(CONTEXT, VOCAB)
    assert read_limits(source, 100).context_length == 100


def test_checkpoints_that_do_not_match(tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(InvalidWeights, match=r"unexpected keys, 'model\.layers\.2"):
        Harness(edit(tmp_path, num_hidden_layers=2))
    with pytest.raises(InvalidWeights, match=r"missing keys, 'model\.layers\.3"):
        Harness(edit(tmp_path, num_hidden_layers=4))
    edit(tmp_path, num_hidden_layers=3)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InvalidWeights, match="can't load"):
        Harness(tmp_path)


def test_fingerprints_tell_models_apart(tmp_path: Path) -> None:
    folder = save(tmp_path)
    loaded = Harness(folder).runner.fingerprint
    assert Harness(folder).runner.fingerprint == loaded
    dummies = [Harness(folder, load_format="dummy", random_seed=seed).runner.fingerprint for seed in (1, 1, 2)]
    assert dummies[0] == dummies[1]
    others = [Harness(edit(folder, layer_norm_eps=0.1)).runner.fingerprint]
    assert len({loaded, *dummies, *others}) == 4


def test_dummy_weights_leave_the_random_state_alone(tmp_path: Path) -> None:
    save(tmp_path)
    before = torch.get_rng_state()
    Harness(tmp_path, load_format="dummy")
    assert torch.equal(before, torch.get_rng_state())


def test_bfloat16(tmp_path: Path) -> None:
    model = make_foreign(*SERVED["cohere2"])
    model.save_pretrained(tmp_path)
    harness, tokens = Harness(tmp_path, dtype="bfloat16"), draw(LENGTH, 3)
    expected = reference_logits(model, tokens)
    got = torch.cat((harness.forward((0, tokens[:40])), harness.forward((0, tokens[40:]))))
    assert (got - expected).std() < 0.1 * expected.std()


def attention_with(change: str) -> Any:
    """StableLM's eager attention, changed in a way that the interface does not tell."""

    def eager(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if change == "sharper":
            scaling *= 1.05
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        return out.transpose(1, 2), None

    return eager


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("change", ["none", "sharper"])
def test_attention_that_the_interface_does_not_tell(
    change: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path)
    monkeypatch.setattr(f"{STABLELM}.eager_attention_forward", attention_with(change))
    if change == "none":
        Harness(tmp_path, dtype=dtype)
        return
    with pytest.raises(UnsupportedModel, match="attention of layer 0 is not what its arguments say"):
        Harness(tmp_path, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_that_act_on_their_neighbours(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(module: Any, x: torch.Tensor) -> torch.Tensor:
        before = F.pad(x[:, :-1], (0, 0, 1, 0))
        return module.down_proj(module.act_fn(module.gate_proj(x + 0.3 * before)) * module.up_proj(x))

    save(tmp_path)
    monkeypatch.setattr(f"{STABLELM}.StableLmMLP.forward", shifted)
    with pytest.raises(UnsupportedModel, match="tokens act on others by more than attention"):
        Harness(tmp_path, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_positions_that_begin_elsewhere(dtype: str, tmp_path: Path) -> None:
    config = {"model_type": "roberta", "is_decoder": True, "type_vocab_size": 1} | SHAPE
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT + 2}))
    with pytest.raises(UnsupportedModel, match="its positions are not those of the tokens"):
        Harness(tmp_path, load_format="dummy", dtype=dtype, context_length=CONTEXT)


def test_frequencies_that_depend_on_other_requests(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "short_factor": [1.0],
        "long_factor": [9.0],
        "original_max_position_embeddings": 64,
        "factor": 4.0,
        "partial_rotary_factor": 0.25,
    }
    save(tmp_path, rope_parameters=rope)
    with pytest.raises(UnsupportedModel, match=r"depends on how far others are.* a shorter --context-length"):
        Harness(tmp_path)
    Harness(tmp_path, context_length=64)
