"""FlashInfer's wrappers, computed in torch on the host.

Each call is first compared with the signature of the real one. What cannot be on a GPU (a plan of device tensors, a
captured array that moves) is an error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import flashinfer
import flashinfer.mla
import pytest
import torch
from torch import Tensor

LOG2_E = 1.4426950408889634


class Run(NamedTuple):
    """What was run: by which wrapper, of how many captured entries, with what plan."""

    wrapper: str
    captured: int
    plan: dict[str, Any]


def _on_device(run: Callable[..., Any]) -> Callable[..., Any]:
    """Hide from the test's device what the wrapper computes, because a real one would compute it on the GPU."""

    @functools.wraps(run)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return run(*args, **kwargs)

    return wrapped


class _Fake:
    real: ClassVar[type]
    runs: ClassVar[list[Run]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(self.real.__init__).bind(self, *args, **kwargs)
        self.made = dict(bound.arguments)
        self.captured = self.made.get("use_cuda_graph", False)
        self._pin_memory_int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8)

    def reset_workspace_buffer(self, *args: Any) -> None:
        inspect.signature(self.real.reset_workspace_buffer).bind(self, *args)

    def _bind(self, name: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = inspect.signature(getattr(self.real, name)).bind(self, *args, **kwargs)
        bound.apply_defaults()
        return {**bound.arguments, **bound.arguments.pop("kwargs", {})}

    def _attend(self, q: Tensor, entries: list[tuple[int, int, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Attend to ``entries``: (first query, number of queries, keys [S, K, D], values)."""
        plan, out, weights = self.plan_of, [], []
        window, cap = plan.get("window_left", -1), plan.get("logits_soft_cap")
        for first, count, keys, values in entries:
            groups = q.shape[1] // keys.shape[1]
            k, v = (x.float().repeat_interleave(groups, 1) for x in (keys, values))
            scores = torch.einsum("thd,shd->ths", q[first : first + count].float(), k) * plan["sm_scale"]
            if cap:
                scores = cap * (scores / cap).tanh()
            at, lane = torch.arange(len(k) - count, len(k))[:, None], torch.arange(len(k))
            hidden = lane > at
            if window >= 0:
                hidden |= lane < at - window
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
            out.append(torch.einsum("ths,shd->thd", scores.softmax(-1), v))
            weights.append(scores.logsumexp(-1) * LOG2_E)
        return torch.cat(out).to(q.dtype), torch.cat(weights)

    def _store(self, **arrays: Tensor) -> None:
        """Store the plan's arrays. A captured wrapper copies them into the arrays that it was given."""
        for name, array in arrays.items():
            assert array.dtype == torch.int32, name
            if not self.captured:
                setattr(self, name, array)
                continue
            own = self.made[self.buffers[name]]
            assert len(array) == len(own) or name == "kv_indices", f"{name} has {len(array)} for {len(own)}"
            own[: len(array)].copy_(array)
            setattr(self, name, own)

    def _rows_of(self, entry: int, pages: Tensor, length: int) -> Tensor:
        begin, end = self.kv_indptr[entry : entry + 2].tolist()
        return pages[self.kv_indices[begin:end].long()].flatten(0, 1)[:length]

    def _lens(self) -> list[int]:
        page_size = self.plan_of["page_size"]
        pages = (self.kv_indptr[1:] - self.kv_indptr[:-1]).tolist()
        return [(n - 1) * page_size + last for n, last in zip(pages, self.last_page_len.tolist(), strict=True)]

    def _record(self) -> None:
        captured = len(self.kv_indptr) - 1 if self.captured else 0
        _Fake.runs.append(Run(type(self).__name__, captured, self.plan_of))


class FakeDecode(_Fake):
    """BatchDecodeWithPagedKVCacheWrapper."""

    real = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    buffers: ClassVar = {
        "kv_indptr": "paged_kv_indptr_buffer",
        "kv_indices": "paged_kv_indices_buffer",
        "last_page_len": "paged_kv_last_page_len_buffer",
    }

    def plan(self, *args: Any, **kwargs: Any) -> None:
        plan = self._bind("plan", args, kwargs)
        inspect.signature(self.real._plan_impl).bind(self, *args, **kwargs)
        self.plan_of = plan
        self._store(kv_indptr=plan["indptr"], kv_indices=plan["indices"], last_page_len=plan["last_page_len"])

    @_on_device
    def run(self, *args: Any, **kwargs: Any) -> Any:
        call = self._bind("run", args, kwargs)
        q, (keys, values) = call["q"], call["paged_kv_cache"]
        assert q.dtype == keys.dtype == self.plan_of["q_data_type"]
        assert keys.shape[1] == self.plan_of["page_size"]
        entries = [
            (b, 1, self._rows_of(b, keys, length), self._rows_of(b, values, length))
            for b, length in enumerate(self._lens())
        ]
        assert len(q) == len(entries)
        self._record()
        attended = self._attend(q, entries)
        return attended if call["return_lse"] else attended[0]


class FakePrefill(_Fake):
    """BatchPrefillWithPagedKVCacheWrapper."""

    real = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    buffers: ClassVar = {}

    def plan(self, *args: Any, **kwargs: Any) -> None:
        plan = self.plan_of = self._bind("plan", args, kwargs)
        assert plan["causal"]
        self.qo_indptr = plan["qo_indptr"]
        self._store(
            kv_indptr=plan["paged_kv_indptr"],
            kv_indices=plan["paged_kv_indices"],
            last_page_len=plan["paged_kv_last_page_len"],
        )

    @_on_device
    def run(self, *args: Any, **kwargs: Any) -> Any:
        call = self._bind("run", args, kwargs)
        q, (keys, values) = call["q"], call["paged_kv_cache"]
        ends = self.qo_indptr.tolist()
        assert len(q) == ends[-1]
        entries = [
            (ends[b], ends[b + 1] - ends[b], self._rows_of(b, keys, length), self._rows_of(b, values, length))
            for b, length in enumerate(self._lens())
        ]
        self._record()
        attended = self._attend(q, entries)
        return attended if call["return_lse"] else attended[0]


class FakeLatent(_Fake):
    """BatchMLAPagedAttentionWrapper."""

    real = flashinfer.mla.BatchMLAPagedAttentionWrapper
    buffers: ClassVar = {
        "qo_indptr": "qo_indptr",
        "kv_indptr": "kv_indptr",
        "kv_indices": "kv_indices",
        "kv_lens": "kv_len_arr",
    }

    def plan(self, *args: Any, **kwargs: Any) -> None:
        plan = self.plan_of = self._bind("plan", args, kwargs)
        metadata = plan["metadata"]
        assert isinstance(metadata, flashinfer.mla.MLAPlanMetadata)
        assert (plan["query_layout"], plan["kv_cache_layout"], plan["causal"]) == ("split", "split", True)
        self._store(
            qo_indptr=metadata.qo_indptr,
            kv_indptr=metadata.kv_indptr,
            kv_indices=metadata.kv_indices,
            kv_lens=metadata.kv_len_arr,
        )

    @_on_device
    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        call = self._bind("run", args, kwargs)
        (q, q_rope), (latents, ropes) = call["query"], call["kv_cache"]
        assert latents.shape[-1] == self.plan_of["head_dim_ckv"]
        assert ropes.shape[-1] == self.plan_of["head_dim_kpe"]
        ends, entries = self.qo_indptr.tolist(), []
        for b, length in enumerate(self.kv_lens.tolist()):
            latent, rope = (self._rows_of(b, x, length)[:, None] for x in (latents, ropes))
            entries.append((ends[b], ends[b + 1] - ends[b], torch.cat((latent, rope), -1), latent))
        self._record()
        return self._attend(torch.cat((q, q_rope), -1), entries)[0]


def use_fakes(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Put them into the place of the real ones; returns what will have been run."""
    _Fake.runs.clear()
    monkeypatch.setattr(flashinfer, "BatchDecodeWithPagedKVCacheWrapper", FakeDecode)
    monkeypatch.setattr(flashinfer, "BatchPrefillWithPagedKVCacheWrapper", FakePrefill)
    monkeypatch.setattr(flashinfer.mla, "BatchMLAPagedAttentionWrapper", FakeLatent)
    return _Fake.runs
