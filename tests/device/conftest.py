"""Kernels of ``model_runner/triton_kernels``: on a GPU where there is one, else in Triton's interpreter.

A process has that for all kernels or for none (``TRITON_INTERPRET=1`` from its start).
``tests/unit/test_triton_ops.py`` starts one that has.
"""

from __future__ import annotations

from support.triton_device import CAN_RUN

if not CAN_RUN:
    collect_ignore_glob = ["*"]
