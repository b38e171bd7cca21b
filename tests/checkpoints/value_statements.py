"""Single statements: nulls, values out of bounds, packed weights, tied heads of other types, and chat templates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from support.packed_checkpoints import FORMS, pack
from torch import Tensor

from .checkpoint import SINGLE, TOKENIZER_CONFIG, Change, Checkpoint, both, of_config, put
from .head_statements import TIE, stored
from .rope_statements import THETA, YARN
from .variant import TEXT, Variant

Config = Mapping[str, Any]
LINEAR = {"rope_type": "linear", **THETA}
NULLS: tuple[tuple[str, str], ...] = (
    *(("llama", key) for key in ("rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias")),
    *(("mistral", key) for key in ("rms_norm_eps", "attention_bias", "mlp_bias")),
    *(("phi3", key) for key in ("attention_bias", "partial_rotary_factor")),
    ("qwen3", "use_sliding_window"),
    ("qwen3_moe", "norm_topk_prob"),
    ("qwen3_moe", "mlp_only_layers"),
    ("gemma3_text", "hidden_activation"),
    ("gemma3_text", "final_logit_softcapping"),
    ("glm4", "attention_bias"),
    ("gpt_oss", "swiglu_limit"),
)
"""Keys by base: transformers refuses the null, or reads it the same way."""
BOUNDS: tuple[tuple[str, Config, str], ...] = (
    *(("llama", {"rope_parameters": {"rope_theta": theta}}, "rope_theta") for theta in (0, -500.0)),
    *(("llama", {"rope_parameters": {**LINEAR, "factor": factor}}, "factor") for factor in (0.0, -2.0)),
    ("llama", {"rope_parameters": {"rope_type": "yarn", **YARN, **THETA, "factor": 0.0}}, "factor"),
    ("llama", {"rms_norm_eps": -1.0}, "rms_norm_eps"),
    *(("mistral", {"sliding_window": window}, "sliding_window") for window in (0, -1)),
    ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
)
"""Statements by base, with the key that the refusal must name. Transformers computes with them, mostly NaN."""
WEIGHT = "model.layers.0.self_attn.q_proj.weight"
TEMPLATES = {name: f"{name}: {{{{ messages[0].content }}}}" for name in ("config", "json", "jinja")}
"""A chat template by its place."""


def value_variants() -> Iterator[Variant]:
    """Yield a variant for each statement."""
    for base, key in NULLS:
        # Of Phi-3's longrope, only long texts are equal.
        yield Variant(f"{base}, values: {key} null", base, of_config(**{key: None}), lengths=(90,))
    for base, values, refusal in BOUNDS:
        stated = ", ".join(f"{key} {value}" for key, value in values.items())
        yield Variant(f"{base}, values: {stated}", base, of_config(**values), refusal=refusal)
    for heads in ("table", "both"):
        null = both(of_config(**{TIE: None}), stored(heads))
        yield Variant(f"gemma3, values: {TIE} null, {heads}", "gemma3", null)
    yield Variant("qwen3, heads: rounded", "qwen3", _rounded_head, refusal=TIE)
    yield from _packed()
    yield from _templates()


def _rounded_head(checkpoint: Checkpoint) -> None:
    """Store a tied head beside the table, rounded to a smaller type."""
    table = checkpoint.tensors["model.embed_tokens.weight"]
    checkpoint.weights[SINGLE] = dict(checkpoint.tensors) | {"lm_head.weight": table.bfloat16()}


def _packed() -> Iterator[Variant]:
    for name, dtype in {"E5M2": torch.float8_e5m2, "BF16": torch.bfloat16}.items():
        scaled = both(of_config(quantization_config=FORMS["fp8 matrix"]), _scaled(dtype))
        yield Variant(f"qwen3, packed: FP8 scales beside {name}", "qwen3", scaled, refusal=f"{WEIGHT}_scale")
    for form, forms in {
        "gptq": ({}, {"format": "gptq"}, {"checkpoint_format": "gptq", "format": "gptq_v2"}),
        "gptq v2 by activation": ({"format": "gptq_v2"}, {"checkpoint_format": "gptq_v2", "format": "gptq"}),
        "awq": ({}, {"format": "gemm"}, {"version": "GEMM", "format": "gemv"}),
    }.items():
        for stated in forms:
            changes = _four_bits(form, stated), _four_bits(form, None)
            yield Variant(f"qwen3, packed: {form}, {stated}", "qwen3", changes[0], reference=changes[1])
    for form, stated in (("gptq", {"format": "marlin"}), ("awq", {"version": "gemv"})):
        [value] = stated.values()
        yield Variant(f"qwen3, packed: {form}, {stated}", "qwen3", _four_bits(form, stated), refusal=value)


def _scaled(dtype: torch.dtype) -> Change:
    """Return a change that stores a weight as ``dtype``, with a scale beside it."""

    def change(checkpoint: Checkpoint) -> None:
        more = {WEIGHT: checkpoint.tensors[WEIGHT].to(dtype), f"{WEIGHT}_scale": torch.tensor(2.0)}
        checkpoint.weights[SINGLE] = dict(checkpoint.tensors) | more

    return change


def _four_bits(form: str, stated: Config | None) -> Change:
    """Return a change to q, k, v and o in four bits of this ``form``, or None: to what these stand for.

    ``stated``: keys that tell the format of the files.
    """

    def change(checkpoint: Checkpoint) -> None:
        tensors: dict[str, Tensor] = {}
        for name, tensor in checkpoint.tensors.items():
            if "self_attn" not in name or not name.endswith("proj.weight"):
                tensors[name] = tensor
                continue
            parts, exact = pack(form, name.removesuffix(".weight"), tensor)
            tensors |= {name: torch.from_numpy(exact).contiguous()} if stated is None else parts
        checkpoint.weights[SINGLE] = tensors
        if stated is not None:
            unstated = {"checkpoint_format", "format", "version"}
            method = {key: value for key, value in FORMS[form].items() if key not in unstated}
            checkpoint.config["quantization_config"] = method | dict(stated)

    return change


def _templates() -> Iterator[Variant]:
    places = {
        "config": put(TOKENIZER_CONFIG, "chat_template", TEMPLATES["config"]),
        "json": put("chat_template.json", "chat_template", TEMPLATES["json"]),
        "jinja": _template_file,
    }
    for names in (["config"], ["config", "json"], ["config", "jinja"], ["config", "json", "jinja"]):
        change = both(*(places[name] for name in names))
        yield Variant(f"llama, templates: {' and '.join(names)}", "llama", change, TEXT)


def _template_file(checkpoint: Checkpoint) -> None:
    checkpoint.json["chat_template.jinja"] = TEMPLATES["jinja"].encode()
