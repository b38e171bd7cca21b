"""How many tokens the KV pools hold.

If layers with a window have a pool of their own, memory is divided so that both pools run out together in typical use.
The measure is the share of a typical request's tokens in its window (``windows_ratio``, or
``--swa-full-tokens-ratio``).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import NamedTuple

from ...messages.worker import KVLayout
from ...model_files.errors import UnsupportedModel
from ...model_files.spec import AttentionSpec, ModelSpec
from ...runtime.machine.memory import Memory
from ..errors import NotEnoughMemory
from ..options import WorkerOptions

DEFAULT_FRACTION = {"cuda": 0.88, "cpu": 0.3}
GIB = 2**30
USUAL_PIECE = {"cuda": 2048, "cpu": 512}
"""Tokens of a prompt that a step computes at most where the options don't say."""
# Of what is free on a host, this much stays for activations, the other processes and everyone else.
HOST_RESERVE = 0.1
CONTEXT_BYTES = 600 << 20
"""What a process takes of a GPU before it allocates: CUDA's context, code of kernels, workspaces of libraries."""
WINDOW_NUMBER_BYTES = 4
ANY_MEMORY = Memory(1 << 62, 1 << 62)
"""Memory of a pool that is only reserved: there are enough addresses."""


class PoolRequest(NamedTuple):
    """What the options ask for; ``most_tokens`` is what all running requests could ever fill.

    ``step_bytes``: what is taken of an accelerator after the pool (``step_memory.py``); 0 on a CPU. ``instances``:
    number of instances that share a host's memory.
    """

    max_total_tokens: int | None
    mem_fraction_static: float | None
    page_size: int
    most_tokens: int
    step_bytes: int = 0
    instances: int = 1


class WindowRequest(NamedTuple):
    """Limits that size the pool of layers with a window.

    ``ratio``: share of the tokens that window pages are made for (None: ``windows_ratio``). ``piece``: tokens of a
    prompt that one step computes. ``most_rows``: requests.
    """

    window: int
    context_length: int
    piece: int
    most_rows: int
    ratio: float | None = None


class PoolTokens(NamedTuple):
    """Slots to hand out: of the pool that keeps all tokens, and of the one behind a window, 0 where there is none."""

    kept: int
    windowed: int


class PoolChoice(NamedTuple):
    """``tokens``: slots to hand out at first, of those that are ``reserved``."""

    tokens: int
    reserved: PoolTokens


def layers_apart(options: WorkerOptions, spec: ModelSpec) -> dict[int, int]:
    """Return the sliding windows in tokens, by number of the layer, of layers that free pages older than their window.

    The result is empty if prompts are never cut, since each then needs all of its pages at once. So it is with a second
    tier that rounds pages, or that gets them later than they are computed, when windows have moved on.
    """
    keeps_whole = options.hicache_write_policy == "write_through" and options.hicache_host_dtype == "auto"
    if options.chunked_prefill_size == -1 or (options.enable_hierarchical_cache and not keeps_whole):
        return {}
    attentions = enumerate(layer.attention for layer in spec.layers)
    windows = ((i, attention.window) for i, attention in attentions if isinstance(attention, AttentionSpec))
    return {layer: window for layer, window in windows if window is not None}


def piece_of(options: WorkerOptions, device_type: str) -> int:
    """Return the maximum tokens of prompts that one step computes, under ``options`` on a device of this type."""
    return min(options.chunked_prefill_size or USUAL_PIECE[device_type], options.max_prefill_tokens)


def windows_ratio(window: int, context_length: int, page_size: int) -> float:
    """Return the share, at most 1, of a typical request's tokens that lies in its window of ``window`` tokens.

    A typical request is as long as four windows. With fewer window pages, many short requests, which never leave their
    first window, would find much less room than in a single pool.
    """
    return min(1.0, (window + page_size) / min(4 * window, context_length))


