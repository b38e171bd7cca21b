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
        """Layers that keep any."""

    @property
    def num_kv_heads(self) -> int:
        """KV heads of every layer."""

    @property
    def head_dim(self) -> int:
        """Elements of a key, and of a value."""

    @property
    def latent_dim(self) -> int | None:
        """Elements of a latent row that are the value, too; None: keys and values lie apart."""

    @property
    def kv_elements(self) -> int:
        """What every layer keeps of a token."""


class KVShape(NamedTuple):
    """The sizes by themselves; see ``HasKV``."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    latent_dim: int | None = None

    @property
    def kv_elements(self) -> int:
        """Elements that each layer keeps of a token: a latent row, or a key and a value of every KV head."""
        return self.num_kv_heads * self.head_dim * (2 if self.latent_dim is None else 1)


def make_layout(
    spec: HasKV,
    page_size: int,
    dtype: DType,
    order: KVOrder = "tokens",
    windows: Mapping[int, int] | None = None,
    labels: LabelChannels | None = None,
) -> KVLayout:
    """Make the layout of the pages of ``spec``. ``windows``: layers with pages that go back, and the tokens they see.

    ``labels``: what of each key is kept a second time.
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
