"""The elements of a key that are its label: the channels that contribute most to a query's score.

``pdserve calibrate`` finds them once for a model and writes a JSON file. The file lists all channels of each layer and
KV head, those that matter most first. A server takes the first ``--ds-heavy-channel-num`` of them. The file identifies
its model by family and sizes. A model's file also serves models that were tuned from it: other channels cost speed and
precision, but are not wrong.

The method is that of Yang et al., "Post-Training Sparse Attention with Double Sparsity" (2024, arXiv 2408.07092).

Shapes: L layers, K KV heads, D head_dim, C channels of a label.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from ....model_files.errors import UnsupportedModel
from ....model_files.spec import MLASpec, ModelSpec
from ...options import WorkerOptions

Format = Literal["pdserve label channels 1"]
FORMAT: Format = "pdserve label channels 1"
USUAL_SHARE = 4
"""Channels of a head per channel of its label, unless the options say otherwise."""


class ModelSizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes by which a file tells its own model from others."""

    family: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    heads: int
    kv_heads: int
    head_dim: int

    @staticmethod
    def of(spec: ModelSpec) -> ModelSizes:
        """Return the sizes of ``spec`` by which a channel file identifies its model.

        ``spec`` has attention that ``refuse_unsuitable`` accepts.
        """
        attention = spec.layers[0].attention
        return ModelSizes(
            family=spec.family,
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            vocab_size=spec.vocab_size,
            heads=attention.heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
        )


class ChannelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file holds. ``channels``: L lists of K lists of all D channels, those that matter most first.

    ``method`` "qk": by the mean of |q k| of a channel over pairs of a query of the KV head's group and a key.
    ``tokens``: how many were looked at.
    """

    format: Format
    model: ModelSizes
    method: Literal["qk"]
    tokens: int
    channels: list[list[list[int]]]


class LabelChannels(NamedTuple):
    """``indices``: [L, K, C] int64, ascending within a head. ``digest``: equal for equal ones."""

    indices: Tensor
    digest: str

    @property
    def dim(self) -> int:
        """Number of channels in a label (C)."""
        return self.indices.shape[2]

    @staticmethod
    def of(ranked: Tensor, count: int) -> LabelChannels:
        """Return labels of each head's first ``count`` channels in ``ranked`` [L, K, D], with their digest."""
        indices = ranked[..., :count].sort(-1).values
        return LabelChannels(indices, sha256(repr(indices.tolist()).encode()).hexdigest()[:16])


def write_channels(path: Path, spec: ModelSpec, ranked: Tensor, tokens: int) -> None:
    """Write a channel file for ``spec`` to ``path``. Raises ``OSError``.

    ``ranked`` [L, K, D] int64: each KV head's channels, those that matter most first. ``tokens``: how many tokens they
    were ranked by.
    """
    content = ChannelFile(FORMAT, ModelSizes.of(spec), "qk", tokens, ranked.tolist())
    # A line for each layer: a file that people look into.
    path.write_bytes(msgspec.json.encode(content).replace(b"]],[[", b"]],\n[[") + b"\n")


def read_channels(path: Path, spec: ModelSpec) -> Tensor:
    """Read the ranked channels of ``spec`` from a channel file: [L, K, D] int64, those that matter most first.

    Raises ``UnsupportedModel`` if the file can't be read, is damaged, or is of another model.
    """
    flag = f"--ds-channel-config-path {path}"
    try:
        content = msgspec.json.decode(path.read_bytes(), type=ChannelFile)
    except OSError as e:
        raise UnsupportedModel(f"{flag}: {e.strerror}; `pdserve calibrate` writes such a file") from e
    except msgspec.DecodeError as e:
        raise UnsupportedModel(f"{flag} is no file of label channels ({e}); `pdserve calibrate` writes one") from e
    ours, theirs = (msgspec.structs.asdict(sizes) for sizes in (ModelSizes.of(spec), content.model))
    if unlike := [f"{name} {theirs[name]}, not {ours[name]}" for name in ours if ours[name] != theirs[name]]:
        raise UnsupportedModel(f"{flag} is of another model ({'; '.join(unlike)}): calibrate this one")
    layers, all_channels = content.channels, list(range(spec.head_dim))
    whole = len(layers) == spec.num_layers and all(len(heads) == spec.num_kv_heads for heads in layers)
    if not whole or any(sorted(channels) != all_channels for heads in layers for channels in heads):
        raise UnsupportedModel(f"{flag} does not list each channel of each KV head once: calibrate again")
    return torch.tensor(layers, dtype=torch.int64)


def choose_channels(options: WorkerOptions, spec: ModelSpec) -> LabelChannels | None:
    """Return the label channels for ``--enable-double-sparsity``, read from the file that ``options`` name.

    Return None if the option is not set. Raises ``UnsupportedModel``.
    """
    if not options.enable_double_sparsity:
        return None
    refuse_unsuitable("--enable-double-sparsity", spec)
    count = options.ds_heavy_channel_num or max(1, spec.head_dim // USUAL_SHARE)
    if count > spec.head_dim:
        raise UnsupportedModel(f"--ds-heavy-channel-num {count}: a key has {spec.head_dim} channels")
    assert options.ds_channel_config_path is not None  # SparsityOptions.problems
    return LabelChannels.of(read_channels(Path(options.ds_channel_config_path), spec), count)


def refuse_unsuitable(asked: str, spec: ModelSpec) -> None:
    """Raise ``UnsupportedModel`` if a layer of ``spec`` has attention that labels can't serve.

    That is latent attention, a sliding window, a soft cap or sinks. ``asked``: the option or command that needs labels,
    for the message.
    """
    for i, layer in enumerate(spec.layers):
        attention = layer.attention
        if isinstance(attention, MLASpec):
            raise UnsupportedModel(f"{asked} is not supported for latent attention (MLA); leave it out")
        has = {
            "a sliding window": attention.window is not None,
            "a soft cap": attention.softcap is not None,
            "sinks": attention.sinks,
        }
        if unsuitable := [name for name, is_there in has.items() if is_there]:
            raise UnsupportedModel(
                f"{asked} is for attention to all tokens alike, and layer {i} has {' and '.join(unsuitable)}; "
                "leave it out"
            )
