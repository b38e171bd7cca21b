"""The processes of an instance, and the module that each runs.

There are only names here: the supervisor starts modules and imports none of them.
"""

from __future__ import annotations

from ..runtime.ranks import WORKER, places
from ..runtime.web.apis import PATHS
from .options import ServerOptions

LATER_MODULES = (
    "pdserve.model_runner.engines.load",
    "pdserve.model_runner.engines.cpu",
    "pdserve.model_runner.engines.memory_table",
    "pdserve.model_runner.steps.make_executor",
    "pdserve.model_runner.steps.measure_steps",
    "pdserve.model_runner.steps.step_queue",
    "pdserve.model_runner.steps.warm_up",
    "pdserve.model_runner.kv.pool_hasher",
    "pdserve.model_runner.profiler",
    "pdserve.model_files.gguf_reader",
    *dict.fromkeys(f"pdserve.server.http.{facts.module}" for facts in PATHS if facts.module),
    "uvicorn.lifespan.on",
)
"""What most processes import in the course of their start, after their own module. None of it imports torch."""


def process_modules(options: ServerOptions) -> dict[str, str]:
    """Return the modules of an instance's processes on this host, by process name, in the order of their start.

    Only the first host of an instance has processes beside the model workers.
    """
    lead = "pdserve.disaggregation.transfer.process" if options.hands_over else "pdserve.model_runner.process"
    workers = {name: lead if name == WORKER else "pdserve.model_runner.rank_process" for name in places(options)}
    if options.node_rank:
        # The first host has everything that requests go through.
        return workers
    modules = {
        **workers,
        "tokenizer": "pdserve.server.tokenizer_process",
        "scheduler": "pdserve.disaggregation.handover.process" if options.hands_over else "pdserve.scheduler.process",
        "detokenizer": "pdserve.detokenizer.process",
        "http": "pdserve.server.http_process",
    }
    if options.hands_over:
        modules["bootstrap"] = "pdserve.disaggregation.bootstrap.server"
    return modules


def shared_modules(options: ServerOptions) -> tuple[str, ...]:
    """Return what a fork server is to import for an instance's processes on this host."""
    return (*process_modules(options).values(), *LATER_MODULES)
