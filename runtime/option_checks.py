"""Refuses combinations of server options that can't work, before any process starts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from .cluster_secret import ClusterSecret, addresses
from .cpu_list import PlacementError, parse_cpus
from .kv_event_checks import kv_event_complaints
from .options import RECENT_TOKENS, ServerOptions
from .tier_checks import session_complaints, tier_complaints
from .transfer_backends import BACKENDS
from .web.keys import KeyFileError, check_keys
from .web.ports import is_loopback
from .web.proxies import TrustedProxies

MAX_PAGE_SIZE = 1024
MAX_NICE = 19
MOST_SLOTS = 1 << 31
"""Slots are numbered in 32 bits; those of page 0 count."""
AT_LEAST_ONE = (
    "max_running_requests",
    "max_queued_requests",
    "max_logprobs_per_request",
    "max_concurrent_requests",
    "max_prefill_tokens",
    "stream_interval",
    "threads",
    "context_length",
    "tp_size",
    "nnodes",
    "ds_heavy_channel_num",
    "flashinfer_workspace_size",
    "cuda_graph_max_bs",
)
ABOVE_ZERO = (
    "schedule_conservativeness",
    "disaggregation_bootstrap_timeout",
    "disaggregation_transfer_timeout",
    "disaggregation_queue_timeout",
    "disaggregation_heartbeat_interval",
    "disaggregation_heartbeat_timeout",
    "send_timeout",
    "keep_alive_timeout",
    "watchdog_timeout",
    "startup_timeout",
)
NOT_EMPTY = (
    "model_path",
    "revision",
    "tokenizer_path",
    "tokenizer_revision",
    "served_model_name",
    "host",
    "api_key",
    "advertise_host",
    "profile_dir",
)


class OptionError(ValueError):
    """Options that can't work; the message says what to write instead."""


def check_options(options: ServerOptions) -> None:
    """Raise ``OptionError``, with every complaint on a line of its own, when an instance can't run with ``options``."""
    complaints = [
        *_numbers(options),
        *_texts(options),
        *_ports(options),
        *_cluster(options),
        *_memory(options),
        *_schedule(options),
        *_ranks(options),
        *tier_complaints(options),
        *kv_event_complaints(options),
        *session_complaints(options),
        *_double_sparsity(options),
        *_graphs(options),
    ]
    if complaints:
        raise OptionError("\n".join(complaints))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _numbers(options: ServerOptions) -> Iterator[str]:
    for name in AT_LEAST_ONE:
        value = getattr(options, name)
        if value is not None and value < 1:
            yield f"{_flag(name)} is {value}: it must be 1 or more"
    if options.compute_nice is not None and not 0 <= options.compute_nice <= MAX_NICE:
        yield f"--compute-nice is {options.compute_nice}: it must be 0 to {MAX_NICE}"
    for name in ABOVE_ZERO:
        value = getattr(options, name)
        if not (value > 0 and math.isfinite(value)):
            yield f"{_flag(name)} is {value}: it must be above 0"
    if not (options.drain_timeout >= 0 and math.isfinite(options.drain_timeout)):
        yield f"--drain-timeout is {options.drain_timeout}: it must be 0 or more"
    if options.base_gpu_id < 0:
        yield f"--base-gpu-id is {options.base_gpu_id}: GPUs are counted from 0"
    if options.random_seed < 0:
        yield f"--random-seed is {options.random_seed}: it must be 0 or more"


def _texts(options: ServerOptions) -> Iterator[str]:
    for name in NOT_EMPTY:
        value = getattr(options, name)
        if value is not None and not value.strip():
            yield f"{_flag(name)} is empty: give a value or leave the flag out"
    if options.tokenizer_revision is not None and options.tokenizer_path is None:
        yield "--tokenizer-revision is of --tokenizer-path: the model's own tokenizer has the model's --revision"
    try:
        # Of an instance on several hosts, the first one answers.
        check_keys(options if not options.node_rank else replace(options, no_keys=True))
    except KeyFileError as e:
        yield str(e)
    try:
        TrustedProxies(options.trusted_proxies)
    except ValueError as e:
        yield f"--trusted-proxies: {e}"
    if options.chat_template is not None and not Path(options.chat_template).is_file():
        yield f"--chat-template {options.chat_template}: there is no such file"
    if options.cpus is not None:
        yield from _cpus(options.cpus)


