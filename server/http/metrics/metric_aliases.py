"""Metric names that other servers' dashboards query, with this server's values.

An alias renames one of this server's families, or those of its samples that ``where`` selects. Labels that the other
server doesn't have are summed away; ``keep`` renames one that it has. docs/metrics.md says how close kinds and meanings
are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from prometheus_client.core import Metric

Vocabulary = Literal["none", "vllm", "sglang"]


class Alias(NamedTuple):
    """The name ``theirs`` for the family ``ours``, without the ``_total`` of counters.

    ``where``: a label of ours, and the values of it to count.
    """

    theirs: str
    ours: str
    where: tuple[str, Collection[str]] | None = None
    keep: tuple[str, str] | None = None


THROUGHPUT, HIT_RATE = "throughput", "hit_rate"
"""SGLang's gauges of figures between two scrapes, which pdserve has only as aliases."""
RUNNING = ("state", ("prefilling", "running"))
WAITING = ("state", ("waiting", "bootstrapping", "preallocated", "transferring"))
CACHED = ("source", ("cached",))
ALIASES: Mapping[Vocabulary, tuple[Alias, ...]] = {
    "none": (),
    "vllm": (
        Alias("vllm:num_requests_running", "pdserve_requests", where=RUNNING),
        Alias("vllm:num_requests_waiting", "pdserve_requests", where=WAITING),
        Alias("vllm:kv_cache_usage_perc", "pdserve_kv_pool_usage_ratio"),
        Alias("vllm:prefix_cache_queries", "pdserve_prefix_cache_asked_tokens"),
        Alias("vllm:prefix_cache_hits", "pdserve_prefix_cache_hit_tokens"),
        Alias("vllm:num_preemptions", "pdserve_retractions"),
        Alias("vllm:prompt_tokens", "pdserve_prompt_tokens"),
        Alias("vllm:generation_tokens", "pdserve_generation_tokens"),
        Alias(
            "vllm:request_success",
            "pdserve_requests_finished",
            where=("reason", ("stop", "length", "abort")),
            keep=("reason", "finished_reason"),
        ),
        Alias("vllm:time_to_first_token_seconds", "pdserve_time_to_first_token_seconds"),
        Alias("vllm:inter_token_latency_seconds", "pdserve_inter_token_latency_seconds"),
        Alias("vllm:request_time_per_output_token_seconds", "pdserve_time_per_output_token_seconds"),
        Alias("vllm:e2e_request_latency_seconds", "pdserve_e2e_request_latency_seconds"),
        Alias("vllm:request_queue_time_seconds", "pdserve_request_queue_seconds"),
        Alias("vllm:request_prefill_time_seconds", "pdserve_request_prefill_seconds"),
        Alias("vllm:request_decode_time_seconds", "pdserve_request_decode_seconds"),
        Alias("vllm:request_prompt_tokens", "pdserve_request_prompt_tokens"),
        Alias("vllm:request_generation_tokens", "pdserve_request_generation_tokens"),
        Alias("vllm:request_max_num_generation_tokens", "pdserve_request_generation_tokens"),
    ),
    "sglang": (
        Alias("sglang:num_running_reqs", "pdserve_requests", where=RUNNING),
        Alias("sglang:num_queue_reqs", "pdserve_requests", where=WAITING),
        Alias("sglang:num_used_tokens", "pdserve_kv_pool_tokens", where=("state", ("in_use",))),
        Alias("sglang:token_usage", "pdserve_kv_pool_usage_ratio"),
        Alias("sglang:cache_hit_rate", HIT_RATE),
        Alias("sglang:gen_throughput", THROUGHPUT),
        Alias("sglang:num_retracted_requests", "pdserve_retractions"),
        Alias("sglang:prompt_tokens", "pdserve_prompt_tokens"),
        Alias("sglang:cached_tokens", "pdserve_prompt_tokens", where=CACHED),
        Alias("sglang:generation_tokens", "pdserve_generation_tokens"),
        Alias("sglang:num_requests", "pdserve_requests_finished"),
        Alias("sglang:time_to_first_token_seconds", "pdserve_time_to_first_token_seconds"),
        Alias("sglang:inter_token_latency_seconds", "pdserve_inter_token_latency_seconds"),
        Alias("sglang:e2e_request_latency_seconds", "pdserve_e2e_request_latency_seconds"),
    ),
}


class Growth:
    """Growth of one count for each unit of another since the last scrape: what ``rate`` computes from our counters.

    ``least``: minimum growth of the other. A scrape sooner than that gets the previous ratio.
    """

    def __init__(self, base: float, least: float) -> None:
        self._base = base
        self._least = least
        self._count = 0.0
        self._ratio = 0.0

    def ratio(self, count: float, base: float) -> float:
        """Return how much ``count`` has grown for each unit of growth of ``base`` since the last call. Both are totals.

        If ``base`` has grown by less than ``least``, return the ratio of the last call, at first 0.
        """
        if base - self._base >= self._least:
            self._ratio = (count - self._count) / (base - self._base)
            self._count, self._base = count, base
        return self._ratio


def aliased(families: Sequence[Metric], aliases: Sequence[Alias], labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield those of ``families`` that an alias renames, under its name; ``labels`` are added to each sample."""
    by_name = {family.name: family for family in families}
    for alias in aliases:
        family = by_name.get(alias.ours)
        if family is not None:
            yield _renamed(family, alias, labels)


def _renamed(family: Metric, alias: Alias, labels: Mapping[str, str]) -> Metric:
    renamed = Metric(alias.theirs, family.documentation, family.type)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in family.samples:
        if alias.where is not None and sample.labels[alias.where[0]] not in alias.where[1]:
            continue
        kept = dict(labels)
        if "le" in sample.labels:
            kept["le"] = sample.labels["le"]
        if alias.keep is not None:
            kept[alias.keep[1]] = sample.labels[alias.keep[0]]
        key = alias.theirs + sample.name.removeprefix(family.name), tuple(kept.items())
        sums[key] = sums.get(key, 0.0) + sample.value
    for (name, kept_labels), value in sums.items():
        renamed.add_sample(name, dict(kept_labels), value)
    return renamed
