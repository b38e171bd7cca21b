"""The layout of a model's KV pages: which layers share a page, and what a page has of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ...messages.worker import KVGroup, KVKind, KVLayout, KVOrder
from ..dtypes import ITEM_BYTES, QUANTIZED, SCALE_BYTES, SCALE_DTYPE, DType, dtype_name

if TYPE_CHECKING:
    from .sparse.channels import LabelChannels


class HasKV(Protocol):
    """What keeps keys and values: a ``ModelSpec``, or a ``KVShape``."""

    @property
    def num_layers(self) -> int:
        """Number of layers with KV."""

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads, the same in every layer; 1 for latent rows."""

    @property
    def head_dim(self) -> int:
        """Number of elements in one head's key, and in its value; of a latent row, all of its elements."""

    @property
    def latent_dim(self) -> int | None:
        """Number of a latent row's first elements that are the value, too; None: keys and values are stored apart."""

    @property
    def kv_elements(self) -> int:
        """Number of elements that each layer stores of one token."""


class KVShape(NamedTuple):
    """The sizes by themselves; see ``HasKV``."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    latent_dim: int | None = None

    @property
    def kv_elements(self) -> int:
        """Number of elements that each layer stores of one token: of a latent row, or of all keys and values."""
        return self.num_kv_heads * self.head_dim * (2 if self.latent_dim is None else 1)


def make_layout(
    spec: HasKV,
    page_size: int,
    dtype: DType,
    order: KVOrder = "tokens",
    windows: Mapping[int, int] | None = None,
    labels: LabelChannels | None = None,
) -> KVLayout:
    """Make the layout of the KV pages of ``spec``, with pages of ``page_size`` tokens.

    ``windows``: sliding windows in tokens, by number of the layer, for layers that free pages older than their window.
    These layers get a page group of their own. ``labels``: the channels of each key that are stored once more; None:
    none. Raises ``ValueError`` if labels don't fit the other arguments.
    """
    windows, name = windows or {}, dtype_name(dtype)
    item, is_quantized = ITEM_BYTES[name], name in QUANTIZED
    kind: KVKind = "mha" if spec.latent_dim is None else "mla"
    width = spec.kv_elements * item
    if is_quantized:
        width += spec.kv_elements // spec.head_dim * SCALE_BYTES
    if labels is not None:
        if kind != "mha" or is_quantized or order != "tokens" or windows:
            raise ValueError("labels go with whole keys and values, in the order of tokens, that are kept")
        kind = "sparse"
        width += spec.num_kv_heads * labels.dim * item

    def group(layers: tuple[int, ...], window: int) -> KVGroup:
        return KVGroup(
            layers=layers,
            kind=kind,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=name,
            page_bytes=len(layers) * page_size * width,
            value_dim=spec.latent_dim or 0,
            scale_dtype=SCALE_DTYPE if is_quantized else None,
            window=window,
            label_dim=0 if labels is None else labels.dim,
            labels="" if labels is None else labels.digest,
        )

    kept = group(tuple(layer for layer in range(spec.num_layers) if layer not in windows), 0)
    if not windows:
        return KVLayout(page_size, (kept,), order)
    return KVLayout(page_size, (kept, group(tuple(sorted(windows)), max(windows.values()))), order)
