"""The processes of an instance, and the module that each runs.

There are only names here: the supervisor starts modules and imports none of them.
"""

from __future__ import annotations

from ..runtime.ranks import WORKER, places
from .options import ServerOptions


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
