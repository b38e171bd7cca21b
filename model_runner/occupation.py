"""What of the device's memory this worker holds: KV pool and weights go back to the system, and are had again.

A pool on the host keeps its addresses: its pages alone go, and come as zeros when they are touched again, so that
views, engines and registered regions know nothing of it. On an accelerator the storage behind the tensors goes and
comes, and with it the addresses: graphs are captured again. Weights are dropped with all that computes by them, and
loaded from where they came from; other weights than before are refused (``ModelRunner.take_weights``).

Nothing computes, reads or writes the memory meanwhile: that is the scheduler's part (``scheduler/occupation.py``).
"""

from __future__ import annotations

import gc
import logging
import time
from typing import TYPE_CHECKING

import torch

from ..disaggregation.errors import TransferError
from ..messages.memory import ALL_TAGS, MemoryChanged, MemoryCommand, MemoryTag, ReleaseMemory, Unreleasable
from ..model_files.errors import ModelError
from ..model_files.model_impl import ModelImpl
from ..runtime.options import ServerOptions
from .errors import NotEnoughMemory
from .start_model import freeze

if TYPE_CHECKING:
    from .model_runner import ModelRunner
    from .prefault import PoolPrefault
    from .step_runner import StepRunner

log = logging.getLogger(__name__)
GIB = 2**30


def unreleasable(model: ModelRunner, options: ServerOptions) -> list[Unreleasable]:
    """What can't be given back."""
    if options.tp_size > 1:
        text = "the ranks of --tp-size keep their memory"
        return [Unreleasable(tag, text) for tag in ALL_TAGS]
    if model.implementation is ModelImpl.TRANSFORMERS:
        return [Unreleasable("weights", "a model by transformers' own class (--model-impl) keeps its weights")]
    return []


class Occupation:
    """Obeys ``ReleaseMemory`` and ``ResumeMemory``, in the thread that computes."""

    def __init__(self, model: ModelRunner, steps: StepRunner, prefault: PoolPrefault) -> None:
        self._model = model
        self._steps = steps
        self._prefault = prefault
        self._released: set[MemoryTag] = set()

    def obey(self, command: MemoryCommand) -> MemoryChanged:
        """Do as told; nothing has changed where the answer has an error."""
        begin, used, error = time.monotonic(), self._model.hardware.used(), ""
        if isinstance(command, ReleaseMemory):
            for tag in command.tags:
                self._release(tag)
        else:
            error = self._resume(command.tags)
        self._give_back()
        seconds, nbytes = time.monotonic() - begin, abs(self._model.hardware.used() - used)
        what = "could not have" if error else "gave back" if isinstance(command, ReleaseMemory) else "has again"
        log.info("%s %s: %.2f GiB in %.2f s %s", what, ", ".join(command.tags), nbytes / GIB, seconds, error)
        return MemoryChanged(self.released, nbytes, seconds, error)

    @property
    def released(self) -> list[MemoryTag]:
        """What is not there now."""
        return [tag for tag in ALL_TAGS if tag in self._released]

    def _release(self, tag: MemoryTag) -> None:
        model = self._model
        # Graphs know the addresses of both.
        self._steps.drop_graphs()
        if tag == "weights":
            model.drop_weights()
            self._steps.use_engine()
        else:
            self._prefault.forget()
            for region in (model.kv_region, model.window_region):
                if region is not None:
                    region.give_back()
            if model.device.type != "cpu":
                for pool in model.pools:
                    pool.data.untyped_storage().resize_(0)
        self._released.add(tag)

    def _resume(self, tags: list[MemoryTag]) -> str:
        taken: list[MemoryTag] = []
        try:
            self._check_room(tags)
            for tag in tags:
                self._take(tag)
                taken.append(tag)
                self._released.discard(tag)
            if not self._released:
                self._steps.capture_graphs()
        except (ModelError, TransferError, OSError, MemoryError, torch.OutOfMemoryError) as e:
            # All or nothing: half of it would be held for nobody.
            for tag in taken:
                self._release(tag)
            return str(e) or type(e).__name__
        return ""

    def _take(self, tag: MemoryTag) -> None:
        model = self._model
        if tag == "weights":
            model.take_weights()
            self._steps.use_engine()
            return
        if model.device.type != "cpu":
            try:
                for pool in model.pools:
                    pool.data.untyped_storage().resize_(pool.data.nbytes)
                    pool.data.zero_()
            except BaseException:
                self._release(tag)
                raise
        self._prefault.again()

    def _check_room(self, tags: list[MemoryTag]) -> None:
        """All at once: a host's pool is reserved, and taken later."""
        model = self._model
        pool_bytes = sum(pool.data.nbytes for pool in model.pools)
        needed = sum(model.weight_bytes if tag == "weights" else pool_bytes for tag in tags)
        free = model.hardware.memory().free
        if needed > free:
            raise NotEnoughMemory(
                f"{' and '.join(tags)} take {needed / GIB:.2f} GiB, but {free / GIB:.2f} GiB are free; free memory and "
                "ask again"
            )

    def _give_back(self) -> None:
        # What was frozen at the start is not collected while it is.
        gc.unfreeze()
        freeze()
        self._model.hardware.give_back()
