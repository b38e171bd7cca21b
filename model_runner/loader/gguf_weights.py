"""Weights from a GGUF file, dequantised one tensor at a time."""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, ReaderTensor
from torch import Tensor

from ...model_files.config import ModelConfig
from ...model_files.errors import UnsupportedModel
from ...model_files.families import find_family
from ...model_files.gguf_reader import GGUFFile
from .base import WeightSource

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
IN_CONFIG = "rope_freqs.weight"


class GGUFWeights(WeightSource):
    """The tensors of a GGUF file under their Hugging Face names."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._file = GGUFFile(path)
        self._heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        self._interleaved = find_family(config.model_type).gguf_interleaved

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See the base class; raises ``UnsupportedModel`` for a quantisation that the gguf package can't undo."""
        for name, tensor in self._file.tensors.items():
            if name == IN_CONFIG:
                continue
            yield _hf_name(name), self._in_hf_order(name, _dequantize(tensor))

    def blocks(
        self, kinds: Container[GGMLQuantizationType]
    ) -> dict[str, tuple[GGMLQuantizationType, npt.NDArray[np.uint8]]]:
        """The matrices that are quantised in one of ``kinds``, as they are: uint8 [N, bytes of a row]."""
        found = {}
        for name, tensor in self._file.tensors.items():
            if tensor.tensor_type in kinds and tensor.data.ndim == 2:
                rows = torch.from_numpy(np.require(tensor.data, requirements=["C", "W"]))
                found[_hf_name(name)] = (tensor.tensor_type, self._in_hf_order(name, rows).numpy())
        return found

    def _in_hf_order(self, name: str, values: Tensor) -> Tensor:
        heads = self._heads.get(name.split(".")[-2])
        return values if heads is None or not self._interleaved else _undo_interleave(values, heads)


def _hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown one is returned unchanged, for the loader to refuse."""
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, kind] if part in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"
    return name


def _dequantize(tensor: ReaderTensor) -> Tensor:
    try:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as e:
        raise UnsupportedModel(f"{tensor.name!r}: quantisation {tensor.tensor_type.name} is not supported") from e
    # Unquantised tensors are still the read-only file.
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))


def _undo_interleave(values: Tensor, heads: int) -> Tensor:
    """llama.cpp lays the pairs that rotate together side by side (0, D/2, 1, D/2 + 1, …); put the halves back."""
    by_pair = values.view(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return by_pair.transpose(1, 2).reshape(values.shape)
