"""Small good model files, which the campaign damages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 32, 64, 4, 2, 300
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": [1, 2],
}
OTHER_CONFIGS = (
    {
        **{key: value for key, value in CONFIG.items() if key not in ("rope_scaling", "rope_theta")},
        "model_type": "phi3",
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.5, 2.0, 2.5],
            "long_factor": [1.0, 2.0, 4.0, 8.0],
        },
    },
    {
        **{key: value for key, value in CONFIG.items() if key != "rope_scaling"},
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "layer_types": ["full_attention"],
        "sliding_window": None,
    },
    {
        **{key: value for key, value in CONFIG.items() if key != "rope_scaling"},
        "model_type": "deepseek_v3",
        "num_key_value_heads": HEADS,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 2.5,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "mscale": 1.0},
    },
    {
        "model_type": "gemma3",
        "text_config": {
            **{key: value for key, value in CONFIG.items() if key not in ("rope_scaling", "rope_theta")},
            "model_type": "gemma3_text",
            "head_dim": 8,
            "sliding_window": 16,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention"],
        },
    },
    {"model_type": "other_model", "max_position_embeddings": 64, "vocab_size": 100, "layer_types": ["full_attention"]},
    {
        **CONFIG,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"},
    },
)
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
GENERATION = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "do_sample": True,
    "eos_token_id": [1, 2],
    "bos_token_id": 0,
}
TEMPLATE = """{%- if tools %}{{ tools | tojson(indent=2) }}{% endif -%}
{%- set ns = namespace(first=true) -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' and loop.first -%}{{ bos_token }}<|system|>{{ message['content'] | trim }}
{%- elif message.role in ['user', 'assistant'] -%}
<|{{ message.role }}|>{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{{ part.text }}{% endfor %}{% endif %}{{ eos_token }}
{%- else -%}{{ raise_exception('unknown role ' ~ message.role) }}{%- endif -%}
{%- set ns.first = false -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True, "normalized": False},
    "pad_token": None,
    "unk_token": "<unk>",
    "additional_special_tokens": ["<x>"],
    "added_tokens_decoder": {
        "0": {"content": "<s>", "special": True, "normalized": False, "lstrip": False, "rstrip": False},
        "1": {"content": "</s>", "special": True, "normalized": False, "lstrip": False, "rstrip": False},
        "270": {"content": "<more>", "special": False, "normalized": True},
    },
    "clean_up_tokenization_spaces": True,
    "model_max_length": 1000000000000000019884624838656,
    "chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}, {"name": "rag", "template": "x"}],
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the tensors of ``CONFIG``'s model by their names in a checkpoint."""
    head = HIDDEN // HEADS
    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        f"{layer}input_layernorm.weight": (HIDDEN,),
        f"{layer}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        f"{layer}self_attn.k_proj.weight": (KV_HEADS * head, HIDDEN),
        f"{layer}self_attn.v_proj.weight": (KV_HEADS * head, HIDDEN),
        f"{layer}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{layer}post_attention_layernorm.weight": (HIDDEN,),
        f"{layer}mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{layer}mlp.up_proj.weight": (INNER, HIDDEN),
        f"{layer}mlp.down_proj.weight": (HIDDEN, INNER),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }


def tensors() -> dict[str, npt.NDArray[np.float32]]:
    """Return random values for ``shapes``."""
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes().items()}


def write_folder(folder: Path) -> None:
    """Write a whole model: config, one safetensors file, tokenizer and template."""
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", GENERATION)
    write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    save_file(tensors(), folder / "model.safetensors")
    (folder / "tokenizer.json").write_text(byte_level_tokenizer().to_str())


def write_shards(folder: Path) -> None:
    """Write the same model with an index and two shards."""
    write_json(folder / "config.json", CONFIG)
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    everything = list(tensors().items())
    for i, file in enumerate(files):
        save_file(dict(everything[i::2]), folder / file)
    places = {name: files[i % 2] for i, (name, _) in enumerate(everything)}
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": 1}, "weight_map": places})


def write_json(file: Path, value: object) -> None:
    """Write ``value`` as JSON."""
    file.write_text(json.dumps(value, indent=1))


def byte_level_tokenizer() -> Tokenizer:
    """Return a tokenizer of all bytes, with a merge, added tokens, and most sections of a tokenizer.json."""
    specials = ["<s>", "</s>", "<unk>", "<x>"]
    words = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll")]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("~", "-")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 0)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer.add_tokens([AddedToken("<tool>", lstrip=True, rstrip=True, single_word=True)])
    return tokenizer


def other_tokenizers() -> Iterator[Tokenizer]:
    """Yield small tokenizers of other models."""
    words = {
        word: i for i, word in enumerate(["<unk>", "▁a", "b", "##c", "</w>", *(f"<0x{i:02X}>" for i in range(256))])
    }
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    unigram = Tokenizer(models.Unigram([(word, -float(i)) for word, i in words.items()], 0, True))
    unigram.decoder = decoders.Sequence(steps)
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    yield unigram
    pieces = Tokenizer(models.WordPiece(words, unk_token="<unk>"))
    pieces.decoder = decoders.WordPiece()
    pieces.normalizer = normalizers.BertNormalizer()
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    yield pieces
    level = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    level.decoder = decoders.CTC()
    level.pre_tokenizer = pre_tokenizers.Whitespace()
    yield level


def write_gguf(file: Path) -> None:
    """Write a GGUF with the model of ``CONFIG`` and a byte-level tokenizer."""
    from pdserve.model_files.text.byte_table import byte_level_alphabet

    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    words = [*byte_level_alphabet().values(), "he", "<s>", "</s>", "<tool>"]
    words += [f"<pad{i}>" for i in range(VOCAB - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([1] * 257 + [3, 3, 4] + [5] * (VOCAB - 260))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages[0].content }}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for i, (name, values) in enumerate(tensors().items()):
        theirs = f"{names.get_name(name.removesuffix('.weight'))}.weight"
        if values.ndim == 2 and i % 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(theirs, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(theirs, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
