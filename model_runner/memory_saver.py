"""Memory that this worker can release and resume: the KV pool and the weights.

A pool on the host keeps its addresses. Its pages are given to the system, and come back as zeros when they are touched
again. So views, engines and registered regions do not change. On an accelerator the storage of the tensors is freed and
allocated again, with new addresses, and graphs are captured again. Weights are dropped with everything that computes by
them, and loaded again from their source. Weights that differ from before are refused (``Engine.take_weights``).

The scheduler makes sure that nothing computes, reads or writes the memory meanwhile
(``scheduler/features/memory_saver.py``).
"""

from __future__ import annotations

import gc
import logging
import time
from typing import TYPE_CHECKING

from ..mem_cache.kv_pages.region import RegionError
from ..messages.memory import (
    ALL_TAGS,
    MemoryChanged,
    MemoryCommand,
    MemoryTag,
    PoolTrimmed,
    ReleaseMemory,
    ResumeMemory,
    TrimPool,
    Unreleasable,
)
from ..model_files.errors import ModelError
from ..model_files.model_impl import ModelImpl
from .errors import NotEnoughMemory
from .options import WorkerOptions
from .start_model import freeze

if TYPE_CHECKING:
    from .engines.loaded import LoadedModel
    from .kv.prefault import PoolPrefault
    from .ranks.other_ranks import OtherRanks
    from .steps.step_runner import StepRunner

log = logging.getLogger(__name__)
GIB = 2**30


def unreleasable(model: LoadedModel, options: WorkerOptions) -> list[Unreleasable]:
    """Return the memory that ``ReleaseMemory`` must not ask for, with the reasons; empty: all can be released."""
    if options.nnodes > 1:
        text = "ranks on several hosts (--nnodes) keep their memory"
        return [Unreleasable(tag, text) for tag in ALL_TAGS]
    if model.implementation is ModelImpl.TRANSFORMERS:
        return [Unreleasable("weights", "a model by transformers' own class (--model-impl) keeps its weights")]
    return []


