"""What a model by transformers' own class can't have."""

from __future__ import annotations

from ....model_files.errors import UnsupportedModel
from ...options import WorkerOptions


def refuse_for_transformers(options: WorkerOptions) -> None:
    """Raise ``UnsupportedModel`` for options that can't be combined with a model of transformers' own class."""
    if options.attention_backend == "cpu":
        raise UnsupportedModel(
            "--attention-backend cpu: the CPU kernels can't run a model by transformers' own class (--model-impl)"
        )
    if options.enable_double_sparsity:
        raise UnsupportedModel(
            "--enable-double-sparsity: a model by transformers' own class (--model-impl) attends to all tokens"
        )
    if options.attention_backend in ("triton", "flashinfer"):
        raise UnsupportedModel(
            f"--attention-backend {options.attention_backend}: a model by transformers' own class (--model-impl) "
            "attends by torch alone"
        )
    if options.tp_size > 1:
        raise UnsupportedModel(
            f"--tp-size {options.tp_size}: a model by transformers' own class (--model-impl) can't be divided"
        )
    if options.quantization not in ("auto", "none"):
        raise UnsupportedModel(
            f"--quantization {options.quantization} can't be had for a model by transformers' own class (--model-impl)"
        )
