"""Table of a worker's memory, logged once after its start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...messages.memory import MemoryUse
from ...messages.worker import KVLayout

if TYPE_CHECKING:
    from .loaded import LoadedModel

GIB, KIB = 2**30, 2**10


def memory_use(model: LoadedModel, host_tier: int) -> MemoryUse:
    """Return how many bytes weights, pools and the rest take of the device. Call this after the model's first steps.

    ``host_tier``: bytes of the second KV tier, 0 without one.
    """
    memory, used, sizes = model.device.memory(), model.device.used(), model.pools
    pools = [pool.nbytes for pool in sizes.by_group]
    # What the first may grow by takes no memory before it does.
    pools[0] -= (sizes.limit_tokens - sizes.max_total_tokens) // sizes.page_size * sizes.layout.groups[0].page_bytes
    # A CPU's pools are only reserved yet.
    taken = model.weight_bytes + (0 if model.device.kind == "cpu" else sum(pools))
    return MemoryUse(
        weights=model.weight_bytes,
        kv_pool=pools[0],
        window_pool=sum(pools[1:]),
        host_tier=host_tier,
        rest=max(0, used - taken),
        total=memory.total,
        free=memory.free,
        tokens=sizes.max_total_tokens,
        limit_tokens=sizes.limit_tokens,
        window_tokens=sizes.max_window_tokens,
        full_requests=full_requests(
            sizes.layout, model.context_length, sizes.max_total_tokens, sizes.max_window_tokens
        ),
    )


def describe_weights(model: LoadedModel) -> str:
    """Describe the weights for the log in a few words: type, quantisation and attention backend."""
    rounded = "" if model.quantization == "none" else f", {model.quantization}"
    if model.quantized_activations is not None:
        rounded += f" times {model.quantized_activations} activations"
    return f"{model.dtype}{rounded}, for attention backend {model.engine.attention_backend}"


def full_requests(layout: KVLayout, context_length: int, tokens: int, window_tokens: int) -> float:
    """Return how many requests of ``context_length`` tokens fit into the KV pools at once, as a fraction.

    ``tokens``, ``window_tokens``: size of the pool that keeps all tokens and of the pool of layers with a window. The
    latter keeps only the last window of each request.
    """
    size, group = layout.page_size, layout.window_group
    fit = tokens / (-(-context_length // size) * size)
    if group is None:
        return fit
    # A window begins anywhere in a page.
    pages = -(-(min(group.window, context_length) - 1) // size) + 1
    return min(fit, window_tokens / (pages * size))


def table(use: MemoryUse, layout: KVLayout, context_length: int, weights: str) -> list[str]:
    """Return the lines of the memory table for the log, in GiB. ``weights``: text that describes the weights."""
    where = f"{use.tokens} tokens of {layout.groups[0].page_bytes / layout.page_size / KIB:.4g} KiB"
    limit = f", up to {use.limit_tokens} of them" if use.limit_tokens > use.tokens else ""
    rows = [
        ("weights", use.weights, weights),
        ("KV pool", use.kv_pool, f"{where}, in pages of {layout.page_size}{limit}"),
    ]
    group = layout.window_group
    if group is not None:
        text = f"{use.window_tokens} tokens of {group.num_layers} layers that see {group.window}"
        rows.append(("windows", use.window_pool, text))
    if use.host_tier:
        rows.append(("host tier", use.host_tier, "reserved, and taken as it is used"))
    rows.append(("rest", use.rest, "libraries, activations, tables"))
    rows.append(("free", use.free, f"of {use.total / GIB:.2f} GiB"))
    width = max(len(name) for name, _, _ in rows)
    lines = [f"{name:{width}}  {nbytes / GIB:7.2f} GiB  {text}" for name, nbytes, text in rows]
    return [*lines, f"requests of the whole context ({context_length} tokens) at a time: {use.full_requests:.1f}"]
