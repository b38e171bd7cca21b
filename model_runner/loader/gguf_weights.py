"""Weights from a GGUF file, dequantised one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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


class GGUFMatrix(NamedTuple):
    """``shape``: [N, K] of the weights. ``rows``: [N, …], a row's blocks one after another, or plain numbers.

    ``order`` puts rows into the order of the Hugging Face layout; it may copy them.
    """

    kind: GGMLQuantizationType
    shape: tuple[int, int]
    rows: npt.NDArray[Any]
    order: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]


class GGUFWeights(WeightSource):
    """The tensors of a GGUF file under their Hugging Face names."""

    def __init__(self, path: Path, config: ModelConfig, left_out: Container[str] = ()) -> None:
        """``left_out``: names of tensors that nobody wants as floats; they are not dequantised."""
        self._file = GGUFFile(path)
        self._left_out = left_out
        self._heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        self._interleaved = find_family(config.model_type).gguf_interleaved

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See the base class; raises ``UnsupportedModel`` for a quantisation that the gguf package can't undo."""
        for name, tensor in self._file.tensors.items():
            if name == IN_CONFIG or _hf_name(name) in self._left_out:
                continue
            values = self._in_hf_order(name, _dequantize(tensor))
            # Unquantised tensors are still the read-only file.
            yield _hf_name(name), torch.from_numpy(np.require(values, requirements=["C", "W"]))

    def matrices(self) -> dict[str, GGUFMatrix]:
        """All matrices by their Hugging Face names, as they lie in the file, which stays open as long as they do."""
        return {
            _hf_name(name): GGUFMatrix(
                tensor.tensor_type,
                (int(tensor.shape[1]), int(tensor.shape[0])),
                tensor.data,
                partial(self._in_hf_order, name),
            )
            for name, tensor in self._file.tensors.items()
            if len(tensor.shape) == 2
        }

    def _in_hf_order(self, name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
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


def _dequantize(tensor: ReaderTensor) -> npt.NDArray[Any]:
    try:
        values: npt.NDArray[Any] = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as e:
        raise UnsupportedModel(f"{tensor.name!r}: quantisation {tensor.tensor_type.name} is not supported") from e
    return values


def _undo_interleave(values: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """llama.cpp lays the pairs that rotate together side by side (0, D/2, 1, D/2 + 1, …); put the halves back."""
    by_pair = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return by_pair.swapaxes(1, 2).reshape(values.shape)
