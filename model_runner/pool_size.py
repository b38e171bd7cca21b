"""How many tokens the KV pool holds."""

from __future__ import annotations

from typing import NamedTuple

from ..runtime.machine.memory import Memory
from .errors import NotEnoughMemory

DEFAULT_FRACTION = {"cuda": 0.88, "cpu": 0.3}
GIB = 2**30
# Of what is free on a host, this much stays for activations, the other processes and everyone else.
HOST_RESERVE = 0.1


class PoolRequest(NamedTuple):
    """What the options ask for; ``most_tokens`` is what all running requests could ever fill."""

    max_total_tokens: int | None
    mem_fraction_static: float | None
    page_size: int
    most_tokens: int


def choose_max_total_tokens(
    request: PoolRequest, page_bytes: int, weight_bytes: int, memory: Memory, device_type: str
) -> int:
    """Slots to hand out, a multiple of the page size; ``memory`` is the device's, with the weights loaded.

    Raises ``NotEnoughMemory`` where not a page fits, or where ``max_total_tokens`` asks for more than is free.
    """
    page_size = request.page_size
    if request.max_total_tokens is not None:
        pages = request.max_total_tokens // page_size
        if pages < 1:
            raise NotEnoughMemory(
                f"--max-total-tokens {request.max_total_tokens} is less than a page ({page_size} tokens)"
            )
        if (pages + 1) * page_bytes > memory.free:
            raise NotEnoughMemory(
                f"--max-total-tokens {request.max_total_tokens} takes {(pages + 1) * page_bytes / GIB:.2f} GiB, but "
                f"{memory.free / GIB:.2f} GiB are free; choose at most {(memory.free // page_bytes - 1) * page_size}"
            )
        return pages * page_size
    fraction = DEFAULT_FRACTION[device_type] if request.mem_fraction_static is None else request.mem_fraction_static
    budget = _budget(fraction, weight_bytes, memory, device_type)
    # Page 0 takes its share, too.
    pages = min(budget // page_bytes - 1, -(-request.most_tokens // page_size))
    if pages < 1:
        raise NotEnoughMemory(
            f"--mem-fraction-static {fraction} of {memory.total / GIB:.2f} GiB leaves no room for a KV pool beside "
            f"{weight_bytes / GIB:.2f} GiB of weights ({memory.free / GIB:.2f} GiB are free); raise it, free memory, "
            "or set --max-total-tokens"
        )
    return pages * page_size


def _budget(fraction: float, weight_bytes: int, memory: Memory, device_type: str) -> int:
    """Bytes for the pool.

    An accelerator is ours alone: whatever is in use beyond our share of it comes off the pool. A host is shared, and
    what others use there is none of our share, as long as the pool fits into what they leave.
    """
    if device_type != "cpu":
        return int(memory.free - memory.total * (1 - fraction))
    return int(min(memory.total * fraction - weight_bytes, memory.free * (1 - HOST_RESERVE)))