class WorkerMemorySaver:
    """Obeys ``ReleaseMemory`` and ``ResumeMemory``, in the thread that computes."""

    def __init__(self, model: LoadedModel, steps: StepRunner, prefault: PoolPrefault, others: OtherRanks) -> None:
        """Prepare to release the memory of ``model``, and to have ``others``, the ranks led by this one, do so."""
        self._model = model
        self._others = others
        self._steps = steps
        self._prefault = prefault
        self._released: set[MemoryTag] = set()
        self._window_regions = [region for region in model.pools.regions[1:] if region is not None]
        self._window_bytes = sum(region.nbytes for region in self._window_regions)
        """Bytes of the window pool that are used."""

    def obey(self, command: MemoryCommand) -> MemoryChanged:
        """Release or resume the memory that ``command`` names, on all ranks, and return which memory is released now.

        A failure is told in the answer. If some memory can't be resumed, all that ``command`` names stays released. A
        release counts as done even if the system does not take the memory back.
        """
        begin, used, error = time.monotonic(), self._model.device.used(), ""
        if isinstance(command, ReleaseMemory):
            error = self._release_all(command.tags)
        else:
            error = self._resume_all(command.tags)
        self._give_back()
        seconds, nbytes = time.monotonic() - begin, abs(self._model.device.used() - used)
        what = "given back" if isinstance(command, ReleaseMemory) else "taken again"
        text = f"{', '.join(command.tags)} {what}: {nbytes / GIB:.2f} GiB in {seconds:.2f} s"
        log.warning("not %s: %s", text, error) if error else log.info("%s", text)
        return MemoryChanged(self.released, nbytes, seconds, error)

    def _release_all(self, tags: list[MemoryTag]) -> str:
        # They first: until they know of it they may commit what they share with this one.
        self._others.tell(ReleaseMemory(tags))
        errors = self._others.answers()
        return self._release_here(tags) or (errors[0] if errors else "")

    def _release_here(self, tags: list[MemoryTag]) -> str:
        """Release the memory of all ``tags`` in this process, and return the first failure; "" if there is none."""
        errors = []
        for tag in tags:
            try:
                self._release(tag)
            except RegionError as e:
                errors.append(str(e))
        return errors[0] if errors else ""

    def _resume_all(self, tags: list[MemoryTag]) -> str:
        if not self._others.numbers:
            return self._resume(tags)
        # All load at the same time.
        self._others.tell(ResumeMemory(tags))
        error = self._resume(tags)
        errors = self._others.answers()
        if error or errors:
            # Ranks that have it release it again; for the others this changes nothing.
            self._release_all(tags)
        elif not self._released:
            # All at the same time. What failed on one would leave the others waiting: it ends the instance.
            self._steps.capture_graphs()
        return error or (errors[0] if errors else "")

    def trim(self, command: TrimPool) -> PoolTrimmed:
        """Give the memory of unused pages at the pools' ends back to the system, on all ranks; return the bytes freed.

        Pages from ``command.first`` on (``first_window`` in the window pool) are unused. Used again, they are zeros. A
        failure is told in the answer.
        """
        model, used, error = self._model, self._model.device.used(), ""
        # They first: until they know of it they may commit what they share with this one.
        self._others.tell(command)
        self._others.answers()
        groups = model.pools.layout.groups
        try:
            if (region := model.pools.region) is not None:
                end = min(command.first * groups[0].page_bytes, region.nbytes)
                self._prefault.trim(end)
                region.give_back(end)
            for region in self._window_regions:
                self._window_bytes = min(command.first_window * groups[1].page_bytes, region.nbytes)
                region.give_back(self._window_bytes)
        except RegionError as e:
            error = str(e)
            log.warning("%s", error)
        return PoolTrimmed(max(0, used - model.device.used()), error)

    @property
    def released(self) -> list[MemoryTag]:
        """Tags of the memory that is released now, in the order of ``ALL_TAGS``."""
        return [tag for tag in ALL_TAGS if tag in self._released]

    def _release(self, tag: MemoryTag) -> None:
        model = self._model
        self._released.add(tag)
        # Graphs know the addresses of both.
        self._steps.drop_graphs()
        if tag == "weights":
            model.engine.drop_weights()
            self._steps.use_weights()
            return
        self._prefault.forget()
        for region in model.pools.regions:
            if region is not None:
                region.give_back()
        if model.device.kind != "cpu":
            for pool in model.pools.tensors:
                pool.data.untyped_storage().resize_(0)

    def _resume(self, tags: list[MemoryTag]) -> str:
        taken: list[MemoryTag] = []
        errors: tuple[type[Exception], ...] = (ModelError, RegionError, OSError, *self._model.device.memory_errors)
        try:
            self._check_room(tags)
            for tag in tags:
                # Before it is taken: whatever fails, no part of it is kept.
                taken.append(tag)
                self._take(tag)
                self._released.discard(tag)
            if not self._released and not self._others.numbers:
                self._steps.capture_graphs()
        except errors as e:
            # All or nothing: a part of the memory would be taken without any use.
            failure = self._release_here(taken)
            return "; ".join(filter(None, (str(e) or type(e).__name__, failure)))
        return ""

    def _take(self, tag: MemoryTag) -> None:
        model = self._model
        if tag == "weights":
            model.engine.take_weights()
            self._steps.use_weights()
            return
        if model.device.kind != "cpu":
            for pool in model.pools.tensors:
                pool.data.untyped_storage().resize_(pool.data.nbytes)
                pool.data.zero_()
        self._prefault.again()

    def _check_room(self, tags: list[MemoryTag]) -> None:
        """Raise ``NotEnoughMemory`` if the memory of all ``tags`` together exceeds what is free.

        Without this check a host's pool could always be resumed, as its memory is only reserved. Steps would then run
        out of memory later.
        """
        model = self._model
        # What a smaller pool (/kv/resize) does without is not taken again.
        pool_bytes = sum(pool.nbytes for pool in model.pools.by_group) - self._prefault.trimmed
        pool_bytes -= sum(region.nbytes for region in self._window_regions) - self._window_bytes
        # On a host they take theirs from one memory, on devices each from its own.
        ranks = 1 if model.device.beside else len(self._others.numbers) + 1
        needed = sum(model.weight_bytes * ranks if tag == "weights" else pool_bytes for tag in tags)
        free = model.device.memory().free
        if needed > free:
            raise NotEnoughMemory(
                f"{' and '.join(tags)} take {needed / GIB:.2f} GiB, but {free / GIB:.2f} GiB are free; free memory and "
                "ask again"
            )

    def _give_back(self) -> None:
        # What was frozen at the start is not collected while it is.
        gc.unfreeze()
        freeze()
        self._model.device.give_back()