def _cpus(cpus: str) -> Iterator[str]:
    try:
        parse_cpus(cpus)
    except PlacementError as e:
        yield str(e)


def _ports(options: ServerOptions) -> Iterator[str]:
    if not 0 <= options.port <= 65535:
        yield f"--port is {options.port}: it must be 1 to 65535 (0 takes a free one)"
    # A decode's own is always a free one: there, the option says what a request means.
    least = 1 if options.disaggregation_mode == "decode" else 0
    if not least <= options.default_bootstrap_port <= 65535:
        free = "" if least else " (0 takes a free one)"
        yield f"--disaggregation-bootstrap-port is {options.default_bootstrap_port}: it must be 1 to 65535{free}"
    for name in ("disaggregation_control_port", "disaggregation_data_port"):
        if not 0 <= getattr(options, name) <= 65535:
            yield f"{_flag(name)} is {getattr(options, name)}: it must be 1 to 65535 (0 takes a free one)"
    if options.handover == "off" and options.disaggregation_mode != "unified":
        yield f"--handover off leaves a {options.disaggregation_mode} instance with nothing to do: drop one of the two"
    if options.hands_over:
        ports = {"--port": options.port, "--disaggregation-control-port": options.disaggregation_control_port}
        ports["--disaggregation-data-port"] = options.disaggregation_data_port
        ports["--disaggregation-bootstrap-port"] = options.own_bootstrap_port
        for port in sorted({p for p in ports.values() if p}):
            if len(flags := [flag for flag, given in ports.items() if given == port]) > 1:
                yield f"{' and '.join(flags)} are both {port}: an instance listens on each, so give them different ones"
    if options.kv_staging_size is not None and not 0 <= options.kv_staging_size < math.inf:
        yield f"--kv-staging-size is {options.kv_staging_size:g}: it is a number of GB, 0 for none"
    if options.hands_over:
        yield from BACKENDS[options.disaggregation_transfer_backend].check(options)
    threshold = options.disaggregation_threshold
    if threshold not in ("auto", "always", "never") and not (threshold.isascii() and threshold.isdigit()):
        yield f"--disaggregation-threshold is {threshold}: it must be auto, always, never or a number of tokens"
    if options.disaggregation_heartbeat_timeout <= options.disaggregation_heartbeat_interval:
        yield (
            f"--disaggregation-heartbeat-timeout {options.disaggregation_heartbeat_timeout} must be longer than "
            f"--disaggregation-heartbeat-interval {options.disaggregation_heartbeat_interval}, best three times as long"
        )


def _cluster(options: ServerOptions) -> Iterator[str]:
    try:
        secret = ClusterSecret.read(options.cluster_secret_file)
        addresses("--allow-bootstrap", options.allow_bootstrap)
        addresses("--drain-to", options.drain_to)
    except ValueError as e:
        yield str(e)
        return
    if options.return_kv and secret is None:
        yield "--return-kv needs --cluster-secret-file: others share what is given back, so it must be known by whom"
    if options.hands_over and secret is None and not options.insecure_cluster and not is_loopback(options.host):
        yield (
            f"--host {options.host} lets others reach the ports by which instances exchange KV: give this one and its "
            "peers the same --cluster-secret-file, or, on a network that nobody else is in, --insecure-cluster"
        )


