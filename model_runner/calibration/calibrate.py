"""``pdserve calibrate``: runs text through a model and ranks the channels of its keys.

A score is a sum over channels of q k. The importance of a channel is measured as in Double Sparsity (Yang et al.,
2024): the mean of |q k| over pairs of a query and a key. That is mean(|q|) · mean(|k|), with the queries of all heads
that share the KV head. Queries and keys are those that attention multiplies, rotated ones.

Shapes: L layers, K KV heads, D head_dim, T tokens of a pass, H query heads, W windows of w tokens.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from ...model_files.context_length import choose_context_length, with_context, without_idle_windows
from ...model_files.errors import ModelError, UnsupportedModel
from ...model_files.model_impl import ModelImpl, choose_model_impl
from ...model_files.model_path import resolve_model
from ...model_files.spec import AttentionSpec, MLASpec, ModelSpec
from ...model_files.spec_reader import read_spec
from ...model_files.text.errors import TokenizerLoadError
from ..attention.base import AttentionBackend
from ..attention.registry import BackendNeeds, make_attention_backend
from ..batch.forward_batch import ForwardBatch
from ..device.choice import choose_device, choose_dtype
from ..kv.layout import make_layout
from ..kv.pool import make_pool
from ..kv.sparse.channels import refuse_unsuitable, write_channels
from ..loader.load import load_model_weights
from ..models.decoder import Decoder
from ..options import WorkerOptions
from .options import CalibrateOptions
from .text_windows import read_windows

PAGE = 16


class Magnitudes(AttentionBackend):
    """Attention by another backend, of which the queries and keys are added up."""

    def __init__(self, inner: AttentionBackend, shape: tuple[int, int, int], device: torch.device) -> None:
        """Add up magnitudes around the attention of ``inner``. ``shape``: numbers of layers, KV heads and channels."""
        self._inner = inner
        self._queries = torch.zeros(shape, dtype=torch.float64, device=device)
        self._keys = torch.zeros_like(self._queries)

    def plan(self, batch: ForwardBatch) -> None:
        """Have the inner attention backend prepare the pass ``batch``."""
        self._inner.plan(batch)

    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec | MLASpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Add the magnitudes of ``q`` and ``k`` to the layer's sums, then return the attention of the inner backend.

        Queries are added up over the heads that share a KV head.
        """
        grouped = q.view(len(q), spec.kv_heads, -1, q.shape[-1])
        self._queries[layer] += grouped.double().abs().sum((0, 2))
        self._keys[layer] += k.double().abs().sum(0)
        return self._inner.forward(layer, q, k, v, spec, sinks)

    def ranked(self) -> Tensor:
        """Return each KV head's channels by importance, [L, K, D] int64, most important first.

        Equal ones keep their order.
        """
        found = (self._queries * self._keys).sort(dim=-1, descending=True, stable=True)
        return found.indices.cpu()


def run_calibrate(options: CalibrateOptions) -> int:
    """Rank the channels of a model's keys, write them to ``options.out``, and return the exit code, 1 on failure."""
    try:
        spec, ranked, tokens = rank_channels(options)
        write_channels(options.out, spec, ranked, tokens)
    except (ModelError, TokenizerLoadError, OSError, UnicodeDecodeError) as e:
        print(f"pdserve calibrate: {e}", file=sys.stderr)
        return 1
    print(f"{options.out}: {spec.num_layers} layers, {spec.num_kv_heads} KV heads, by {tokens} tokens of text")
    return 0


def rank_channels(options: CalibrateOptions) -> tuple[ModelSpec, Tensor, int]:
    """Run a text through a model, and rank the channels of its keys by their importance.

    Return the model's spec, each KV head's channels [L, K, D], most important first, and the number of tokens. Raises
    ``ModelError``, ``TokenizerLoadError`` or ``OSError``.
    """
    source = resolve_model(options.model_path)
    if choose_model_impl("auto", source) is ModelImpl.TRANSFORMERS:
        raise UnsupportedModel(f"{options.model_path}: a model by transformers' own class attends to all tokens")
    described = read_spec(source)
    spec = without_idle_windows(with_context(described, choose_context_length(described, None)))
    refuse_unsuitable("calibrate", spec)
    text = None if options.text is None else options.text.read_text(encoding="utf-8")
    asked = WorkerOptions(model_path=options.model_path, tokenizer_path=options.tokenizer_path)
    windows = read_windows(asked, options.tokens, options.window, text=text)
    if not len(windows):
        raise UnsupportedModel(f"the text has fewer than {options.window} tokens; give a longer one, or --window")
    if int(windows.max()) >= spec.vocab_size:
        raise UnsupportedModel(
            f"the tokenizer makes token {int(windows.max())} of the text, and the model has {spec.vocab_size}; give "
            "the model's own as --tokenizer-path"
        )
    device = torch.device(choose_device(options.device))
    dtype = getattr(torch, choose_dtype(options.dtype, device.type))
    model = Decoder(spec, dtype, device)
    load_model_weights(model.weights(), source, spec, "auto", 0)
    return spec, _measure(model, windows.to(device), dtype), windows.numel()


@torch.inference_mode()
def _measure(model: Decoder, windows_Ww: Tensor, dtype: torch.dtype) -> Tensor:
    pages = -(-windows_Ww.shape[1] // PAGE) + 1
    pool = make_pool(make_layout(model.spec, PAGE, dtype), pages, windows_Ww.device)
    shape = (model.spec.num_layers, model.spec.num_kv_heads, model.spec.head_dim)
    found = Magnitudes(make_attention_backend("torch", BackendNeeds([pool], dtype)), shape, windows_Ww.device)
    for ids in windows_Ww:
        batch = whole_text(ids, PAGE, len(ids), 1)
        found.plan(batch)
        model.forward(batch, found)
    return found.ranked()


def whole_text(ids: Tensor, page_size: int, prompt_len: int, logits: int) -> ForwardBatch:
    """Return a pass over all of ``ids`` [T], as one request, with the logits of the last ``logits`` tokens.

    The first ``prompt_len`` tokens are its prompt. The KV goes to the pages from 1 on.
    """
    positions = torch.arange(len(ids), device=ids.device)
    return ForwardBatch(
        input_ids=ids,
        positions=positions,
        out_cache_loc=positions + page_size,
        rows=torch.zeros(1, dtype=torch.int64, device=ids.device),
        starts=[0],
        q_lens=[len(ids)],
        req_to_token=(positions + page_size).to(torch.int32)[None],
        logit_indices=positions[-logits:],
        prompt_lens=[prompt_len],
    )
