"""Launches of Triton's kernels (``model_runner/*/triton/``), as they compile for models of real sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton

from pdserve.model_runner.device.triton_compiler import CompileRequest

Constant = int | float | str | bool | None
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
PACKAGE = "pdserve.model_runner."

# What parameters are, by name; what is not listed is an int32.
POINTERS = {
    **dict.fromkeys(("words", "rows", "positions", "best", "level_counts", "level_masses", "lists"), "*i64"),
    **dict.fromkeys(("tokens", "last_tokens", "chosen", "targets", "best_ids", "slots", "cleared", "places"), "*i64"),
    **dict.fromkeys(("input_ids", "last_at", "last_rows", "new_words"), "*i64"),
    **dict.fromkeys(("pairs", "experts", "counts", "pages", "units", "table", "window_pages", "new_counts"), "*i32"),
    **dict.fromkeys(("logits", "biases", "weight", "after_weight", "q_weight", "k_weight", "sums", "scales"), "*fp32"),
    **dict.fromkeys(("largest", "best_logprobs", "scale", "new_biases", "pair_weights"), "*fp32"),
    **dict.fromkeys(("x", "y", "q", "k", "bias", "out", "common"), "*bf16"),
    **dict.fromkeys(("pool", "staging"), "*i64"),
    **dict.fromkeys(("halves", "zeros"), "*u8"),
    "x_scales": "*fp32",
    "finite": "*i1",
}
NUMBERS = {**dict.fromkeys(("eps", "offset", "after_eps", "after_offset", "limit"), "fp32"), "stride": "i64"}


def launch(
    name: str, constants: dict[str, Constant], types: dict[str, str] | None = None, *, warps: int = 4, **options: Any
) -> CompileRequest:
    """Return the request to compile a kernel. ``name``: "module:kernel". ``types``: types of parameters that differ
    from the usual.
    """
    import importlib

    file, _, kernel = name.partition(":")
    names = getattr(importlib.import_module(PACKAGE + file), kernel).arg_names
    found = {}
    for parameter in names:
        if parameter not in constants:
            is_pointer = parameter.endswith("_ptr")
            usual = POINTERS[parameter.removesuffix("_ptr")] if is_pointer else NUMBERS.get(parameter, "i32")
            found[parameter] = (types or {}).get(parameter, usual)
    return CompileRequest(kernel=PACKAGE + name, types=found, constants=constants, num_warps=warps, **options)


def most_stack() -> int:
    """Return how many bytes of a thread may spill: 0 with the Triton version in constraints.txt.

    Tiles were chosen with that version. Compilers of other versions spill a few registers at a few sizes, which is
    slower and not wrong.
    """
    pinned = re.search(r"^triton==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE)
    assert pinned is not None
    return 0 if pinned[1] == triton.__version__ else 128


def all_launches() -> Iterator[CompileRequest]:
    """Yield the launches of all kernels but attention's. The first of each file is the most general one."""
    yield from _sampling()
    yield from _layers()
    yield from _experts()
    yield from _packed()
    yield from _pages()


def _sampling() -> Iterator[CompileRequest]:
    sizes: dict[str, Constant] = {"CHUNK": 2048, "CHUNKS": 128}  # a vocabulary of 262,144
    yield launch("sampling.triton.draw_choice:choose", {**sizes, "LIST": 4096, "DRAWS": True}, warps=16)
    yield launch("sampling.triton.draw_choice:choose", {**sizes, "LIST": 4096, "DRAWS": False})
    yield launch("sampling.triton.draw_choice:search", {**sizes, "LIST": 4096}, warps=8)
    yield launch("sampling.triton.draw_levels:measure", sizes, warps=8)
    yield launch("sampling.triton.draw_levels:collect", {**sizes, "LIST": 4096}, warps=8)
    for dtype in ("*fp32", "*bf16"):
        yield launch("sampling.triton.draw_levels:find_best", {"CHUNK": 2048}, {"logits_ptr": dtype}, warps=8)
    yield launch("sampling.triton.row_table:_start_rows", {"WORDS": 12, "BLOCK": 16}, warps=1)
    yield launch("sampling.triton.row_table:_clear_edits", {"BLOCK": 1024})
    yield launch("sampling.triton.row_table:_write_edits", {"BLOCK": 1024}, {"tokens_ptr": "*i64"})
    yield launch("sampling.triton.token_logprobs:_chunk_best", {"CHUNK": 4096}, warps=8)
    yield launch(
        "sampling.triton.token_logprobs:_join_chunks",
        {"CHUNKS": 64, "BEST": 4096},
        {"targets_ptr": "*i64", "chosen_ptr": "*fp32"},
    )


