"""An instance without processes: the real scheduler and the real worker, in one thread."""

from __future__ import annotations

from pathlib import Path

from pdserve.messages.worker import WorkerReady
from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.steps.step_runner import StepRunner
from pdserve.scheduler.scheduler import Scheduler

from .sim import SimInstance, make_options

PAGE = 4


class ServedModel(SimInstance):
    """An instance in one thread with the real worker."""

    def __init__(self, folder: Path, **changes: object) -> None:
        defaults = {"model_path": str(folder), "page_size": PAGE, "max_total_tokens": 768, "dtype": "float32"}
        defaults |= {"device": "cpu", "chunked_prefill_size": 32, "max_running_requests": 4}
        self.options = options = make_options(**(defaults | changes))
        super().__init__(options)
        self.runner = runner = load_model(options)
        ready = WorkerReady(
            fingerprint=runner.fingerprint,
            vocab_size=runner.vocab_size,
            context_length=runner.context_length,
            max_total_tokens=runner.pools.max_total_tokens,
            layout=runner.pools.layout,
            device="cpu",
            attention_backend=runner.engine.attention_backend,
            weights_dtype="float32",
            backend_metadata=b"",
            load_seconds={},
            max_window_tokens=runner.pools.max_window_tokens,
        )
        self.scheduler = Scheduler(options, ready, self.outbox)
        self.worker = StepRunner(runner, options.max_running_requests)
