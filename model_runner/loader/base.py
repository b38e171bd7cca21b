"""Fills a model's weights from a source, whatever the format."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor

from ...model_files.errors import InvalidWeights
from ...runtime.progress import ProgressLog

log = logging.getLogger(__name__)

# What checkpoints may carry and the model computes or shares itself.
NOT_NEEDED = ("rotary_emb.inv_freq", "lm_head.weight")


class WeightSource(ABC):
    """Where weights come from."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor once, by its Hugging Face name, in that layout, on the CPU, of any float type."""


def load_weights(weights: dict[str, Tensor], source: WeightSource) -> None:
    """Copy ``source`` into ``weights`` (name → view), casting; raises ``InvalidWeights`` unless they match exactly."""
    missing = dict(weights)
    progress = ProgressLog(log, "loading the weights", sum(view.nbytes for view in weights.values()))
    for name, tensor in source.tensors():
        target = missing.pop(name, None)
        if target is None:
            if name.endswith(NOT_NEEDED):
                continue
            raise InvalidWeights(f"the checkpoint holds {name!r}, which its config does not account for")
        if target.shape != tensor.shape:
            raise InvalidWeights(f"{name!r} has shape {list(tensor.shape)}, the config means {list(target.shape)}")
        target.copy_(tensor)
        progress.advance(target.nbytes)
    if missing:
        raise InvalidWeights(f"the checkpoint lacks {len(missing)} tensors, {next(iter(missing))!r} among them")