def _layers() -> Iterator[CompileRequest]:
    for block, warps in ((4096, 8), (16384, 32)):
        norms: dict[str, Constant] = {"NORM": True, "AFTER": block <= 8192, "BLOCK": block}
        yield launch("ops.triton.norms:_add_and_norm", norms, {"scale": "fp32"}, warps=warps)
        yield launch("ops.triton.norms:_norm_rows", {"BLOCK": block}, warps=warps)
    both: dict[str, Constant] = {"NORM": True, "AFTER": True}
    yield launch("ops.triton.norms:_add_and_norm", {**both, "BLOCK": 8192}, {"scale": "fp32"}, warps=16)
    yield launch("ops.triton.norms:_norm_rows", {"BLOCK": 128}, warps=1)
    head: dict[str, Constant] = {"DIM": 128, "ROTATED": 128, "BLOCK": 128}
    floats = {"table_ptr": "*fp32"}
    yield launch("ops.triton.rope:_rotate", {**head, "NEIGHBOURS": False, "NORM": True}, floats, warps=1)
    plain: dict[str, Constant] = dict.fromkeys(("positions_ptr", "q_weight_ptr", "k_weight_ptr"))
    yield launch("ops.triton.rope:_rotate", {**head, **plain, "NEIGHBOURS": True, "NORM": False}, floats, warps=1)
    for kind in range(4):
        yield launch("ops.triton.activations:_gate_and_mul", {"KIND": kind, "BLOCK": 1024})
    bits = {"out_ptr": "*u8"}
    yield launch("ops.triton.quantise:_by_blocks", {"BLOCK": 128}, bits, warps=1)
    yield launch("ops.triton.quantise:_by_token", {"BLOCK": 4096}, bits, warps=8)
    yield launch("ops.triton.quantise:_by_one_scale", {"BLOCK": 4096}, {**bits, "size": "i64"}, warps=8)
    yield launch("ops.triton.quantise:_find_largest", {"BLOCK": 4096}, {"size": "i64"}, warps=8)
    yield launch("ops.triton.quantise:_finish_scale", {}, warps=1)


def _experts() -> Iterator[CompileRequest]:
    import torch

    from pdserve.model_runner.ops.triton.grouped_gemm import BLOCK_M, experts_tile

    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    for name, block_m in [
        *(("bf16", m) for m in (16, 32, 64, 128)),
        ("fp16", 64),
        *(("fp32", m) for m in (16, 64, 128)),
    ]:
        for kernel, halves in (("_experts_up", 2), ("_experts_down", 1)):
            tile = experts_tile(block_m, names[name], halves)
            warps, stages = tile.pop("num_warps"), tile.pop("num_stages")
            types = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), f"*{name}")
            constants: dict[str, Constant] = {**tile, "KIND": 3} if halves == 2 else {**tile}
            if halves == 1:
                types["out_ptr"] = "*fp32"
            divisible = ("inner", "hidden")
            yield launch(
                f"ops.triton.grouped_gemm:{kernel}",
                constants,
                {**types, "chosen": "i32"},
                warps=warps,
                num_stages=stages,
                divisible=divisible,
            )
    yield launch("ops.triton.grouped_gemm:_count_pairs", {"SCAN": 1024})
    yield launch("ops.triton.grouped_gemm:_place_pairs", {"M": BLOCK_M, "EXPERTS": 256, "SCAN": 1024})
    yield launch("ops.triton.grouped_gemm:_combine", {"COUNT": 8, "CHOSEN": 8, "BLOCK": 1024}, {"pairs_ptr": "*fp32"})