def choose_pools(
    options: WorkerOptions,
    layout: KVLayout,
    context_length: int,
    weight_bytes: int,
    memory: Memory,
    device_type: str,
    step_bytes: int = 0,
) -> PoolChoice:
    """Return how many slots the KV pools of this layout have at first, and how many are reserved for growth.

    ``memory``: the device's, with ``weight_bytes`` of weights loaded. ``step_bytes``: memory of an accelerator to leave
    free for steps. Raises ``ModelError`` if too little is free, or if options ask a pool on an accelerator to grow.
    """

    def choose(request: PoolRequest, memory: Memory) -> PoolTokens:
        if (group := layout.window_group) is None:
            return PoolTokens(choose_max_total_tokens(request, layout.page_bytes, weight_bytes, memory, device_type), 0)
        piece, ratio = piece_of(options, device_type), options.swa_full_tokens_ratio
        windows = WindowRequest(group.window, context_length, piece, options.max_running_requests, ratio)
        page_bytes = (layout.groups[0].page_bytes, group.page_bytes)
        return choose_pool_tokens(request, windows, page_bytes, weight_bytes, memory, device_type)

    most = options.max_running_requests * (context_length + options.page_size - 1)
    if layout.window_group is not None:
        # Each page has the number of its window page in a table, which is made with the pool.
        step_bytes += most // options.page_size * WINDOW_NUMBER_BYTES
    request = PoolRequest(
        options.max_total_tokens,
        options.mem_fraction_static,
        options.page_size,
        most,
        step_bytes,
        options.mem_instances,
    )
    first = choose(request, memory)
    limit = options.max_total_tokens_limit
    if limit is None or limit < first.kept + options.page_size:
        return PoolChoice(first.kept, first)
    if device_type != "cpu":
        raise UnsupportedModel(f"--max-total-tokens-limit: a pool in {device_type} memory can't grow; leave it out")
    # Addresses, of which as many are used as there is memory for when it comes to that.
    return PoolChoice(first.kept, choose(request._replace(max_total_tokens=limit), ANY_MEMORY))


