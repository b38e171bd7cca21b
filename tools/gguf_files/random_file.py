"""Writes a random Llama as a GGUF file: ``python -P -m tools.gguf_files.random_file model.gguf --mix Q4_K_M``.

With ``--experts 64`` it is a Qwen3-MoE; each of its experts has ``--inner`` columns.

K-quants need sizes that are multiples of 256, which the default model's are not. This makes a model of any size in
seconds, without a checkpoint or another program to quantise it. Its blocks are valid, its words are nonsense, its speed
is that of a real model. It carries the default model's tokenizer, so that any server of GGUF files can run it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFWriter

from pdserve.model_files.model_path import resolve_model
from pdserve.model_runner.loader.random_blocks import HALVES, random_blocks

from .fields import copy_field

MIXES = ("Q4_K_M", *(kind.name for kind in HALVES))
CONTEXT = 8192


class Size(NamedTuple):
    """Size of a Llama with tied embeddings, or of a Qwen3-MoE. The vocabulary is the default model's."""

    hidden: int = 1024
    inner: int = 2816
    layers: int = 16
    heads: int = 16
    kv_heads: int = 4
    experts: int = 0
    chosen: int = 8
    vocab: int = 49152

    @property
    def head_dim(self) -> int:
        """Number of elements of each head."""
        return self.hidden // self.heads

    @property
    def kv_size(self) -> int:
        """Number of elements of a token's keys in one layer, all KV heads together."""
        return self.kv_heads * self.head_dim


def main() -> None:
    """Write a GGUF file with a random model of the size that the command line asks for, and print the file's size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--mix", choices=MIXES, default="Q4_K_M", help="kinds of the matrices (default: %(default)s)")
    for name, value in Size._field_defaults.items():
        if name != "vocab":
            parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    size = Size(**{name: getattr(args, name) for name in Size._fields if name != "vocab"})
    write_random_gguf(args.path, size, kinds_of(args.mix, size), args.seed, tokenizer=True)
    print(f"{args.path}: {args.path.stat().st_size / 2**20:.0f} MiB")


def kinds_of(mix: str, size: Size) -> dict[str, Kind]:
    """Return the quantisation of each matrix by its GGUF name. ``Q4_K_M`` is mixed as in llama.cpp.

    Any other ``mix`` is the quantisation of all matrices. The experts' routers are not among them.
    """
    kinds, layers, suffix = {}, size.layers, "_exps" if size.experts else ""
    for i in range(layers):
        more = i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2
        networks = (f"ffn_gate{suffix}", f"ffn_up{suffix}", f"ffn_down{suffix}")
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", *networks):
            six = more and name in ("attn_v", f"ffn_down{suffix}")
            kind = (Kind.Q6_K if six else Kind.Q4_K) if mix == "Q4_K_M" else Kind[mix]
            kinds[f"blk.{i}.{name}.weight"] = kind
    for name in ("token_embd.weight", "output.weight"):
        kinds[name] = Kind.Q6_K if mix == "Q4_K_M" else Kind[mix]
    return kinds


def write_random_gguf(path: Path, size: Size, kinds: Mapping[str, Kind], seed: int, *, tokenizer: bool = False) -> None:
    """Write a GGUF file with a random model of ``size``; the same ``seed`` gives the same file.

    ``kinds``: quantisation by the matrix's GGUF name; all others are F32. ``tokenizer``: add the default model's
    tokenizer.
    """
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, "qwen3moe" if size.experts else "llama")
    _add_metadata(writer, size)
    if tokenizer:
        _copy_tokenizer(writer)
    for name, shape in _matrices(size):
        kind, k = kinds.get(name, Kind.F32), shape[-1]
        deviation = 1.0 if size.experts and name == "token_embd.weight" else k**-0.5
        if kind == Kind.F32:
            writer.add_tensor(name, rng.normal(0.0, deviation, shape).astype(np.float32))
        else:
            # Where all tokens are alike they choose the same experts: with experts, nothing is to be added to all of
            # them.
            blocks = random_blocks(kind, math.prod(shape[:-1]), k, rng, deviation, signed=size.experts > 0)
            writer.add_tensor(name, blocks.reshape(*shape[:-1], -1), raw_dtype=kind)
    for name, width in _norms(size):
        writer.add_tensor(name, np.ones(width, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_metadata(writer: GGUFWriter, size: Size) -> None:
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(size.hidden)
    writer.add_feed_forward_length(size.inner)
    writer.add_block_count(size.layers)
    writer.add_head_count(size.heads)
    writer.add_head_count_kv(size.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(size.head_dim)
    writer.add_vocab_size(size.vocab)
    if size.experts:
        writer.add_key_length(size.head_dim)
        writer.add_value_length(size.head_dim)
        writer.add_expert_count(size.experts)
        writer.add_expert_used_count(size.chosen)
        writer.add_expert_feed_forward_length(size.inner)


def _norms(size: Size) -> Iterator[tuple[str, int]]:
    for i in range(size.layers):
        yield f"blk.{i}.attn_norm.weight", size.hidden
        yield f"blk.{i}.ffn_norm.weight", size.hidden
        if size.experts:
            yield f"blk.{i}.attn_q_norm.weight", size.head_dim
            yield f"blk.{i}.attn_k_norm.weight", size.head_dim
    yield "output_norm.weight", size.hidden


def _matrices(size: Size) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd.weight", (size.vocab, size.hidden)
    if size.experts:
        yield "output.weight", (size.vocab, size.hidden)
    for i in range(size.layers):
        for name in ("attn_q", "attn_output"):
            yield f"blk.{i}.{name}.weight", (size.hidden, size.hidden)
        for name in ("attn_k", "attn_v"):
            yield f"blk.{i}.{name}.weight", (size.kv_size, size.hidden)
        if size.experts:
            yield f"blk.{i}.ffn_gate_inp.weight", (size.experts, size.hidden)
        suffix, stacked = ("_exps", (size.experts,)) if size.experts else ("", ())
        for name in ("ffn_gate", "ffn_up"):
            yield f"blk.{i}.{name}{suffix}.weight", (*stacked, size.inner, size.hidden)
        yield f"blk.{i}.ffn_down{suffix}.weight", (*stacked, size.hidden, size.inner)


def _copy_tokenizer(writer: GGUFWriter) -> None:
    reader = GGUFReader(resolve_model("smollm2").path)
    for name in reader.fields:
        if name.startswith("tokenizer."):
            copy_field(reader, writer, name)


if __name__ == "__main__":
    main()