def _packed() -> Iterator[CompileRequest]:
    from pdserve.model_runner.ops.triton.fp8_gemm import fp8_tile
    from pdserve.model_runner.ops.triton.int4_gemm import int4_tile

    sizes = ("inputs", "outputs", "x_token", "row_bytes")
    for name, tokens in [*(("bf16", t) for t in (16, 128, 32, 64)), ("fp16", 16), ("fp32", 16)]:
        floats = dict.fromkeys(("x_ptr", "out_ptr", "bias_ptr"), f"*{name}")
        for is_blocked in (True, False):
            for eight in (False, True) if name != "fp32" else (False,):
                tile = fp8_tile(tokens, is_wide=name == "fp32")
                launched = {"warps": tile.pop("num_warps"), "num_stages": tile.pop("num_stages"), "divisible": sizes}
                flags: dict[str, Constant] = {"ROWS": 128 if is_blocked else 1, "BLOCKED": is_blocked, "EIGHT": eight}
                x = {"x_ptr": "*u8"} if eight else {}
                left_out: dict[str, Constant] = {} if eight else {"x_scales_ptr": None}
                constants = {**tile, **flags, **left_out}
                yield launch(
                    "ops.triton.fp8_gemm:_fp8_product", constants, {**floats, **x, "weight_ptr": "*u8"}, **launched
                )
        if (name, tokens) == ("bf16", 16):
            # Loaded weights have two more forms: one scale for all rows, and blocks with borders between rows.
            for is_blocked in (True, False):
                tile = fp8_tile(tokens)
                launched = {"warps": tile.pop("num_warps"), "num_stages": tile.pop("num_stages"), "divisible": sizes}
                flags = {"ROWS": 1 if is_blocked else 128, "BLOCKED": is_blocked, "EIGHT": False, "x_scales_ptr": None}
                yield launch(
                    "ops.triton.fp8_gemm:_fp8_product", {**tile, **flags}, {**floats, "weight_ptr": "*u8"}, **launched
                )
            tile = int4_tile(tokens, 128)
            launched = {"warps": tile.pop("num_warps"), "num_stages": tile.pop("num_stages"), "divisible": sizes}
            symmetric: dict[str, Constant] = {**tile, "GROUP": 128, "zeros_ptr": None}
            yield launch("ops.triton.int4_gemm:_int4_product", symmetric, {**floats, "scales_ptr": "*fp16"}, **launched)
        for group in (128, 64, 32):
            tile = int4_tile(tokens, group, is_wide=name == "fp32")
            launched = {"warps": tile.pop("num_warps"), "num_stages": tile.pop("num_stages"), "divisible": sizes}
            types = {**floats, "scales_ptr": "*fp16"}
            yield launch("ops.triton.int4_gemm:_int4_product", {**tile, "GROUP": group}, types, **launched)


def _pages() -> Iterator[CompileRequest]:
    yield launch("kv.triton.checksum:_page_checksum", {"BLOCK": 4096}, {"out_ptr": "*i64"}, warps=8)
    copied = ("page_words", "first", "piece")
    yield launch(
        "kv.triton.pages:_move_pages", {"units_ptr": None, "GATHER": True, "BLOCK": 2048}, warps=8, divisible=copied
    )
    yield launch(
        "kv.triton.pages:_move_pages",
        {"GATHER": False, "BLOCK": 2048},
        {"pool_ptr": "*i16", "staging_ptr": "*i16"},
        warps=8,
    )
    yield launch("ops.triton.table:_apply_step", {"WINDOWS": True, "BLOCK": 256})
