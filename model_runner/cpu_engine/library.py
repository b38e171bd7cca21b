"""Loads the compiled CPU kernels."""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint32, c_void_p
from enum import IntEnum
from functools import cache

from .build import PREBUILT, BuildError, IsaLevel, build, choose_level
from .structs import (
    MIRRORED,
    ForwardArgs,
    KVPoolView,
    LayerOps,
    ModelOps,
    Product,
    RopeTable,
    StepTables,
    WeightPart,
)

log = logging.getLogger(__name__)


class NativeDType(IntEnum):
    """``DType`` of attention.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    FP8_E4M3 = 3
    FP8_E5M2 = 4


class ActivationDType(IntEnum):
    """``ActivationDType`` of types.h, by the names of ``--quantized-activations``."""

    INT16 = 0
    INT8 = 1


class FetchHint(IntEnum):
    """``FetchHint`` of fetch.h: into which caches weights are fetched ahead of their use."""

    ALL_CACHES = 0
    NON_TEMPORAL = 1


NATIVE_DTYPES = {"float32": NativeDType.FLOAT32, "bfloat16": NativeDType.BFLOAT16}
"""Types of weights and activations that the kernels know, by name."""
NATIVE_KV_DTYPES = NATIVE_DTYPES | {
    "int8": NativeDType.INT8,
    "float8_e4m3fn": NativeDType.FP8_E4M3,
    "float8_e5m2": NativeDType.FP8_E5M2,
}
"""Types of the KV pool's elements that the kernels know, by name."""


@cache
def load_library() -> ctypes.CDLL:
    """Return the kernels' library for this processor, loaded once for the process. Raises ``BuildError``.

    It is built first if it isn't there, which takes half a minute.
    """
    library = _open_library(choose_level())
    _declare(library)
    for struct in MIRRORED:
        check_size(library, struct.__name__, ctypes.sizeof(struct))
    return library


def _open_library(level: IsaLevel) -> ctypes.CDLL:
    """Open the library for ``level``; if the system can't load the cached one, delete it and build it once more.

    Raises ``BuildError``.
    """
    path = build(level)
    try:
        return ctypes.CDLL(str(path))
    except OSError as e:
        if path.parent == PREBUILT:
            raise BuildError(f"{path} can't be loaded: {e}") from e
        log.warning("%s can't be loaded (%s); it is built again", path, e)
    # A home folder that hosts share may have the library of a newer system.
    path.unlink(missing_ok=True)
    path = build(level)
    try:
        return ctypes.CDLL(str(path))
    except OSError as e:
        raise BuildError(f"{path} can't be loaded: {e}") from e


def check_size(library: ctypes.CDLL, struct: str, size: int) -> None:
    """Raise ``BuildError`` unless the kernels' struct of this name has ``size`` bytes, those of Python's copy."""
    theirs = library.pds_struct_size(struct.encode())
    if theirs != size:
        raise BuildError(f"{struct} has {theirs} bytes in the CPU kernels, and {size} where Python fills it")


def fetch_hint() -> FetchHint:
    """Return the kernels' current prefetch hint: this processor's default, or what ``set_fetch_hint`` chose.

    Raises ``BuildError``.
    """
    return FetchHint(load_library().pds_fetch_hint())


def set_fetch_hint(hint: FetchHint) -> None:
    """Choose for this process into which caches the kernels fetch weights ahead of their use.

    For tests and measurements: results stay the same bits.
    Raises ``BuildError`` if the kernels' library can't be built or loaded.
    """
    load_library().pds_set_fetch_hint(hint)


# An engine or a packer; a weight's kind, layer and expert; its parts.
_PLACE = (c_void_p, c_int32, c_int64, c_int64, c_int64, POINTER(WeightPart))


def _declare(library: ctypes.CDLL) -> None:
    for name, result, arguments in (
        ("pds_fetch_hint", c_int32, ()),
        ("pds_set_fetch_hint", None, (c_int32,)),
        ("pds_team_new", c_void_p, (c_int32, POINTER(c_int32), c_int32)),
        ("pds_team_free", None, (c_void_p,)),
        ("pds_team_set_size", None, (c_void_p, c_int32)),
        ("pds_team_system_id", c_int32, (c_void_p, c_int32)),
        (
            "pds_engine_new",
            c_void_p,
            (POINTER(ModelOps), POINTER(LayerOps), *[POINTER(KVPoolView)] * 2, c_int32, c_void_p, c_void_p),
        ),
        ("pds_ranks_bytes", c_int64, (c_int32, c_int64, c_int64)),
        (
            "pds_ranks_new",
            c_void_p,
            (c_void_p, c_int32, c_int32, c_int64, c_int64, c_int32, c_void_p, c_void_p, c_void_p, c_int32),
        ),
        ("pds_ranks_part", c_void_p, (c_void_p, c_uint32, c_int32)),
        ("pds_ranks_logits", c_void_p, (c_void_p, c_uint32)),
        ("pds_ranks_free", None, (c_void_p,)),
        ("pds_engine_meet", None, (c_void_p,)),
        ("pds_engine_free", None, (c_void_p,)),
        (
            "pds_engine_set_linear",
            c_int32,
            (*_PLACE, c_void_p, c_void_p),
        ),
        ("pds_packed_bytes", c_int64, (c_int32, c_int32, c_int64, c_int64)),
        ("pds_engine_set_norm", None, (c_void_p, c_int32, c_int64, c_void_p)),
        ("pds_engine_set_vector", None, (c_void_p, c_int32, c_int64, c_void_p)),
        ("pds_packer_new", c_void_p, (POINTER(ModelOps), POINTER(LayerOps), c_int32, c_int32, c_void_p)),
        ("pds_packer_free", None, (c_void_p,)),
        ("pds_packer_size", c_int32, (*_PLACE, POINTER(c_int64))),
        ("pds_packer_pack", c_int32, (*_PLACE, c_void_p, c_void_p, c_void_p)),
        ("pds_convert", None, (c_void_p, c_int32, c_void_p, c_int32, c_void_p, c_int64)),
        ("pds_dequantise", None, (c_void_p, c_int32, c_void_p, c_int64, c_int32, c_void_p)),
        ("pds_rotations", None, (*[c_void_p] * 3, c_int64, c_int64, *[c_void_p] * 2)),
        ("pds_engine_set_embedding", None, (c_void_p, c_void_p)),
        ("pds_engine_forward", c_int32, (c_void_p, POINTER(ForwardArgs))),
        ("pds_engine_weight_bytes", None, (c_void_p, POINTER(c_int64))),
        ("pds_choose_grid", c_int64, (POINTER(Product), c_int64, POINTER(c_int64))),
        ("pds_choose_by_rows", c_int32, (POINTER(Product), c_int64)),
        ("pds_struct_size", c_int64, (c_char_p,)),
        ("pds_stepper_new", c_void_p, (c_void_p, c_void_p, POINTER(StepTables))),
        ("pds_stepper_free", None, (c_void_p,)),
        # Entries and tokens, seven int32 arrays as the bytes of a message, ropes, results, layers done.
        (
            "pds_stepper_run",
            c_int64,
            (c_void_p, c_int64, c_int64, *[c_char_p] * 7, POINTER(RopeTable), c_int64, *[c_void_p] * 3),
        ),
    ):
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
