"""GGUF metadata of a small SentencePiece vocabulary, as llama.cpp's converter writes them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import gguf
from gguf import GGUFValueType, GGUFWriter
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = (int(kind) for kind in (2, 3, 4, 5, 6))
MODEL, TOKENS, SCORES, TYPES = (f"tokenizer.ggml.{name}" for name in ("model", "tokens", "scores", "token_type"))
SENTENCES = (
    "the quick brown fox jumps over the lazy dog while the other dogs sleep",
    "hello world and hello again: this is what the tokenizer has to learn",
    "numbers like 12 and 123 and 2024, words like tokens, token, tokenizer",
    "die schöne Überraschung kam über Nacht, und der Käse war größer",
    "def main(argument): return argument + 1; class Thing: pass",
)
MORE = ("<|user|>", "<|assistant|>", "<tool> é", "[INST]", "\n\n", "<unused0>", "▁the▁lazy")
"""Tokens behind the learnt ones, of the types in ``MORE_TYPES``."""
MORE_TYPES = (CONTROL, CONTROL, USER_DEFINED, USER_DEFINED, USER_DEFINED, UNUSED, USER_DEFINED)
LAST = ("<bos>", "<eos>", "<pad>", "<mask>", "  ")
"""The last tokens. The first four are those that transformers' Gemma has by itself."""
LAST_TYPES = (CONTROL, CONTROL, CONTROL, CONTROL, USER_DEFINED)
VALUE_TYPES = {
    str: GGUFValueType.STRING,
    bool: GGUFValueType.BOOL,
    float: GGUFValueType.FLOAT32,
    int: GGUFValueType.UINT32,
    list: GGUFValueType.ARRAY,
}


@cache
def _learnt(size: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Learn ``size`` pieces; returns those of several characters, best first, and the characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=1, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    merged = tuple(piece for piece, _ in pieces if len(piece) > 1)
    characters = tuple(piece for piece, _ in pieces if len(piece) == 1)
    return merged, characters


def sentencepiece_metadata(architecture: str = "llama", *, size: int = 300) -> dict[str, Any]:
    """Make the metadata: three specials, 256 bytes, pieces with falling scores, characters, ``MORE`` and ``LAST``."""
    merged, characters = _learnt(size)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *characters, *MORE, *LAST]
    learnt = len(merged) + len(characters)
    scores = [0.0] * 259 + [-float(i) for i in range(learnt)] + [-1000.0] * len([*MORE, *LAST])
    return {
        "general.architecture": architecture,
        MODEL: "llama",
        "tokenizer.ggml.pre": "default",
        TOKENS: tokens,
        SCORES: scores,
        TYPES: [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [1] * learnt + [*MORE_TYPES, *LAST_TYPES],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }


def write_metadata(path: Path, metadata: dict[str, Any]) -> Path:
    """Write a GGUF file without tensors."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    add_metadata(writer, metadata)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def add_metadata(writer: GGUFWriter, metadata: dict[str, Any]) -> None:
    """Add everything but the architecture, which the writer has."""
    for key, value in metadata.items():
        if key != "general.architecture":
            writer.add_key_value(key, value, VALUE_TYPES[type(value)])