def choose_pool_tokens(
    request: PoolRequest,
    windows: WindowRequest,
    page_bytes: tuple[int, int],
    weight_bytes: int,
    memory: Memory,
    device_type: str,
) -> PoolTokens:
    """Return the slots of the pool that keeps all tokens, and of the pool of layers with a window.

    Divides what ``choose_max_total_tokens`` would give to one pool. ``page_bytes``: bytes of a page in each pool; the
    first is 0 if all layers have windows. Raises ``NotEnoughMemory``.
    """
    size, (kept_bytes, window_bytes) = request.page_size, page_bytes
    ratio = windows.ratio or windows_ratio(windows.window, windows.context_length, size)
    own_window = -(-(windows.window - 1) // size) + 1
    piece = -(-windows.piece // size)
    enough = 2 * (windows.most_rows * own_window + piece)
    most = -(-request.most_tokens // size)
    if request.max_total_tokens is not None:
        kept = request.max_total_tokens // size
    else:
        # As if a page of both were one, which is more than nothing.
        both = max(1, round(kept_bytes + ratio * window_bytes))
        plain = request._replace(most_tokens=most * size)
        kept = choose_max_total_tokens(plain, both, weight_bytes, memory, device_type) // size

    def windowed_beside(kept: int) -> int:
        return min(max(math.ceil(kept * ratio), own_window + piece), enough, kept)

    def bytes_of(kept: int, windowed: int) -> int:
        return (kept + 1) * kept_bytes + (windowed + 1) * window_bytes

    windowed = windowed_beside(kept)
    if request.max_total_tokens is None:
        # Of what both have, each page 0 too; what one does not need is the other's.
        both_bytes = _budget(request, weight_bytes, memory, device_type) - kept_bytes
        both_bytes -= window_bytes
        if kept_bytes:
            kept = min(most, max(0, both_bytes - windowed * window_bytes) // kept_bytes)
        windowed = min(max(0, both_bytes - kept * kept_bytes) // window_bytes, enough, kept)
    if kept < 1 or windowed < min(own_window, kept):
        raise NotEnoughMemory(
            f"{max(windowed, 0) * size} tokens of KV fit behind windows of {windows.window} tokens: raise "
            "--mem-fraction-static, free memory, or set --max-total-tokens"
        )
    needed, room = bytes_of(kept, windowed), memory.free - request.step_bytes
    if needed > room:
        # As many pages as fit: with one more they would not.
        most = bisect_right(range(kept), room, key=lambda pages: bytes_of(pages, windowed_beside(pages))) - 1
        raise NotEnoughMemory(
            f"--max-total-tokens {kept * size} takes {needed / GIB:.2f} GiB{_beside_steps(request)}, but "
            f"{memory.free / GIB:.2f} GiB are free; choose at most {max(0, most) * size}"
        )
    return PoolTokens(kept * size, windowed * size)


def choose_max_total_tokens(
    request: PoolRequest, page_bytes: int, weight_bytes: int, memory: Memory, device_type: str
) -> int:
    """Return the number of usable slots of the KV pool, without page 0, a multiple of the page size.

    ``memory``: the device's, with the weights loaded. Raises ``NotEnoughMemory`` if not a page fits, or if
    ``max_total_tokens`` asks for more than is free.
    """
    page_size = request.page_size
    if request.max_total_tokens is not None:
        pages = request.max_total_tokens // page_size
        if pages < 1:
            raise NotEnoughMemory(
                f"--max-total-tokens {request.max_total_tokens} is less than a page ({page_size} tokens)"
            )
        room = memory.free - request.step_bytes
        if (pages + 1) * page_bytes > room:
            raise NotEnoughMemory(
                f"--max-total-tokens {request.max_total_tokens} takes {(pages + 1) * page_bytes / GIB:.2f} GiB"
                f"{_beside_steps(request)}, but {memory.free / GIB:.2f} GiB are free; choose at most "
                f"{max(0, room // page_bytes - 1) * page_size}"
            )
        return pages * page_size
    budget = _budget(request, weight_bytes, memory, device_type)
    # Page 0 takes its share, too.
    pages = min(budget // page_bytes - 1, -(-request.most_tokens // page_size))
    if pages < 1:
        if _takes_what_is_free(request, device_type):
            raise NotEnoughMemory(
                f"{memory.free / GIB:.2f} GiB of memory are free beside {weight_bytes / GIB:.2f} GiB of weights, and "
                f"{request.instances} instance(s) share them: no room for a KV pool; free memory, take a smaller "
                "model, or set --max-total-tokens"
            )
        raise NotEnoughMemory(
            f"--mem-fraction-static {_fraction(request, device_type)} of {memory.total / GIB:.2f} GiB leaves no room "
            f"for a KV pool beside {weight_bytes / GIB:.2f} GiB of weights{_beside_steps(request)} "
            f"({memory.free / GIB:.2f} GiB are free); raise it, free memory, or set --max-total-tokens"
        )
    return pages * page_size


def _beside_steps(request: PoolRequest) -> str:
    return f" and {request.step_bytes / GIB:.2f} GiB that steps take" if request.step_bytes else ""


def _fraction(request: PoolRequest, device_type: str) -> float:
    return DEFAULT_FRACTION[device_type] if request.mem_fraction_static is None else request.mem_fraction_static


def _takes_what_is_free(request: PoolRequest, device_type: str) -> bool:
    return device_type == "cpu" and request.mem_fraction_static is None


def _budget(request: PoolRequest, weight_bytes: int, memory: Memory, device_type: str) -> int:
    """Return the bytes that the KV pool may take, page 0 included; below 0 if there is no room.

    A fraction of the device is the instance's share. What other processes use does not count against it, as long as the
    pool fits into what they leave. So the result does not depend on which of several instances on a device starts
    first.

    What steps take comes from the instance's part of the rest. If that is too small, it is deducted from the share.

    Without a given fraction, the default on a host is for the pools alone, beside weights of any size. A share for both
    would refuse every model that is larger than the share.
    """
    fraction = _fraction(request, device_type)
    if _takes_what_is_free(request, device_type):
        return int(min(memory.total * fraction, memory.free * (1 - HOST_RESERVE)) / request.instances)
    if device_type == "cpu":
        return int(min(memory.total * fraction - weight_bytes, memory.free * (1 - HOST_RESERVE)))
    # Of what the default leaves, as much as is this instance's share of the rest.
    default = DEFAULT_FRACTION[device_type]
    rest = memory.total * min(1 - fraction, (1 - default) * fraction / default)
    reserve = max(rest, request.step_bytes)
    share = memory.total * fraction + rest - reserve - weight_bytes - CONTEXT_BYTES
    return int(min(share, memory.free - reserve))
