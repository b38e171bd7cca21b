"""What is refused, and how to ask for it: the lists of docs/models.md. The product itself says the messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter

from pdserve.model_files.errors import ModelError
from pdserve.model_files.families.registry import spec_from_hf
from pdserve.model_files.model_path import ModelSource
from pdserve.model_files.sharding import shard
from pdserve.model_files.spec_reader import read_spec
from pdserve.model_runner.cpu_engine.lowering import refusal

from .families import SHAPE, make_config, make_reference
from .gguf_export import write_gguf
from .model_harness import CONTEXT, Harness

Ask = Callable[[Path], object]
"""Asks, with an empty folder to put files into; gives a message, or raises ``ModelError`` with it."""
MLA = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = MLA | {"num_key_value_heads": 6, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
DEEPSEEK |= {"n_group": 4, "topk_group": 2}
LINEAR_LAYERS = {"layer_types": ["linear_attention", "full_attention", "full_attention"]}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
CHUNKED_LAYERS = {"layer_types": ["chunked_attention"] * 3}


def asked(ask: Ask, folder: Path) -> str:
    """Return the message of a refusal without the file in front of it. ``folder`` is empty; its name is replaced."""
    try:
        message = ask(folder)
    except ModelError as e:
        message = e
    if not isinstance(message, ModelError | str):
        raise AssertionError("this is not refused")
    return re.sub(rf"^{re.escape(str(folder))}/[\w.]+: ", "", str(message)).replace(str(folder), "FOLDER")


def config(model_type: str = "llama", **fields: Any) -> Ask:
    """Ask for a config.json of a known family with ``fields``."""
    return lambda folder: read_spec(ModelSource("hf", write(folder, model_type, fields)))


def started(model_type: str, options: dict[str, Any] | None = None, **fields: Any) -> Ask:
    """Ask for a model runner with random weights, by the implementation that the config leads to."""
    return lambda folder: Harness(write(folder, model_type, fields), load_format="dummy", **(options or {}))


def write(folder: Path, model_type: str, fields: dict[str, Any]) -> Path:
    """Write config.json."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type} | SHAPE | fields))
    return folder


def metadata(key: str, value: object, name: str = "llama") -> Ask:
    """Ask for a GGUF of a Llama, or of another config of the zoo, with one metadata key more."""

    def ask(folder: Path) -> object:
        return read_spec(ModelSource("gguf", write_gguf(make_reference(name), folder / "m.gguf", more={key: value})))

    return ask


def architecture(name: str) -> Ask:
    """Ask for a GGUF with an architecture and nothing more."""

    def ask(folder: Path) -> object:
        writer = GGUFWriter(folder / "m.gguf", name)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return read_spec(ModelSource("gguf", folder / "m.gguf"))

    return ask


def by_transformers(folder: Path) -> object:
    """Ask for a GGUF by transformers' own class."""
    file = folder / "m.gguf"
    file.touch()
    return Harness(file, model_impl="transformers")


def on_kernels(dtype: torch.dtype = torch.float32, name: str = "llama", **changes: Any) -> Ask:
    """Ask for a Llama, or another config of the zoo, on the C++ engine."""
    return lambda _: refusal(spec_from_hf(make_config(name, **changes).to_dict()), dtype, dtype)


def on_ranks(size: int, name: str = "llama", **changes: Any) -> Ask:
    """Ask for a config of the zoo on ``size`` ranks."""
    return lambda _: shard(spec_from_hf(make_config(name, **changes).to_dict()), 0, size)