def _memory(options: ServerOptions) -> Iterator[str]:
    page_size = options.page_size
    if not 1 <= page_size <= MAX_PAGE_SIZE or page_size & (page_size - 1):
        yield f"--page-size is {page_size}: it must be a power of two, 1 to {MAX_PAGE_SIZE}"
    if options.max_total_tokens is not None and options.max_total_tokens < max(page_size, 1):
        yield f"--max-total-tokens is {options.max_total_tokens}: the pool must hold at least one page ({page_size})"
    yield from _pool_limit(options)
    fraction = options.mem_fraction_static
    if fraction is not None and not 0 < fraction < 1:
        yield f"--mem-fraction-static is {fraction}: it is a share of the memory, between 0 and 1"
    ratio = options.swa_full_tokens_ratio
    if ratio is not None and not 0 < ratio <= 1:
        yield f"--swa-full-tokens-ratio is {ratio}: it is a share of the tokens, above 0 and at most 1"


def _pool_limit(options: ServerOptions) -> Iterator[str]:
    limit = options.max_total_tokens_limit
    if limit is None:
        return
    if limit < max(options.max_total_tokens or 0, options.page_size):
        yield f"--max-total-tokens-limit is {limit}: what the pool may grow to is no less than what it begins with"
    if limit > MOST_SLOTS - options.page_size:
        yield f"--max-total-tokens-limit is {limit}: a pool has at most {MOST_SLOTS - options.page_size} tokens"
    if options.nnodes > 1:
        yield "--max-total-tokens-limit: the pools of ranks on several hosts (--nnodes) keep their size; leave it out"
    backend = options.disaggregation_transfer_backend
    if options.hands_over and BACKENDS[backend].pins_pool:
        yield (
            f"--max-total-tokens-limit: {backend} registers the whole pool's memory at once; leave it out, or use "
            "--disaggregation-transfer-backend tcp or shm"
        )


