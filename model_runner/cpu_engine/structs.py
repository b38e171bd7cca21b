"""The structs that cross into the compiled CPU kernels, field by field as the C++ has them.

Does not import torch.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_void_p


class KVPoolView(ctypes.Structure):
    """``KVPoolView`` of attention.h."""

    _fields_ = (
        ("data", c_void_p),
        ("dtype", c_int32),
        ("num_layers", c_int64),
        ("page_size", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("pool_heads", c_int64),
        ("value_dim", c_int64),
    )


class TokenRows(ctypes.Structure):
    """``TokenRows`` of attention.h."""

    _fields_ = (("data", c_void_p), ("dtype", c_int32), ("stride", c_int64))


class Scoring(ctypes.Structure):
    """``Scoring`` of attention.h."""

    _fields_ = (("scale", c_float), ("softcap", c_float), ("sinks", c_void_p))


class NormOp(ctypes.Structure):
    """``NormOp`` of layer_ops.h."""

    _fields_ = (("used", c_int32), ("eps", c_float))


class ProjectQKV(ctypes.Structure):
    """``ProjectQKV`` of layer_ops.h."""

    _fields_ = (("before", NormOp), ("qk_norm", c_int32), ("qk_eps", c_float), ("rope", c_int32))


class Attend(ctypes.Structure):
    """``Attend`` of layer_ops.h."""

    _fields_ = (("scale", c_float), ("softcap", c_float), ("window", c_int32), ("group", c_int32), ("place", c_int32))


class LatentOp(ctypes.Structure):
    """``LatentOp`` of layer_ops.h."""

    _fields_ = (
        *((name, c_int32) for name in ("kv_rank", "q_rank", "nope_dim", "rope_dim", "value_dim")),
        ("eps", c_float),
    )


class AddProduct(ctypes.Structure):
    """``AddProduct`` of layer_ops.h."""

    _fields_ = (("after", NormOp), ("scale", c_float))


class GateUp(ctypes.Structure):
    """``GateUp`` of layer_ops.h."""

    _fields_ = (("before", NormOp), ("activation", c_int32), ("inner", c_int32))


class ExpertsOp(ctypes.Structure):
    """``ExpertsOp`` of layer_ops.h."""

    _fields_ = (
        *((name, c_int32) for name in ("count", "chosen", "scoring", "normalised")),
        *((name, c_float) for name in ("weight_scale", "limit")),
        *((name, c_int32) for name in ("groups", "groups_chosen", "group_score")),
        *((name, c_int32) for name in ("shared_inner", "shared_activation", "shared_gate")),
    )


class LayerOps(ctypes.Structure):
    """``LayerOps`` of layer_ops.h."""

    _fields_ = (
        *(("qkv", ProjectQKV), ("attend", Attend), ("o", AddProduct), ("gate_up", GateUp), ("down", AddProduct)),
        ("experts", ExpertsOp),
    )


class ModelOps(ctypes.Structure):
    """``ModelOps`` of layer_ops.h."""

    _fields_ = (
        *((name, c_int64) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim")),
        *((name, c_int64) for name in ("vocab", "head_begin", "head_rows")),
        ("final_norm", NormOp),
        *((name, c_float) for name in ("embedding_scale", "logit_scale", "logit_softcap")),
        ("latent", LatentOp),
        ("activations", c_int32),
    )


class WeightPart(ctypes.Structure):
    """``WeightPart`` of engine.h."""

    _fields_ = (("data", c_void_p), ("rows", c_int64), ("format", c_int32))


class RopeTable(ctypes.Structure):
    """``RopeTable`` of engine.h."""

    _fields_ = (("cos", c_void_p), ("sin", c_void_p))


class ForwardArgs(ctypes.Structure):
    """``ForwardArgs`` of engine.h."""

    _fields_ = (
        *((name, c_int64) for name in ("tokens", "entries", "wanted", "scored")),
        *((name, c_void_p) for name in ("input_ids", "positions", "out_cache_loc", "wanted_tokens", "entry")),
        ("req_to_token", c_void_p),
        ("table_stride", c_int64),
        ("window_pages", c_void_p),
        ("ropes", POINTER(RopeTable)),
        ("logits", c_void_p),
        ("states", c_void_p),
        ("layers_done", c_void_p),
    )


class Product(ctypes.Structure):
    """``Product`` of work_grid.h."""

    _fields_ = (*((name, c_int64) for name in ("rows", "panels", "k", "panel_bytes")), ("effort", c_double))


class StepTables(ctypes.Structure):
    """``StepTables`` of step.h."""

    _fields_ = (
        ("req_to_token", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("last_tokens", c_void_p),
        ("params", c_void_p),
        ("slots", c_int64),
        ("window_pages", c_void_p),
        ("clear_begun", c_int32),
        ("shared_heads", c_int32),
    )


MIRRORED = (
    KVPoolView,
    TokenRows,
    Scoring,
    NormOp,
    ProjectQKV,
    Attend,
    LatentOp,
    AddProduct,
    GateUp,
    ExpertsOp,
    LayerOps,
    ModelOps,
    WeightPart,
    RopeTable,
    ForwardArgs,
    Product,
    StepTables,
)
"""Structures with sizes that are compared when the library is loaded; those of NumPy are compared at their use."""
