"""Multi-head latent attention of one layer (DeepSeek-V2, 2024), in its absorbed form.

A head's score is q · (k_b c) = (k_bᵀ q) · c, and its output Σ w (v_b c) = v_b (Σ w c). With k_b on the query's side and
v_b on the output's, all heads attend over the rows as they lie in the pool, one KV head. Prompts are computed as single
tokens are, though multiplying out their keys would cost less. With one form, a token's result is the same wherever it
is computed.

Shapes: T tokens, H heads, N hidden size, D = R + P elements of a row, R kv_lora_rank, P qk_rope_head_dim, Q
qk_nope_head_dim, V v_head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...model_files.spec import MLASpec
from ..attention.base import AttentionBackend
from ..ops.base import DeviceOps, PassRotation
from ..ops.layers.linear import Linear, Linears, weights_of
from ..ops.layers.rms_norm import RMSNorm


class LatentAttention:
    """One layer's. ``q_a_proj`` and ``q_a_norm`` are None where queries are projected from the hidden state."""

    def __init__(self, spec: MLASpec, layer: int, hidden: int, *, dtype: torch.dtype, device: torch.device) -> None:
        def linear(inputs: int, outputs: int, *, bias: bool = False) -> Linear:
            return Linear(inputs, (outputs,), bias=bias, dtype=dtype, device=device)

        self.spec = spec
        self._layer = layer
        rank = spec.q_lora_rank
        self.q_a_proj = None if rank is None else linear(hidden, rank, bias=spec.a_bias)
        self.q_a_norm = None if rank is None else RMSNorm(rank, spec.norm, device=device)
        self.q_b_proj = linear(rank or hidden, spec.heads * spec.qk_head_dim)
        self.kv_a_proj = linear(hidden, spec.head_dim, bias=spec.a_bias)
        self.kv_a_norm = RMSNorm(spec.kv_lora_rank, spec.norm, device=device)
        self.k_b_proj = linear(spec.qk_nope_head_dim, spec.heads * spec.kv_lora_rank)
        self.v_b_proj = linear(spec.kv_lora_rank, spec.heads * spec.v_head_dim)
        self.o_proj = linear(spec.heads * spec.v_head_dim, hidden, bias=spec.o_bias)

    def forward(
        self, x_TN: Tensor, rotation: PassRotation | None, attention: AttentionBackend, ops: DeviceOps
    ) -> Tensor:
        """Write the tokens' latent rows to the pool, and return the layer's attention output [T, N].

        Raises ``ValueError`` if ``rotation`` is None.
        """
        if rotation is None:
            raise ValueError("latent attention without positions is not known")
        (latent_THR, q_THP), (row_T1R, k_T1P) = self._queries(x_TN, ops), self._row(x_TN, ops)
        q_THP, k_T1P = ops.rotate(q_THP, k_T1P, rotation)
        q_THD, row_T1D = torch.cat((latent_THR, q_THP), -1), torch.cat((row_T1R, k_T1P), -1)
        values = row_T1D[..., : self.spec.kv_lora_rank]
        latent = attention.forward(self._layer, q_THD, row_T1D, values, self.spec)
        latent_HTR = latent.view(len(x_TN), self.spec.heads, -1).transpose(0, 1)
        v_b_HRV = self.v_b_proj.weight.view(self.spec.heads, self.spec.v_head_dim, -1).transpose(1, 2)
        return self.o_proj.forward((latent_HTR @ v_b_HRV).transpose(0, 1).flatten(1))

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """Return the layer's weight tensors as views for the loader to fill, by the engine's names after ``prefix``."""
        views = weights_of(self.linears(prefix))
        views |= self.k_b_proj.weights(f"{prefix}.k_b_proj") | self.v_b_proj.weights(f"{prefix}.v_b_proj")
        views[f"{prefix}.kv_a_norm.weight"] = self.kv_a_norm.weight
        if self.q_a_norm is not None:
            views[f"{prefix}.q_a_norm.weight"] = self.q_a_norm.weight
        return views

    def linears(self, prefix: str) -> Linears:
        """Return the linear operations that are not multiplied head by head, each by the names of its projections."""
        found: dict[tuple[str, ...], Linear] = {
            (f"{prefix}.kv_a_proj",): self.kv_a_proj,
            (f"{prefix}.o_proj",): self.o_proj,
        }
        if self.q_a_proj is None:
            return found | {(f"{prefix}.q_proj",): self.q_b_proj}
        return found | {(f"{prefix}.q_a_proj",): self.q_a_proj, (f"{prefix}.q_b_proj",): self.q_b_proj}

    def _queries(self, x_TN: Tensor, ops: DeviceOps) -> tuple[Tensor, Tensor]:
        """Return each head's query in two parts: [T, H, R] to multiply with latent rows, [T, H, P] to rotate.

        The first is already multiplied with the head's matrix of ``k_b_proj``. The second is not rotated yet.
        """
        spec = self.spec
        if self.q_a_proj is not None and self.q_a_norm is not None:
            x_TN = ops.norm(self.q_a_norm, self.q_a_proj.forward(x_TN))
        q_THD = self.q_b_proj.forward(x_TN).view(len(x_TN), spec.heads, -1)
        q_THQ, q_THP = torch.split(q_THD, [spec.qk_nope_head_dim, spec.qk_rope_head_dim], -1)
        k_b_HQR = self.k_b_proj.weight.view(spec.heads, spec.kv_lora_rank, -1).transpose(1, 2)
        return (q_THQ.transpose(0, 1) @ k_b_HQR).transpose(0, 1), q_THP

    def _row(self, x_TN: Tensor, ops: DeviceOps) -> tuple[Tensor, Tensor]:
        """Return each token's latent row in two parts: the normalised latent, [T, 1, R], and the key to rotate.

        The latter is [T, 1, P].
        """
        sizes = [self.spec.kv_lora_rank, self.spec.qk_rope_head_dim]
        latent_TR, k_TP = torch.split(self.kv_a_proj.forward(x_TN), sizes, -1)
        return ops.norm(self.kv_a_norm, latent_TR)[:, None], k_TP[:, None]
