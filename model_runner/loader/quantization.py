"""Names for how weights and activations are rounded."""

from __future__ import annotations

from typing import Literal

Quantization = Literal["none", "gguf", "int8", "int4", "packed", "w8a8"]
"""What ``--quantization`` comes to."""
AsBlocks = Literal["none", "gguf", "int8", "int4"]
"""Quantisations that the CPU kernels know."""
QuantizedActivations = Literal["int16", "int8"]
"""What activations are rounded to before they are multiplied with blocks (``--quantized-activations``)."""
