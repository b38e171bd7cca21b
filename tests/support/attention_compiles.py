"""Launches of the attention kernels, as they compile for models of real sizes, with the tiles that these have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pdserve.model_runner.attention.triton.tiles import MOST_SPLITS, TileShape, decode_tiles, prefill_tiles
from pdserve.model_runner.device.triton_compiler import CompileRequest

PACKAGE = "pdserve.model_runner.attention.triton."
LAYERS, PAGE_SIZE, ENTRIES = 32, 16, 256
PAGES_OF_ROWS = ("kv_lens", "kv_indptr", "kv_indices")
BYTES = {"*bf16": 2, "*fp16": 2, "*fp32": 4}


class Model(NamedTuple):
    """What of a model decides how its attention compiles. ``kind``: of a quantised pool, "" of none."""

    kv_heads: int
    group: int
    head_dim: int
    value_dim: int
    query: str = "*bf16"
    kind: str = ""
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False

    @property
    def shape(self) -> TileShape:
        """As tiles are chosen by."""
        size = BYTES[self.query]
        return TileShape(self.head_dim, self.value_dim, self.group, 1 if self.kind else size, size)


LLAMA_8B = Model(8, 4, 128, 128)
DEEPSEEK_V3 = Model(1, 128, 576, 512)
MODELS = {
    "Llama 3 8B": LLAMA_8B,
    "Llama 3 8B, int8": LLAMA_8B._replace(kind="int8"),
    "DeepSeek-V3": DEEPSEEK_V3,
    "Llama 3 8B, e4m3": LLAMA_8B._replace(kind="fp8_e4m3"),
    "Llama 3 8B, e5m2, float16": LLAMA_8B._replace(kind="fp8_e5m2", query="*fp16"),
    "Llama 3 8B, float32": LLAMA_8B._replace(query="*fp32"),
    "Llama 3.2 1B": Model(8, 4, 64, 64),
    "Llama 3.2 1B, int8": Model(8, 4, 64, 64, kind="int8"),
    "Llama 3.2 1B, float32": Model(8, 4, 64, 64, "*fp32"),
    "Gemma 2 9B": Model(8, 2, 256, 256, window=4096, softcap=50.0),
    "Gemma 2 9B, e4m3": Model(8, 2, 256, 256, kind="fp8_e4m3", softcap=50.0),
    "GPT-OSS 20B": Model(8, 8, 64, 64, window=128, sinks=True),
    "Qwen 2 7B": Model(4, 7, 128, 128),
    "Phi-3 mini": Model(32, 1, 96, 96, window=2047),
    "DeepSeek-V2-Lite": Model(1, 16, 576, 512),
    "DeepSeek-V2-Lite, float32": Model(1, 16, 576, 512, "*fp32"),
}


def decode(model: Model, capability: int) -> CompileRequest:
    """Return the request to compile ``paged_decode_split``, as a batch of up to ``ENTRIES`` launches it."""
    tiles = decode_tiles(model.shape, capability)
    numbers = dict.fromkeys(("num_entries", "q_token_stride", "q_head_stride"), "i32") | {"scale": "fp32"}
    partials = dict.fromkeys(("partial_sums", "partial_peaks", "partial_totals"), "*fp32")
    return CompileRequest(
        kernel=PACKAGE + "paged_decode:paged_decode_split",
        types=_pool(model)
        | {"q": model.query}
        | _int32(*PAGES_OF_ROWS, "tokens", "split_indptr", "split_sizes")
        | partials
        | numbers,
        constants=_constants(model) | {"ENTRIES": ENTRIES, "BLOCK_H": tiles.block_h, "BLOCK_N": tiles.block_n},
        capability=capability,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        divisible=("q_token_stride", "q_head_stride"),
    )


def prefill(model: Model, capability: int) -> CompileRequest:
    """Return the request to compile ``paged_prefill``."""
    tiles = prefill_tiles(model.shape, capability)
    numbers = dict.fromkeys(("q_token_stride", "q_head_stride"), "i32") | {"scale": "fp32"}
    own = {"HAS_SINKS": model.sinks, "HEADS_AT_ONCE": min(model.group, tiles.block_m)}
    arrays = _int32(*PAGES_OF_ROWS, "tiles", "first_tokens", "q_lens") | {
        "q": model.query,
        "out": model.query,
        "sinks": "*fp32",
    }
    return CompileRequest(
        kernel=PACKAGE + "paged_prefill:paged_prefill",
        types=_pool(model) | arrays | numbers,
        constants=_constants(model) | own | {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n},
        capability=capability,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        divisible=("q_token_stride", "q_head_stride"),
    )


def others(model: Model, capability: int) -> Iterator[CompileRequest]:
    """Yield requests to compile the other attention kernels."""
    heads = model.kv_heads * model.group
    yield CompileRequest(
        kernel=PACKAGE + "paged_decode:paged_decode_reduce",
        types={"out": model.query, "sinks": "*fp32"}
        | _int32("tokens", "split_indptr")
        | dict.fromkeys(("partial_sums", "partial_peaks", "partial_totals"), "*fp32"),
        constants={"HEADS": heads, "VALUE_DIM": model.value_dim, "HAS_SINKS": True, "SPLITS": MOST_SPLITS, "BLOCK": 64},
        capability=capability,
    )
    constants = _constants(model)
    kept = {name: constants[name] for name in ("KIND", "PAGE_SIZE", "PAGE_STRIDE", "TOKEN_STRIDE", "HEAD_STRIDE")}
    strides = dict.fromkeys((f"{x}_{of}_stride" for x in "kv" for of in ("token", "head")), "i32")
    yield CompileRequest(
        kernel=PACKAGE + "store_kv:store_kv_rows",
        types=_pool(model) | {"k": model.query, "v": model.query, "slots": "*i64"} | strides,
        constants=kept
        | {"HEADS": model.kv_heads, "HEAD_DIM": model.head_dim, "BLOCK_H": _power(model.kv_heads)}
        | {"BLOCK_D": _power(model.head_dim), "HAS_VALUES": model.head_dim == model.value_dim},
        capability=capability,
        divisible=tuple(strides),
    )


def plans(capability: int) -> Iterator[CompileRequest]:
    """Yield the launches of a step's plan."""
    written = ("kv_lens", "kv_indptr", "split_indptr", "split_sizes")
    yield CompileRequest(
        kernel=PACKAGE + "attention_plan:plan_rows",
        types=_int32("tokens", "windows", *written) | {"positions": "*i64", "num_entries": "i32", "capacity": "i32"},
        constants={"PAGE_SIZE": PAGE_SIZE, "LEAST_SPLIT": 256, "MOST_SPLITS": 64, "DOUBLINGS": 4, "ENTRIES": ENTRIES},
        capability=capability,
    )
    yield CompileRequest(
        kernel=PACKAGE + "attention_plan:fill_kv_indices",
        types=_int32("req_to_token", "entries", "window_pages", *written[:2], "kv_indices", "window_indices")
        | {"rows": "*i64", "row_stride": "i32"},
        constants={"PAGE_SIZE": PAGE_SIZE, "HAS_WINDOW_PAGES": True, "BLOCK": 128},
        capability=capability,
    )


def _int32(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "*i32")


def _pool(model: Model) -> dict[str, str]:
    elements = "*u8" if model.kind else model.query
    scales = "*fp32" if model.kind else elements
    return {"k_pool": elements, "v_pool": elements, "k_scales": scales, "v_scales": scales}


def _constants(model: Model) -> dict[str, int | float | str | bool | None]:
    width = model.head_dim + (4 if model.kind else 0)
    rest = model.head_dim - model.value_dim
    return {
        "KIND": model.kind,
        "PAGE_SIZE": PAGE_SIZE,
        "PAGE_STRIDE": LAYERS * (1 if rest else 2) * PAGE_SIZE * model.kv_heads * width,
        "TOKEN_STRIDE": model.kv_heads * width,
        "HEAD_STRIDE": width,
        "KV_HEADS": model.kv_heads,
        "GROUP": model.group,
        "VALUE_DIM": model.value_dim,
        "BLOCK_V": _power(model.value_dim),
        "REST_DIM": rest,
        "BLOCK_R": max(16, rest),
        "WINDOW": model.window,
        "SOFTCAP": model.softcap,
        "PRECISION": "ieee" if model.query == "*fp32" else "tf32",
    }


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
