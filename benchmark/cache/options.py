"""The options of ``pdserve bench cache``, declared once; the command line and YAML files read them here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ...mem_cache.eviction_policies import EvictionPolicyName
from ..errors import BenchOptionsError


@dataclass(frozen=True, kw_only=True)
class CacheBenchOptions:
    """Options of ``pdserve bench cache``.

    Parameters
    ----------
    page_size
        Tokens of a KV page.
    cached_tokens
        Size of the tree.
    prompt_tokens
        Length of the prompts that are looked up.
    path_nodes
        Nodes of the tree that such a prompt goes through.
    queued
        Requests that wait in the order of longest cached prefix.
    decoding
        Requests that get a slot each in one step.
    evicted_tokens
        How much is evicted at once.
    rounds
        How often everything is measured, the contestants taking turns; the medians are shown.
    vllm_python
        Interpreter of an environment with vLLM. Its prefix cache is compared with pdserve's. Example:
        .bench/vllm/bin/python of the peer comparison.
    sglang_python
        Interpreter of an environment with SGLang (pip install torch numpy; pip install --no-deps sglang). Its
        RadixCache and allocator are compared with pdserve's.
    trace
        A trace in Mooncake's format. Instead of all this, it is sent through the scheduler in virtual time, and hit
        rates are printed by policy and size of the pool.
    num_requests
        Requests to take from the start of the trace; default: all.
    length_scale
        Factor for the lengths of the trace, in steps of 1/512. At 1/32 a block of the trace is a page of 16 tokens.
    policies
        Eviction policies to compare on the trace.
    pool_share
        Sizes of the pool, as shares of all different tokens in the trace's prompts.
    plot
        File for a picture of the hit rates (.svg or .png). Needs matplotlib.
    output_json
        File for the results.
    """

    page_size: int = 16
    cached_tokens: int = 1_000_000
    prompt_tokens: int = 32768
    path_nodes: int = 64
    queued: int = 10_000
    decoding: int = 256
    evicted_tokens: int = 100_000
    rounds: int = 3
    vllm_python: Path | None = None
    sglang_python: Path | None = None
    trace: Path | None = None
    num_requests: int | None = None
    length_scale: float = 1 / 32
    policies: list[EvictionPolicyName] = field(default_factory=lambda: ["lru", "lfu", "fifo", "mru", "slru"])
    pool_share: list[float] = field(default_factory=lambda: [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0])
    plot: Path | None = None
    output_json: Path | None = None

    def check(self) -> None:
        """Raise ``BenchOptionsError`` when these options can't work."""
        for name in ("page_size", "path_nodes", "queued", "decoding", "evicted_tokens", "rounds"):
            if getattr(self, name) < 1:
                raise BenchOptionsError(f"--{name.replace('_', '-')} must be 1 or more")
        run = self.prompt_tokens // self.path_nodes
        if run < self.page_size or run % self.page_size or self.prompt_tokens % self.path_nodes:
            raise BenchOptionsError("--prompt-tokens must be --path-nodes times a whole number of pages")
        if self.cached_tokens < 4 * self.prompt_tokens or self.evicted_tokens > self.cached_tokens // 2:
            raise BenchOptionsError("--cached-tokens must be 4 prompts or more, and twice --evicted-tokens")
        if not self.policies or not self.pool_share or not all(share > 0 for share in self.pool_share):
            raise BenchOptionsError("--policies and --pool-share take one value or more, shares above 0")
        if not 0 < self.length_scale <= 1:
            raise BenchOptionsError("--length-scale must be above 0 and at most 1")
        if self.plot is not None and self.trace is None:
            raise BenchOptionsError("--plot draws hit rates: name a --trace")
