"""Models by transformers' own classes on our KV pool, beyond what docs/models.md lists: what else must not pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.families import SHAPE, make_reference
from support.foreign import SERVED, make_foreign
from support.model_harness import CONTEXT, VOCAB, Harness, close, draw, reference_logits
from support.model_rows import GREEDY, compute_prompts, go_on, make_texts
from support.model_tables import LARGEST

from pdserve.model_files.errors import InvalidWeights, UnsupportedModel
from pdserve.model_files.model_limits import ModelLimits, read_limits
from pdserve.model_files.model_path import ModelSource, resolve_model

LENGTH = 90
STABLELM = "transformers.models.stablelm.modeling_stablelm"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", ["llama-llama3", "qwen3-window", "gemma2", "glm4"])
def test_a_family_of_ours_by_transformers(name: str, tmp_path: Path) -> None:
    model = make_reference(name)
    model.save_pretrained(tmp_path)
    harness, texts = Harness(tmp_path, model_impl="transformers"), make_texts(model)
    assert harness.runner.implementation == "transformers"
    computed = compute_prompts(harness, texts)
    go_on(harness, computed.first, computed.second)
    for tally in (computed.first, computed.second):
        assert tally.error < LARGEST
        assert tally.greedy == GREEDY
    some = harness.forward((2, texts[0].tokens[:20]), logits_at=[19, 3])
    close(some, texts[0].logits[[19, 3]])
    assert Harness(tmp_path).runner.implementation == "native"


def save(folder: Path, name: str = "StableLm", **fields: Any) -> Path:
    make_foreign(name, SHAPE | fields).save_pretrained(folder)
    return folder


def edit(folder: Path, **fields: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


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
    """Return StableLM's eager attention, changed in a way that the interface does not show."""

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


def test_positions_that_begin_elsewhere(tmp_path: Path) -> None:
    """In 16 bits, too; docs/models.md has float32."""
    config = {"model_type": "roberta", "is_decoder": True, "type_vocab_size": 1} | SHAPE
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT + 2}))
    with pytest.raises(UnsupportedModel, match="its positions are not those of the tokens"):
        Harness(tmp_path, load_format="dummy", dtype="bfloat16", context_length=CONTEXT)


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_parameters": "x"}, r"config\.json is no usable model config: .*'rope_parameters' with value 'x'"),
        ({"head_dim": "16"}, r"config\.json is no usable model config: .*'head_dim' expected int, got str .*'16'"),
        ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}}, r"config\.json: rope_type 'foo' is unknown"),
    ],
)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_broken_config_is_named_with_its_key(fields, message: str, load_format: str, tmp_path: Path) -> None:
    folder = edit(save(tmp_path, "Gemma"), **fields)
    with pytest.raises(UnsupportedModel, match=f"{message}.*; correct it, or download it again"):
        Harness(folder, attention_backend="torch", load_format=load_format)


def test_an_error_of_a_class_that_names_no_key_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError

    monkeypatch.setattr("transformers.GemmaForCausalLM._from_config", fail)
    with pytest.raises(InvalidWeights, match=r"transformers can't load .*: KeyError"):
        Harness(save(tmp_path, "Gemma"), attention_backend="torch", load_format="dummy")
