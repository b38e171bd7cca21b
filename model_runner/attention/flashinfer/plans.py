"""FlashInfer's wrappers for one kind of layer, and how a pass is planned with each.

A wrapper plans on the host, sends its plan to the device from pinned memory, and runs by it. All wrappers of a kind
share the memory that a plan lies in: one of them plans in a pass. In pinned memory there are two turns, as the plan of
the step before may still be on its way (``step_arrays.py``). Wrappers of captured passes have arrays of their own that
stay; those of others make new ones.

Only the names used here are asked of FlashInfer. ``tests/unit/model_runner/test_flashinfer_backend.py`` checks the
calls against its signatures.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...device.base import Device
from ..layer_kinds import LayerKind

PLAN_BYTES = 8 << 20
"""Bytes reserved for a plan: as many as FlashInfer reserves by default."""
TENSOR_CORE_GROUP = 4
"""Query heads that share a KV head: from this many on, decode steps are faster by FlashInfer's prefill kernel."""
CUDA_CORE_GROUPS = (1, 2, 4, 8)
"""Query heads per KV head that FlashInfer's decode kernel is compiled for."""


class PassIndices(NamedTuple):
    """A pass, as a kind of layer sees it. On the host, int32: ``qo_indptr`` [B + 1], ``kv_indptr`` [B + 1],
    ``last_page_len`` [B], ``kv_lens`` [B]; on the device ``kv_indices`` [N] int32.

    ``captured``: entries of the graph that it is for, all of one token; 0: none.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    last_page_len: Tensor
    kv_lens: Tensor
    kv_indices: Tensor
    is_decode: bool
    captured: int


class Sizes(NamedTuple):
    """``most_pages``: that the rows of a captured pass can have together."""

    page_size: int
    most_pages: int
    dtype: torch.dtype


class KindPlans:
    """``flashinfer``: the module. ``workspace``: for partial results, shared by all kinds: one layer runs at a time."""

    def __init__(self, flashinfer: Any, device: Device, workspace: Tensor, kind: LayerKind, sizes: Sizes) -> None:
        self._module = flashinfer
        self._device = device
        self._workspace = workspace
        self._kind = kind
        self._sizes = sizes
        self._plan_room = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=device.torch)
        self._pinned = [device.host_zeros((PLAN_BYTES,), torch.uint8) for _ in range(2)]
        self._turn = 0
        self._kv_indices: Tensor | None = None
        self._wrappers: dict[tuple[bool, int], Any] = {}
        self._planned: Any = None

    def plan(self, indices: PassIndices) -> None:
        """Plan FlashInfer's kernel for the pass of ``indices``.

        ``run`` or ``run_latent`` then computes with this plan in each layer, until the next call.
        """
        self._turn = 1 - self._turn
        key = (indices.is_decode, indices.captured)
        wrapper = self._wrappers.get(key)
        if wrapper is None:
            wrapper = self._wrappers[key] = self._make(*key)
        wrapper._pin_memory_int_workspace_buffer = self._pinned[self._turn]
        if self._kind.latent is not None:
            self._plan_latent(wrapper, indices)
        elif indices.is_decode:
            self._plan_decode(wrapper, indices)
        else:
            self._plan_prefill(wrapper, indices)
        self._planned = wrapper

    def run(self, q_THD: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        """Return the attention of the planned pass in one layer, [T, H, D].

        ``keys``, ``values``: the layer's, [P, page_size, KV heads, D] with any strides. ``sinks``: float32 [H] or None.
        """
        if sinks is None:
            attended: Tensor = self._planned.run(q_THD, (keys, values))
            return attended
        attended, weights_TH = self._planned.run(q_THD, (keys, values), return_lse=True)
        return with_sinks(attended, weights_TH, sinks)

    def run_latent(self, q_THD: Tensor, rows: Tensor) -> Tensor:
        """Return the latent attention of the planned pass in one layer, [T, H, R].

        ``rows``: the layer's latent rows, [P, page_size, R + rope], with R the elements of a value.
        """
        assert self._kind.latent is not None
        sizes = list(self._kind.latent)
        attended: Tensor = self._planned.run(query=torch.split(q_THD, sizes, -1), kv_cache=torch.split(rows, sizes, -1))
        return attended

    def _make(self, is_decode: bool, captured: int) -> Any:
        arrays = self._arrays(captured) if captured else None
        if self._kind.latent is not None:
            wrapper = self._make_latent(captured, arrays)
        elif is_decode:
            wrapper = self._module.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                "NHD",
                use_cuda_graph=captured > 0,
                use_tensor_cores=uses_tensor_cores(self._kind),
                paged_kv_indptr_buffer=None if arrays is None else arrays.kv_indptr,
                paged_kv_indices_buffer=None if arrays is None else arrays.kv_indices,
                paged_kv_last_page_len_buffer=None if arrays is None else arrays.per_entry,
                backend="fa2",
            )
        else:
            # "auto" is FA3 on a Hopper.
            wrapper = self._module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="auto")
        if self._kind.latent is None:
            wrapper.reset_workspace_buffer(self._workspace, self._plan_room)
        return wrapper

    def _make_latent(self, captured: int, arrays: _Arrays | None) -> Any:
        return self._module.mla.BatchMLAPagedAttentionWrapper(
            self._workspace,
            use_cuda_graph=captured > 0,
            qo_indptr=None if arrays is None else arrays.qo_indptr,
            kv_indptr=None if arrays is None else arrays.kv_indptr,
            kv_indices=None if arrays is None else arrays.kv_indices,
            kv_len_arr=None if arrays is None else arrays.per_entry,
            backend="fa2",
        )

    def _arrays(self, captured: int) -> _Arrays:
        if self._kv_indices is None:
            # Of all graphs: one runs at a time.
            self._kv_indices = torch.zeros(self._sizes.most_pages, dtype=torch.int32, device=self._device.torch)

        def zeros(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=self._device.torch)

        return _Arrays(zeros(captured + 1), zeros(captured + 1), zeros(captured), self._kv_indices)

    def _plan_decode(self, wrapper: Any, indices: PassIndices) -> None:
        kind, dtype = self._kind, self._sizes.dtype
        wrapper.plan(
            indices.kv_indptr,
            indices.kv_indices,
            indices.last_page_len,
            kind.heads,
            kind.kv_heads,
            kind.head_dim,
            self._sizes.page_size,
            window_left=window_left(kind),
            logits_soft_cap=kind.softcap,
            q_data_type=dtype,
            kv_data_type=dtype,
            sm_scale=kind.scale,
        )

    def _plan_prefill(self, wrapper: Any, indices: PassIndices) -> None:
        kind, dtype = self._kind, self._sizes.dtype
        wrapper.plan(
            indices.qo_indptr,
            indices.kv_indptr,
            indices.kv_indices,
            indices.last_page_len,
            kind.heads,
            kind.kv_heads,
            kind.head_dim,
            self._sizes.page_size,
            causal=True,
            sm_scale=kind.scale,
            window_left=window_left(kind),
            logits_soft_cap=kind.softcap,
            q_data_type=dtype,
            kv_data_type=dtype,
        )

    def _plan_latent(self, wrapper: Any, indices: PassIndices) -> None:
        assert self._kind.latent is not None
        rank, rope = self._kind.latent
        metadata = self._module.mla.MLAPlanMetadata.csr(
            indices.qo_indptr, indices.kv_indptr, indices.kv_indices, indices.kv_lens
        )
        wrapper.plan(
            metadata=metadata,
            num_heads=self._kind.heads,
            head_dim_ckv=rank,
            head_dim_kpe=rope,
            page_size=self._sizes.page_size,
            causal=True,
            sm_scale=self._kind.scale,
            q_data_type=self._sizes.dtype,
            kv_data_type=self._sizes.dtype,
            query_layout="split",
            kv_cache_layout="split",
        )


class _Arrays(NamedTuple):
    """Arrays of one captured size, on the device. ``per_entry``: lengths of rows, or of their last pages."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    per_entry: Tensor
    kv_indices: Tensor


def uses_tensor_cores(kind: LayerKind) -> bool:
    """Return whether decode steps of these layers run by FlashInfer's prefill kernel, which uses tensor cores."""
    group = kind.heads // kind.kv_heads
    return group >= TENSOR_CORE_GROUP or group not in CUDA_CORE_GROUPS


def window_left(kind: LayerKind) -> int:
    """Return the window as FlashInfer counts it: the tokens before a token's own, or -1 for all."""
    return -1 if kind.window is None else kind.window - 1


def with_sinks(attended_THD: Tensor, weights_TH: Tensor, sinks_H: Tensor) -> Tensor:
    """Return attention as it is with each head's sink, a learned score that takes weight and has no value.

    ``attended_THD``: attention without it. ``weights_TH``: base-2 logarithm of the sum of the exponentials of the
    scores, float32. Let z be the sum and s the sink. The share that is left is 1 / (1 + e^(s - ln z)).
    """
    share_TH = torch.sigmoid(weights_TH * LN_2 - sinks_H)
    return (attended_THD * share_TH[..., None]).to(attended_THD.dtype)


LN_2 = 0.6931471805599453
