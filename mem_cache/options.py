"""Options of KV memory: the pool, the prefix cache, and its events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from ..runtime.options import opt, section
from .eviction_policies import EvictionPolicyName

MAX_PAGE_SIZE = 1024
MAX_SLOTS = 1 << 31
"""Slots are numbered in 32 bits; those of page 0 count."""


@section("KV memory", order=40)
@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Options of the KV pool and of the prefix cache."""

    page_size: int = opt(default=16, help="Tokens in a KV page; a power of two.")
    max_total_tokens: int | None = opt(
        default=None,
        help="Size of the KV pool in tokens. Default: from --mem-fraction-static.",
    )
    max_total_tokens_limit: int | None = opt(
        default=None,
        help=(
            "CPU only: maximum size in tokens to which POST /kv/resize may grow the KV pool. Address space is "
            "reserved at start; memory is taken when used. Default: the size at start."
        ),
    )
    mem_fraction_static: float | None = opt(
        default=None,
        help=(
            "Share of device memory for weights and KV pool. Default: 0.88 on cuda, where the pool is smaller if steps "
            "need more than the rest. On cpu: 0.3 of the memory that control groups allow, for the KV pool alone. "
            "That pool takes at most nine tenths of what is free beside the weights."
        ),
    )
    mem_instances: int = opt(
        default=1,
        help=(
            "CPU only: number of instances that share the host's memory. Without --mem-fraction-static, each takes its "
            "part of the default for its KV pool. pdserve up sets it."
        ),
        at_least=1,
    )
    swa_full_tokens_ratio: float | None = opt(
        default=None,
        help=(
            "Models with sliding windows: tokens kept by window layers, as a share of the tokens kept by other "
            "layers. Higher suits many short requests, lower a few long ones. Default: the window's share of a "
            "request that is four windows long."
        ),
    )
    disable_radix_cache: bool = opt(default=False, help="Do not keep prefixes of finished requests.")
    radix_eviction_policy: EvictionPolicyName = opt(
        default="lru",
        help=(
            "Order in which cached prefixes are evicted: lru (least recently used), lfu (least often found), fifo "
            '(oldest), mru (most recently used), priority (lowest request "priority"), slru (never found again, '
            "then found again). Ties: least recently used."
        ),
    )
    kv_debug: bool = opt(
        default=False,
        help=(
            "Hash keys and values of each page by layer when it is computed, transferred, restored and reused, and "
            "report differences. For debugging; takes time."
        ),
    )

    def problems(self) -> Iterator[str]:
        """Yield a complaint for each wrong option of KV memory, with its value and what to do."""
        page_size = self.page_size
        if not 1 <= page_size <= MAX_PAGE_SIZE or page_size & (page_size - 1):
            yield f"--page-size is {page_size}: it must be a power of two, 1 to {MAX_PAGE_SIZE}"
        if self.max_total_tokens is not None and self.max_total_tokens < max(page_size, 1):
            yield f"--max-total-tokens is {self.max_total_tokens}: the pool must hold at least one page ({page_size})"
        limit = self.max_total_tokens_limit
        if limit is not None and limit < max(self.max_total_tokens or 0, page_size):
            yield f"--max-total-tokens-limit is {limit}: what the pool may grow to is no less than what it begins with"
        if limit is not None and limit > MAX_SLOTS - page_size:
            yield f"--max-total-tokens-limit is {limit}: a pool has at most {MAX_SLOTS - page_size} tokens"
        fraction = self.mem_fraction_static
        if fraction is not None and not 0 < fraction < 1:
            yield f"--mem-fraction-static is {fraction}: it is a share of the memory, between 0 and 1"
        ratio = self.swa_full_tokens_ratio
        if ratio is not None and not 0 < ratio <= 1:
            yield f"--swa-full-tokens-ratio is {ratio}: it is a share of the tokens, above 0 and at most 1"


@section("KV events", order=60)
@dataclass(frozen=True, kw_only=True)
class KVEventOptions(CacheOptions):
    """Options of the events that followers of the prefix cache read."""

    kv_events_endpoint: str | None = opt(
        default=None,
        help=(
            "ZMQ address at which prefix cache events are published in vLLM's format, such as tcp://127.0.0.1:5557. "
            "Clients of this address read the token ids of all prompts."
        ),
    )
    kv_events_replay_endpoint: str | None = opt(
        default=None,
        help="ZMQ address at which consumers ask for missed events, such as tcp://127.0.0.1:5558.",
    )
    kv_events_topic: str = opt(default="", help="Topic of published events.")
    kv_events_buffer: int = opt(default=10_000, help="Newest event batches kept for replay.")

    def problems(self) -> Iterator[str]:
        """Yield a complaint for each wrong option of KV events, with its value and what to do."""
        addresses = self.kv_events_endpoint, self.kv_events_replay_endpoint
        for name, address in zip(("--kv-events-endpoint", "--kv-events-replay-endpoint"), addresses, strict=True):
            if address is not None and not _is_address(address):
                yield f"{name} {address}: write it like tcp://127.0.0.1:5557, an address of this host"
        if self.kv_events_replay_endpoint is not None and self.kv_events_endpoint is None:
            yield "--kv-events-replay-endpoint replays what is published: add --kv-events-endpoint"
        if self.kv_events_endpoint is not None and self.disable_radix_cache:
            yield "--kv-events-endpoint tells of cached prefixes, --disable-radix-cache has none: drop one of the two"
        if self.kv_events_buffer < 1:
            yield f"--kv-events-buffer is {self.kv_events_buffer}: it must be 1 or more"


def _is_address(address: str) -> bool:
    try:
        url = urlsplit(address)
        return (url.scheme == "tcp" and url.port is not None and bool(url.hostname)) or url.scheme == "ipc"
    except ValueError:
        return False
