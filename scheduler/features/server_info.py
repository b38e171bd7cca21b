"""The scheduler's part of ``/server_info``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from ...messages.control import ServerInfo, ServerInfoReq
from ..feature import Feature
from ..handlers import answers
from ..scheduler import Scheduler
from .idle_check import IdleCheck, InvariantResult

MASK = "***"
CREDENTIALS = re.compile(r"(?<=://)[^/@\s]*@")


class ServerInfoFeature(Feature):
    """Describes the scheduler and ``features``."""

    def __init__(self, scheduler: Scheduler, epoch: str, idle_check: IdleCheck, features: Sequence[Feature]) -> None:
        self._scheduler = scheduler
        self._epoch = epoch
        self._idle_check = idle_check
        self._features = features

    @answers(ServerInfoReq)
    def report(self, question: ServerInfoReq, now: float) -> ServerInfo:
        """Return the instance's state for ``/server_info``, with the fields of all features.

        If the instance is idle, its invariants are checked first.
        """
        info = server_info(self._scheduler, self._epoch, self._idle_check.newest())
        for feature in self._features:
            for name, value in feature.status(now).items():
                # A field that is there already keeps its position.
                info[name] = info[name] | value if isinstance(info.get(name), dict) else value
        return ServerInfo(info)


def server_info(scheduler: Scheduler, epoch: str, verdict: InvariantResult) -> dict[str, Any]:
    """Return the instance's state, JSON-ready: pools (tokens), queues (requests), counters since the start and options.

    ``verdict``: result of the last check of the invariants. Features set some of the fields that are None here.
    """
    worker, counters = scheduler.worker, scheduler.counters
    states = Counter(str(r.state) for r in scheduler.reqs.values())
    itl = scheduler.planner.budget.itl
    return {
        "status": "draining" if scheduler.draining else "ready",
        "epoch": epoch,
        "role": scheduler.role,
        "model": scheduler.options.model_name,
        "revision": scheduler.options.revision,
        "fingerprint": worker.fingerprint,
        "context_length": worker.context_length,
        "vocab_size": worker.vocab_size,
        "device": worker.device,
        "weights_dtype": worker.weights_dtype,
        "attention_backend": worker.attention_backend,
        "kv_layout": msgspec.to_builtins(worker.layout),
        "machine": msgspec.to_builtins(worker.machine),
        "memory": msgspec.to_builtins(worker.memory),
        "pool": scheduler.memory.pool.usage(),
        "tiers": None,
        "kv_debug": None,
        "invariants": verdict.text,
        "invariants_steps_ago": counters.steps - verdict.step if verdict.step >= 0 else None,
        "requests": {"total": len(scheduler.reqs), **dict(states)},
        "queues": {"waiting": len(scheduler.planner.waiting), "running": len(scheduler.planner.running)},
        "retractions": scheduler.planner.retraction.count,
        "preemptions": scheduler.planner.retraction.preemptions,
        "followers": scheduler.planner.shared_prompts.set_aside,
        "queue_seconds": round(scheduler.estimator.queue_seconds(len(scheduler.planner.waiting), scheduler.now), 3),
        "counters": counters.info() | {"cached_tokens": scheduler.planner.cached_tokens},
        "cost_model": _cost_model(scheduler),
        "itl_budget": itl.info() if itl is not None else None,
        "disaggregation": None,
        "load_seconds": worker.load_seconds,
        "options": {name: _masked(name, value) for name, value in msgspec.to_builtins(scheduler.options).items()},
    }


def _masked(name: str, value: Any) -> Any:
    """Return an option's value without secrets: an API key is masked, and so is the user part of a URL."""
    if name == "api_key" and value:
        return MASK
    return CREDENTIALS.sub(f"{MASK}@", value) if isinstance(value, str) else value


def _cost_model(scheduler: Scheduler) -> dict[str, Any]:
    decodes = scheduler.planner.decodes_now()
    model = scheduler.estimator.model
    estimate = {
        "decodes": decodes.decodes,
        "kv_tokens": decodes.kv_tokens,
        "estimate_ms": round(model.estimate(decodes), 4) if decodes.decodes else None,
    }
    return model.info() | {"decode_step": estimate}