def _schedule(options: ServerOptions) -> Iterator[str]:
    page_size, uncut = max(options.page_size, 1), options.chunked_prefill_size == -1
    chunks = {"--chunked-prefill-size": options.chunked_prefill_size, "--mixed-chunk-size": options.mixed_chunk_size}
    for flag, chunk in chunks.items():
        if chunk is None or (uncut and flag == "--chunked-prefill-size"):
            continue
        if flag == "--mixed-chunk-size" and 1 <= chunk < page_size:
            continue
        if chunk < page_size or chunk % page_size:
            example = max(chunk // page_size, 1) * page_size
            yield (
                f"{flag} is {chunk}: prompts are cut at page borders, so give a multiple of --page-size {page_size}, "
                f"like {example}{', or -1 to never cut' if flag == '--chunked-prefill-size' else ''}"
            )
    if uncut and options.mixed_chunk_size is not None:
        yield "--mixed-chunk-size cuts prompts, and --chunked-prefill-size -1 forbids it: drop one of the two"
    if options.priority_scheduling_preemption_threshold < 0:
        yield "--priority-scheduling-preemption-threshold must be 0 or more"
    if not options.uses_priorities and options.schedule_low_priority_values_first:
        yield "--schedule-low-priority-values-first says how to read priorities: add --enable-priority-scheduling"
    budget = options.itl_budget_ms
    if budget is not None and not (budget >= 0 and math.isfinite(budget)):
        yield f"--itl-budget-ms is {budget:g}: it is a time in milliseconds, like 40, or 0 for no budget"
    target = options.ttft_target_ms
    if target is not None and not (target >= 0 and math.isfinite(target)):
        yield f"--ttft-target-ms is {target:g}: it is a time in milliseconds, like 3000, or 0 for no target"
    if target and budget == 0:
        yield "--ttft-target-ms raises what --itl-budget-ms allows, and that is switched off: drop one of the two"
    if uncut and budget:
        yield "--itl-budget-ms cuts prompts, and --chunked-prefill-size -1 forbids it: drop one of the two"
    if options.schedule_policy in ("lpm", "dfs-weight") and options.disable_radix_cache:
        yield (
            f"--schedule-policy {options.schedule_policy} orders requests by their cached prefix, and "
            "--disable-radix-cache keeps none: "
            "drop one of the two"
        )


def _ranks(options: ServerOptions) -> Iterator[str]:
    size, nodes, node, address = options.tp_size, options.nnodes, options.node_rank, options.dist_init_addr
    if options.pp_size != 1:
        yield (
            f"--pp-size {options.pp_size}: there is no pipeline parallelism here: prefill and decode instances already "
            "work on different requests at once, and --tp-size divides a model that is too large for one host"
        )
    if size < 1 or nodes < 1:
        return
    if size % nodes:
        yield f"--tp-size {size} does not divide among --nnodes {nodes}: every host has as many ranks"
    if not 0 <= node < nodes:
        yield f"--node-rank is {node}: it must be 0 to {nodes - 1}, as --nnodes is {nodes}"
    if nodes > 1 and address is None:
        yield "--nnodes above 1 needs --dist-init-addr HOST:PORT, an address of the first host that the others reach"
    try:
        if len(addresses("--dist-init-addr", address)) > 1:
            yield f"--dist-init-addr is {address}: it is one HOST:PORT"
    except ValueError as e:
        yield str(e)
    if nodes > 1 and options.hands_over:
        yield (
            "--nnodes above 1 leaves each host a part of the KV, and a hand-over takes it from one place: give an "
            "instance that exchanges KV all of its ranks on one host (--nnodes 1)"
        )
    if size > 1 and options.device == "cuda" and options.hands_over:
        yield (
            f"--tp-size {size} on GPUs leaves each its own heads of the KV, and a hand-over takes whole pages from one "
            "place: give an instance that exchanges KV one GPU (--tp-size 1)"
        )
    if options.threads is not None and options.threads % max(size // nodes, 1):
        yield f"--threads {options.threads} does not divide among the {size // nodes} ranks of a host"


def _double_sparsity(options: ServerOptions) -> Iterator[str]:
    path = options.ds_channel_config_path
    if not options.enable_double_sparsity:
        if path is not None:
            yield "--ds-channel-config-path is for --enable-double-sparsity: give both or neither"
        return
    asked = "--enable-double-sparsity"
    if path is None:
        yield f"{asked} needs --ds-channel-config-path FILE: `pdserve calibrate` writes one for a model"
    elif not Path(path).is_file():
        yield f"--ds-channel-config-path {path}: there is no such file; `pdserve calibrate` writes one"
    if options.attention_backend != "torch":
        yield f"{asked} needs --attention-backend torch: the CPU kernels attend to all tokens"
    if options.kv_cache_dtype in ("fp8_e4m3", "fp8_e5m2", "int8"):
        yield f"{asked} and --kv-cache-dtype {options.kv_cache_dtype}: labels of one byte are not there; drop one"
    if options.tp_size > 1:
        yield f"{asked} and --tp-size {options.tp_size}: labels are not divided among ranks; drop one of the two"
    if options.ds_heavy_token_num < RECENT_TOKENS:
        yield (
            f"--ds-heavy-token-num is {options.ds_heavy_token_num}: the last {RECENT_TOKENS} tokens of a request are "
            "always among them, so it must be that many or more"
        )
    if options.ds_sparse_decode_threshold < 0:
        yield f"--ds-sparse-decode-threshold is {options.ds_sparse_decode_threshold}: it must be 0 or more"


def _graphs(options: ServerOptions) -> Iterator[str]:
    try:
        sizes = options.graph_sizes
    except ValueError:
        sizes = (0,)
    if any(size < 1 for size in sizes):
        yield f"--cuda-graph-bs is {options.cuda_graph_bs}: it is batch sizes of 1 or more, like 1,2,4,8"
    if options.disable_cuda_graph and (sizes or options.cuda_graph_max_bs is not None):
        yield "--disable-cuda-graph leaves --cuda-graph-bs and --cuda-graph-max-bs without a meaning: drop them"
