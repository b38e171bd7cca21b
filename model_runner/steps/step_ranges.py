"""Names for what a step does (``--enable-nvtx``): NVTX ranges for Nsight, and the same names in PyTorch's profiles.

A range of the host's calls spans a step's launch, and in it its phases and each layer:

    step 7: 4 entries, 4 tokens      launch
        prepare                      plan, arrays to the device
        forward                      the pass; a graph's replay is "replay 8", and shows no layers
            layer 0, layer 1, …
        sample                       tokens
        logprobs                     log-probabilities, where any are wanted
        copy                         copies to the host are started
    wait                             collect: the host waits for the copies

Without the option there is none of this: classes and calls are chosen as the worker starts, and no step asks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

# Takes 0.7 µs, and the public record_function 20 µs, also while nothing records: a pass has a range for each layer.
from torch._C._profiler import _RecordFunctionFast as record_function

from ...messages.worker import ForwardStep
from ...runtime.layers_done import NOT_COUNTED, PassProgress
from ..models.decoder import LayerForward
from .step_runner import Launched, StepRunner

log = logging.getLogger(__name__)

S = TypeVar("S", bound=StepRunner)


def make_range(name: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager that marks the work launched within it as ``name`` in profiles.

    It is an NVTX range and a PyTorch range on CUDA, and a PyTorch range alone on other devices.
    """
    return _nvtx_range(name) if device.type == "cuda" else record_function(name)


@contextmanager
def _nvtx_range(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        with record_function(name):
            yield
    finally:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def name_layers(device: torch.device) -> Callable[[int, LayerForward], LayerForward]:
    """Return a wrapper for ``Decoder.wrap_layers`` that runs each layer's ``forward`` in a profiler range "layer N".

    Log that Nsight shows nothing if ``device`` is no GPU.
    """
    if device.type != "cuda":
        log.info("--enable-nvtx: without a GPU, ranges show in the traces of POST /start_profile alone")

    def wrap(layer: int, forward: LayerForward) -> LayerForward:
        name = f"layer {layer}"

        def named(*args: Any) -> Tensor:
            with make_range(name, device):
                return forward(*args)

        return named

    return wrap


def with_ranges(kind: type[S]) -> type[S]:
    """Return a subclass of ``kind`` that runs each phase of a step in a profiler range."""
    named: type[S] = type(f"Ranged{kind.__name__}", (_Ranged, kind), {})
    return named


class _Ranged(StepRunner):
    """The phases of ``StepRunner``, each in its range."""

    def _range(self, name: str) -> AbstractContextManager[Any]:
        return make_range(name, self._model.device.torch)

    def launch(self, step: ForwardStep, done: PassProgress = NOT_COUNTED) -> Launched:
        with self._range(step.summary):
            return super().launch(step, done)

    def _prepare(self, step: ForwardStep) -> Any:
        with self._range("prepare"):
            return super()._prepare(step)

    def _compute(self, plan: Any, done: PassProgress, size: int | None) -> Any:
        with self._range("forward" if size is None else f"replay {size}"):
            return super()._compute(plan, done, size)

    def _choose(self, *args: Any) -> Any:
        with self._range("sample"):
            return super()._choose(*args)

    def _listings(self, *args: Any) -> Any:
        with self._range("logprobs"):
            return super()._listings(*args)

    def _fetch(self, *args: Any) -> Any:
        with self._range("copy"):
            return super()._fetch(*args)

    def _wait(self, *args: Any) -> Any:
        with self._range("wait"):
            return super()._wait(*args)