BY_FAMILY: dict[str, Ask] = {
    "a family that pdserve lacks, by `--model-impl native`": started("stablelm", {"model_impl": "native"}),
    "a model of texts and images, but for Gemma 3": config("llava", text_config=SHAPE),
    "bitsandbytes, AWQ and GPTQ of other than 4 bits, and the like": config(
        quantization_config={"quant_method": "bitsandbytes"}
    ),
    "another activation": config(hidden_act="relu2"),
    "experts in a dense family": config(num_local_experts=8),
    "more experts a token than there are": config("mixtral", num_local_experts=4, num_experts_per_tok=5),
    "groups that experts can't be divided into": config("deepseek_v3", **DEEPSEEK | {"n_group": 3}),
    "another activation of GPT-OSS's experts": config("gpt_oss", **EXPERTS, swiglu_alpha=2.0),
    "latent attention (MLA)": config(kv_lora_rank=512),
    "a DeepSeek-V2 with expert weights that are divided by their sum": config(
        "deepseek_v2", **DEEPSEEK, norm_topk_prob=True
    ),
    "a DeepSeek-V3 without the bias that balances experts": config("deepseek_v3", **DEEPSEEK, topk_method="greedy"),
    "a DeepSeek with experts in every other layer": config("deepseek_v3", **DEEPSEEK, moe_layer_freq=2),
    "attention in chunks (Llama 4)": config(attention_chunk_size=8192),
    "layers with attention in chunks": config("mistral", **CHUNKED_LAYERS),
    "a window in a Llama": config(sliding_window=512),
    "capped scores in a Llama": config(attn_logit_softcapping=50.0),
    "normalised heads in a Llama": config(use_qk_norm=True),
    "clipped q, k and v (OLMo 1)": config(clip_qkv=8.0),
    "layers without positions in a Llama": config(no_rope_layers=[1, 1, 0]),
    "tokens that see later ones (embedding models)": config("gemma3_text", use_bidirectional_attention=True),
    "heads that KV heads can't be shared by": config(num_key_value_heads=4),
    "half of a head rotated, in a Llama": config(partial_rotary_factor=0.5),
    "the same, in the newer spelling": config(rope_parameters={"partial_rotary_factor": 0.5}),
    "a rope for each type of layers, in a Llama": config(rope_parameters={"full_attention": {"rope_type": "default"}}),
    "dynamic rope": config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
    "rope of images (mrope)": config(rope_scaling={"rope_type": "mrope"}),
    "linear rope without a factor": config(rope_scaling={"rope_type": "linear"}),
    "longrope of another head_dim": config(rope_scaling=LONGROPE | {"short_factor": [1.0] * 3}),
    "longrope without long factors": config(rope_scaling={"rope_type": "longrope", "short_factor": [1.0] * 4}),
    "a config that lacks its sizes": config(vocab_size=None),
    "a context longer than the model's": started("llama", {"context_length": CONTEXT + 1}),
}
IN_GGUF: dict[str, Ask] = {
    "another architecture": architecture("mamba"),
    "experts in a dense family": metadata("expert_count", 8, "qwen2"),
    "experts that are chosen by a sigmoid, in a Mixtral": metadata("expert_gating_func", 2, "mixtral"),
    "windows in some layers of a Llama": metadata("attention.sliding_window_pattern", 3),
    "capped scores in a Llama": metadata("attn_logit_softcapping", 5.0),
    "scales in a Llama": metadata("residual_scale", 0.5),
    "tokens that see later ones": metadata("attention.causal", False),
    "keys and values of different sizes": metadata("attention.value_length", 4),
    "another rope": metadata("rope.scaling.type", "su"),
    "by `--model-impl transformers`": by_transformers,
}
BY_TRANSFORMERS: dict[str, Ask] = {
    "encoder and decoder (T5)": started("t5", is_encoder_decoder=True),
    "AWQ, GPTQ, FP8 and the like": started("stablelm", quantization_config={"quant_method": "awq"}),
    "texts and images (Mllama)": started("mllama", text_config={}),
    "latent attention (DeepSeek-V3, which is native by itself)": started(
        "deepseek_v3", {"model_impl": "transformers"}, **MLA
    ),
    "linear attention in some layers (Qwen3-Next)": started("qwen3_next", **LINEAR_LAYERS),
    "attention in chunks": started("stablelm", **CHUNKED_LAYERS),
    "attention sinks (gpt-oss, which is native by itself)": started(
        "gpt_oss", {"model_impl": "transformers"}, **EXPERTS, head_dim=8, sliding_window=16
    ),
    "ALiBi, by a class of its own (BLOOM)": started("bloom"),
    "state spaces (Mamba)": started("mamba"),
    "recurrent layers (RWKV)": started("rwkv"),
    "not causal (BERT)": started("bert", is_decoder=False),
    "positions that begin elsewhere (RoBERTa)": started(
        "roberta", {"context_length": CONTEXT}, is_decoder=True, type_vocab_size=1, max_position_embeddings=CONTEXT + 2
    ),
    "no language model (ViT)": started("vit"),
    "another head than a language model's": started("stablelm", architectures=["StableLmForSequenceClassification"]),
    "code that comes with the model": started("brand_new", auto_map={"AutoModelForCausalLM": "x.Y"}),
    "no longest sequence in the config": started("stablelm", max_position_embeddings=None),
    "`--attention-backend cpu`": started("stablelm", {"attention_backend": "cpu"}),
    "`--quantization int8` and `int4`": started("stablelm", {"quantization": "int8"}),
    "a context longer than the model's": started("stablelm", {"context_length": CONTEXT + 1}),
}
BY_KERNELS: dict[str, Ask] = {
    "float16": on_kernels(torch.float16),
    "heads of other sizes": on_kernels(head_dim=24),
    "an odd intermediate_size": on_kernels(intermediate_size=55),
    "a latent row of other sizes": on_kernels(name="deepseek-v3", kv_lora_rank=24),
    "an odd q_lora_rank": on_kernels(name="deepseek-v3", q_lora_rank=19),
}
BY_RANKS: dict[str, Ask] = {
    "query heads": on_ranks(2, "phi3-long"),
    "KV heads": on_ranks(2, num_key_value_heads=3),
    "inner elements of the MLP": on_ranks(2, intermediate_size=55),
    "inner elements of an expert": on_ranks(2, "qwen3-moe", moe_intermediate_size=35),
    "a norm over all heads (OLMo 2 and 3)": on_ranks(2, "olmo2"),
}
REFUSED: dict[str, dict[str, Ask]] = {
    "By a family, in config.json": BY_FAMILY,
    "By a family, in a GGUF": IN_GGUF,
    "By `--model-impl transformers`, or `auto` for other families": BY_TRANSFORMERS,
    "By the C++ engine": BY_KERNELS,
    "By two ranks": BY_RANKS,
}
"""Requests by heading, and by what is asked."""
